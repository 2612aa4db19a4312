"""flatlens: how flat is the loss, how compressed the representation, what one forces on the other.

``measure`` does it all in one call. Behind it: ``probe`` looks once at a network (one forward and
one vector-Jacobian product per output), and every metric is arithmetic on what it saw.
"""

from flatlens.errors import FlatlensError
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
from flatlens.probes import InputProbe, LayerProbe, ParameterProbe, Probe

__version__ = "0.1.0"

__all__ = [
    "FlatlensError",
    "InputProbe",
    "LayerProbe",
    "Measurement",
    "ParameterProbe",
    "Probe",
    "adaptive_sharpness",
    "input_invariant_mls",
    "local_dimension",
    "log_volume",
    "matrix_normalized_sharpness",
    "measure",
    "mls",
    "network_volume",
    "nmls",
    "nmls_through",
    "normalized_mls",
    "probe",
    "sharpness",
    "sharpness_untied",
    "volume",
    "weighted_nmls",
]
