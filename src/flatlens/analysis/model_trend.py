"""Trend and rank correlation of two quantities over models: the numbers of Figure 3.

Variants of one class of models are not independent, so intervals over classes are given beside
intervals over models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.statistics import (
    DRAWS,
    Array,
    Interval,
    correlation,
    percentile_interval,
    ranks,
)
from flatlens.errors import FlatlensError
from flatlens.zoo.zoo import converged

AXES = {"adaptive_sharpness": "adaptive sharpness", "normalized_mls": "normalised MLS"}
FEWEST_MODELS = 3  # Fewest models for a trend, and fewest classes for an interval.
FAR = 2.0  # Robust standard deviations from which on a class is off the trend.


def estimates(df: pd.DataFrame, x: str, y: str) -> tuple[pd.DataFrame, Array, Array, Any]:
    """Select the models that have both numbers and whose Lanczos iteration converged.

    An estimate of the sharpness from random perturbations may be negative. It has a rank, but no
    place on a logarithmic axis.

    Args:
        df: table with columns `model`, `class`, `x` and `y`.
        x: column of the horizontal axis.
        y: column of the vertical axis.

    Returns:
        The table of these models, `x`, `y`, and the class of each model.

    Raises:
        FlatlensError: if fewer than three models remain.
    """
    run_table.require(df, ["model", "class", x, y])
    a, b = run_table.numbers(df, x), run_table.numbers(df, y)
    return _selected(df, a, b, np.isfinite(a) & np.isfinite(b) & converged(df))


def points(df: pd.DataFrame, x: str, y: str) -> tuple[pd.DataFrame, Array, Array, Any]:
    """Select the models of `estimates` whose numbers are positive, and take logarithms.

    Args:
        df: table with columns `model`, `class`, `x` and `y`.
        x: column of the horizontal axis.
        y: column of the vertical axis.

    Returns:
        The table of these models, log10 of `x`, log10 of `y`, and the class of each model.

    Raises:
        FlatlensError: if fewer than three models remain.
    """
    df, a, b, _ = estimates(df, x, y)
    df, a, b, classes = _selected(df, a, b, (a > 0) & (b > 0))
    return df, np.log10(a), np.log10(b), classes


def _selected(
    df: pd.DataFrame, a: Array, b: Array, good: Any
) -> tuple[pd.DataFrame, Array, Array, Any]:
    if good.sum() < FEWEST_MODELS:
        raise FlatlensError(
            f"Figure 3 needs {FEWEST_MODELS} models or more, there are {good.sum()}."
        )
    df = df[good]
    return df, a[good], b[good], df["class"].astype(str).to_numpy()


def order(classes: Any) -> list[str]:
    """Return the classes, those with most models at the front."""
    return sorted(set(classes), key=lambda c: (-int((classes == c).sum()), c))


def trend(a: Array, b: Array) -> tuple[float, float]:
    """Return slope and intercept of Theil and Sen's line: the median slope over pairs of points.

    >>> trend(np.arange(5.0), np.array([1.0, 3.0, 5.0, 7.0, 99.0]))
    (2.0, 1.0)
    """
    i, j = np.triu_indices(len(a), 1)
    apart = a[i] != a[j]
    if not apart.any():
        return 0.0, float(np.median(b))
    slope = float(np.median((b[j] - b[i])[apart] / (a[j] - a[i])[apart]))
    return slope, float(np.median(b - slope * a))


def rank_correlation(a: Array, b: Array, classes: Sequence[Any] | Any = None) -> Interval:
    """Estimate Spearman's coefficient with a bootstrap over models or, if given, over classes.

    >>> e = rank_correlation(np.arange(6.0), np.arange(6.0) ** 2, list("aabbcc"))
    >>> e.value, e.low, e.high
    (1.0, 1.0, 1.0)
    """
    names = np.arange(len(a)) if classes is None else np.asarray(classes)
    units = [np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())]
    value = float(correlation(ranks(a), ranks(b)))
    if len(units) < FEWEST_MODELS:
        return Interval(value, np.nan, np.nan, len(a), value)
    draw = np.random.default_rng(0)
    bootstrap = []
    for _ in range(DRAWS):
        sample = np.concatenate([units[k] for k in draw.integers(len(units), size=len(units))])
        bootstrap.append(float(correlation(ranks(a[sample]), ranks(b[sample]))))
    return Interval(value, *percentile_interval(np.array(bootstrap)), len(a), value)


def outliers(a: Array, b: Array, classes: Any) -> list[tuple[str, float, float]]:
    """Return the classes whose median distance from the trend is large, and where to label them.

    The scale is that of all models, from the median absolute deviation.

    Returns:
        For each such class its name, the median of `a` and the maximum of `b`.
    """
    slope, start = trend(a, b)
    off = b - slope * a - start
    scale = 1.4826 * float(np.median(np.abs(off - np.median(off))))
    far = []
    for name in dict.fromkeys(np.asarray(classes).tolist()):
        mine = classes == name
        middle = float(np.median(off[mine]))
        if scale > 0 and abs(middle) > FAR * scale:
            far.append((str(name), float(np.median(a[mine])), float(b[mine].max())))
    return far
