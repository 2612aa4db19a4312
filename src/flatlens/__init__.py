"""flatlens: how flat is the loss, how compressed the representation, what one forces on the other.

``measure`` does it all in one call. Behind it: ``probe`` looks once at a network (one forward and
one vector-Jacobian product per output), and every metric is arithmetic on what it saw.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatlens.errors import FlatlensError

if TYPE_CHECKING:
    from flatlens import figures, perturb
    from flatlens.estimates import Estimate
    from flatlens.experiments.sweep import sweep
    from flatlens.inequalities import Bounds, Inequality, bounds
    from flatlens.measurement import Measurement, measure
    from flatlens.metrics import (
        adaptive_sharpness,
        input_invariant_mls,
        local_dimension,
        log_volume,
        matrix_normalized_sharpness,
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
    from flatlens.passes import probe
    from flatlens.probes import InputProbe, LayerProbe, ParameterProbe, Probe, Sketch
    from flatlens.sketched import sketch
    from flatlens.track import Run, Tracker, at, every, log_spaced, on_interpolation, read_runs

__version__ = "0.1.0"

__all__ = [
    "Bounds",
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
    "Tracker",
    "adaptive_sharpness",
    "at",
    "bounds",
    "every",
    "figures",
    "input_invariant_mls",
    "local_dimension",
    "log_spaced",
    "log_volume",
    "matrix_normalized_sharpness",
    "measure",
    "mls",
    "network_volume",
    "nmls",
    "nmls_through",
    "normalized_mls",
    "on_interpolation",
    "perturb",
    "probe",
    "read_runs",
    "sharpness",
    "sharpness_untied",
    "sketch",
    "sweep",
    "volume",
    "weighted_nmls",
]

FOLDERS = ("figures", "perturb")
MODULES = (
    *("inequalities", "measurement", "metrics", "passes", "probes", "sketched"),
    *("estimates", "track", "experiments.sweep"),
)


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: torch takes a second, ``flatlens --help`` must not."""
    if name not in __all__:
        raise AttributeError(f"module 'flatlens' has no attribute {name!r}")
    if name in FOLDERS:
        return import_module(f"flatlens.{name}")
    for module in MODULES:
        found = getattr(import_module(f"flatlens.{module}"), name, None)
        if found is not None:
            globals()[name] = found
            return found
    raise AttributeError(name)


def __dir__() -> list[str]:
    return __all__
