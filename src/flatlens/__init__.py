"""flatlens: how flat is the loss, how compressed the representation, what one forces on the other.

``measure`` does it all in one call. It uses ``probe``, which passes once over a network (one
forward pass and one vector-Jacobian product per output). Every metric is arithmetic on the numbers
of a probe.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatlens.errors import FlatlensError

if TYPE_CHECKING:
    from flatlens import figures, penalties, perturb
    from flatlens.algebra.traces import Estimate
    from flatlens.gauss_newton.computing import spectrum
    from flatlens.gauss_newton.result import Spectrum
    from flatlens.geometry.table import representations
    from flatlens.inequalities import Bounds, Inequality, bounds
    from flatlens.measurement import Measurement
    from flatlens.measurement.comparison import Comparison, compare
    from flatlens.measurement.measuring import measure
    from flatlens.metrics import (
        adaptive_sharpness,
        input_invariant_mls,
        local_dimension,
        log_volume,
        matrix_normalized_sharpness,
        max_sensitivity,
        mls,
        network_volume,
        nmls,
        nmls_through,
        normalized_mls,
        sharpness,
        sharpness_untied,
        volume,
        weighted_nmls,
    )
    from flatlens.passes.probing import probe, sketch
    from flatlens.probes import InputProbe, LayerProbe, ParameterProbe, Probe, Sketch
    from flatlens.runs import Run, read_runs
    from flatlens.track import Tracker, at, every, log_spaced, on_interpolation
    from flatlens.training.sweep import sweep

__version__ = "0.1.0"

__all__ = [
    "Bounds",
    "Comparison",
    "Estimate",
    "FlatlensError",
    "Inequality",
    "InputProbe",
    "LayerProbe",
    "Measurement",
    "ParameterProbe",
    "Probe",
    "Run",
    "Sketch",
    "Spectrum",
    "Tracker",
    "adaptive_sharpness",
    "at",
    "bounds",
    "compare",
    "every",
    "figures",
    "input_invariant_mls",
    "local_dimension",
    "log_spaced",
    "log_volume",
    "matrix_normalized_sharpness",
    "max_sensitivity",
    "measure",
    "mls",
    "network_volume",
    "nmls",
    "nmls_through",
    "normalized_mls",
    "on_interpolation",
    "penalties",
    "perturb",
    "probe",
    "read_runs",
    "representations",
    "sharpness",
    "sharpness_untied",
    "sketch",
    "spectrum",
    "sweep",
    "volume",
    "weighted_nmls",
]

# The module that holds each name. A name is imported when it is first used: torch takes a second,
# and ``flatlens --help`` must not wait for it.
_HOMES = {
    "algebra.traces": ("Estimate",),
    "gauss_newton.computing": ("spectrum",),
    "gauss_newton.result": ("Spectrum",),
    "geometry.table": ("representations",),
    "measurement.comparison": ("Comparison", "compare"),
    "inequalities": ("Bounds", "Inequality", "bounds"),
    "measurement": ("Measurement",),
    "measurement.measuring": ("measure",),
    "metrics": (
        *("sharpness", "sharpness_untied", "adaptive_sharpness", "matrix_normalized_sharpness"),
        *("mls", "nmls", "nmls_through", "weighted_nmls", "normalized_mls", "input_invariant_mls"),
        *("volume", "log_volume", "network_volume", "local_dimension", "max_sensitivity"),
    ),
    "passes.probing": ("probe", "sketch"),
    "probes": ("InputProbe", "LayerProbe", "ParameterProbe", "Probe", "Sketch"),
    "runs": ("Run", "read_runs"),
    "track": ("Tracker", "at", "every", "log_spaced", "on_interpolation"),
    "training.sweep": ("sweep",),
}
_FOLDERS = ("figures", "penalties", "perturb")


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return import_module(f"flatlens.{name}")
    for module, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"flatlens.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module 'flatlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
