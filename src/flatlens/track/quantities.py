"""What a tracker measures when time is short, and standard errors of measurements on a part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flatlens.measurement import Measurement
from flatlens.measurement.quantities import Request


def one_pass(request: Request) -> Request:
    """Leave out the quantities that need passes of their own, unless nothing else was asked for.

    >>> from flatlens.measurement.quantities import read_request
    >>> one_pass(read_request(["nmls", "hessian_trace"])).listed
    ['nmls']
    """
    rest = replace(request, own_passes=())
    return rest if rest.listed else request


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
            # A sketch has an error of its own.
            f"{name}_se": float(
                np.hypot(scale * np.std(values, ddof=1), m.values.get(f"{name}_se", 0.0))
            )
            for name, values in m.samples.items()
            if name in m.values
        }
