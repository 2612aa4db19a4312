"""Arithmetic with infinite right-hand sides and with logarithms of volumes."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from flatlens.probes import Array


def quotient(norm2: Float[Array, " n"], size2: Float[Array, " n"]) -> Float[Array, " n"]:
    """Divide squared norms by squared sizes; 0 / 0 is 0, and anything else over 0 is inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(norm2 > 0, norm2 / size2, 0.0)


def product(a: Any, b: Any) -> float:
    """Multiply two factors of a right-hand side; it is inf if a factor is.

    0 times inf must not become a finite right-hand side, because it bounds nothing.
    """
    return float("inf") if np.isinf(a) or np.isinf(b) else float(a * b)


def infinite_if_unknown(log: float) -> float:
    """Return inf for NaN, which is the logarithm of 0 times inf (-inf + inf)."""
    return float("inf") if np.isnan(log) else log


def log(values: Any) -> Any:
    """Take the logarithm; log 0 is -inf without a warning."""
    with np.errstate(divide="ignore"):
        return np.log(values)


def log_sum_exp(values: Any) -> float:
    """Return log(sum(exp(values))) without overflow.

    >>> round(log_sum_exp([1000.0, 1000.0]) - 1000.0, 12) == round(float(np.log(2)), 12)
    True
    """
    values = np.asarray(values, dtype=float)
    top = values.max()
    if not np.isfinite(top):
        return float(top)
    return float(top + np.log(np.exp(values - top).sum()))


def log_mean_exp(values: Array) -> float:
    """Return log(mean(exp(values))) without overflow."""
    return log_sum_exp(values) - float(np.log(len(values)))
