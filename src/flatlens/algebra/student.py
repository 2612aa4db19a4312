"""Student's t, and standard errors of positive means from few values."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

LEVEL = 0.95  # coverage of every interval
WIDEST = 50.0  # largest exponent: the error stays a finite number


@cache
def t_quantile(freedom: int | float) -> float:
    """Return the number that |t| of Student's distribution stays below in 95 % of cases.

    With t = sqrt(v) tan(a) the density of a is proportional to cos(a)^(v - 1).

    >>> [round(t_quantile(v), 3) for v in (1, 4, 30)]
    [12.706, 2.776, 2.042]
    """
    angle = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angle) ** (max(freedom, 1) - 1)
    below = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(LEVEL * below[-1], below, angle))


def log_scale_error(value: float, error: float, count: int) -> float:
    """Return the standard error e for which ``value`` +- t e reaches as high as on the log scale.

    A mean of squares is skewed: when the mean comes out low, so does its spread, and the plain
    interval ends below the true value too often. With the relative error a = error / value the
    upper end of the interval is taken on the log scale, value exp(t a sqrt(1 + 2 a^2)); the root is
    the spread of a itself. In the worst case, squares of one normal variable, the plain interval of
    8 values covers 85 % and this one 94 %; for many effective dimensions both agree.

    Args:
        value: a mean of ``count`` independent values, none of them negative.
        error: its plain standard error, the standard deviation over sqrt(count).
        count: number of values, 2 or more.

    >>> round(log_scale_error(1.0, 0.01, 100), 4)
    0.0101
    >>> round(log_scale_error(1.0, 0.5, 8), 2)
    1.38
    """
    if not (value > 0 and error > 0):
        return error
    t, a = t_quantile(count - 1), error / value
    return value * math.expm1(min(t * a * math.sqrt(1 + 2 * a * a), WIDEST)) / t


def plain_rtol(rtol: float, count: int) -> float:
    """Return the plain relative error for which `log_scale_error` gives ``rtol``.

    >>> a = plain_rtol(0.14, 30)
    >>> round(log_scale_error(1.0, a, 30), 9)
    0.14
    """
    t = t_quantile(count - 1)
    squared = (math.log1p(t * rtol) / t) ** 2  # a^2 + 2 a^4
    return math.sqrt((math.sqrt(1 + 8 * squared) - 1) / 4)
