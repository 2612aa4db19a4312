"""Quantities of a tracker when time is short, and standard errors of partial measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flatlens.errors import FlatlensError
from flatlens.measurement import Measurement
from flatlens.measurement.quantities import EDGE, Request


def one_pass(request: Request) -> Request:
    """Leave out the quantities that need passes of their own, unless nothing else was asked for.

    >>> from flatlens.measurement.quantities import read_request
    >>> one_pass(read_request(["nmls", "hessian_trace"])).listed
    ['nmls']
    """
    rest = replace(request, own_passes=(), edge=False)
    return rest if rest.listed else request


def edge_of_stability(values: dict[str, float], learning_rate: float | None) -> dict[str, float]:
    """Return lr lambda_max / 2, above 1 of which gradient descent is unstable (Cohen et al. 2021).

    Args:
        values: a record with ``lambda_max``.
        learning_rate: learning rate of the optimiser, or None if it is unknown.

    Raises:
        FlatlensError: if the learning rate is unknown.
    """
    if learning_rate is None:
        raise FlatlensError(
            "edge_of_stability needs the learning rate; call tracker.attach(optimizer), or pass "
            "lr=... with the step"
        )
    return {EDGE: learning_rate * values["lambda_max"] / 2}


def errors_of_part(m: Measurement, n: int) -> dict[str, float]:
    """Estimate standard errors of means over a part of n samples.

    Args:
        m: a measurement of some of the samples, without replacement.
        n: number of all samples.

    Returns:
        ``NAME_se`` for every quantity that is a mean over samples.
    """
    scale = np.sqrt(1 / m.probe.n - 1 / n)
    with np.errstate(invalid="ignore"):  # a volume of 0 has no logarithm
        return {
            # A sketch has its own error.
            f"{name}_se": float(
                np.hypot(scale * np.std(values, ddof=1), m.values.get(f"{name}_se", 0.0))
            )
            for name, values in m.samples.items()
            if name in m.values
        }
