"""The tolerance of a comparison, from rounding and from sampling."""

from __future__ import annotations

import numpy as np
import torch

from flatlens.algebra.wide_tensor import HALF
from flatlens.metrics import (
    adaptive_sharpness,
    input_invariant_mls,
    mls,
    nmls,
    sharpness,
    sharpness_untied,
)
from flatlens.per_sample import mean_over_users
from flatlens.probes import Probe, Sketch

ADAPTIVE = adaptive_sharpness.__name__


def tolerance(p: Probe) -> float:
    """Return the relative rounding that a comparison allows.

    In half precision each layer rounds the derivative that passes through it. Such errors are
    independent, so they grow with the square root of the number of layers.

    The sides of a sketch are estimates. Their tolerance grows by four standard errors of the least
    certain side. The factor is squared, because a side may be the square of an estimate.
    """
    rounding = 1e-9 if p.dtype == torch.float64 else 1e-4
    if p.dtype in HALF:
        rounding = 8 * torch.finfo(p.dtype).eps * float(np.sqrt(1 + len(p.layers)))
    if p.sketch is None:
        return rounding
    room = student(p.sketch.directions - 1) * relative_error(p, p.sketch)
    return rounding + ((1 + room) ** 2 - 1)


def student(freedom: int) -> float:
    """Return the quantile of Student's t that is 4 for the normal distribution.

    This is Wallace's approximation, which is above the true quantile.
    """
    z = 4 * (8 * freedom + 3) / (8 * freedom + 1)
    return float(np.sqrt(freedom * np.expm1(z**2 / freedom)))


def relative_error(p: Probe, sketch: Sketch) -> float:
    """Return the largest relative standard error among the estimates that enter a side."""
    totals = (sharpness, sharpness_untied, adaptive_sharpness, input_invariant_mls, mls, nmls)
    pairs = [
        (sketch.errors[metric.__name__], float(metric.samples(p).mean()))
        for metric in totals
        if metric.__name__ in sketch.errors
    ]
    for q, errors in zip(p.layers, sketch.layer_errors, strict=True):
        for name, values in (("sharpness", q.grad_weight + q.grad_bias), (ADAPTIVE, q.adaptive)):
            if name in errors:
                pairs.append((errors[name], mean_over_users(q, values)))
    return max((error / value for error, value in pairs if value > 0), default=0.0)
