"""Estimates with a 95 % interval: means over seeds (Student's t), correlations (bootstrap).

Only NumPy. Every bootstrap draws from a generator with a fixed seed, so the same records give the
same interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

LEVEL = 0.95
DRAWS = 2_000
FEWEST = 3  # runs of a configuration that can stand for it in a bootstrap

Array = np.ndarray[Any, np.dtype[np.float64]]
Index = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; both ends are nan where the data do not allow one."""

    value: float
    low: float
    high: float
    n: int
    effect: float  # the value in units of the scatter between runs; of a correlation, itself


NOTHING = Estimate(math.nan, math.nan, math.nan, 0, math.nan)


def t_quantile(freedom: int | float) -> float:
    """The number that |t| stays below in 95 % of cases.

    With t = sqrt(v) tan(a) the density of a is proportional to cos(a)^(v - 1).

    >>> [round(t_quantile(v), 3) for v in (1, 4, 30)]
    [12.706, 2.776, 2.042]
    """
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (max(freedom, 1) - 1)
    below = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(LEVEL * below[-1], below, angle))


def combination(groups: Sequence[Array], weights: Sequence[float]) -> Estimate:
    """sum_k weight_k mean(group_k), each group with a variance of its own (Welch, Satterthwaite).

    >>> e = combination([np.array([1.0, 2.0, 3.0])], [1.0])
    >>> round(e.value, 3), round(e.low, 3), round(e.high, 3)
    (2.0, -0.484, 4.484)
    """
    used = [(g, w) for g, w in zip(groups, weights, strict=True) if len(g)]
    n = sum(len(g) for g, _ in used)
    if len(used) < len(groups) or not used:
        return NOTHING
    value = float(sum(w * g.mean() for g, w in used))
    several = [(g, w) for g, w in used if len(g) > 1]
    if len(several) < len(used):
        return Estimate(value, math.nan, math.nan, n, math.nan)
    parts = [(w * w * g.var(ddof=1) / len(g), len(g) - 1) for g, w in used]
    error2 = sum(part for part, _ in parts)
    freedom = error2**2 / sum(p * p / f for p, f in parts) if error2 > 0 else float(n - len(used))
    half = t_quantile(freedom) * math.sqrt(error2)
    spread = math.sqrt(
        sum(g.var(ddof=1) * (len(g) - 1) for g, _ in used) / sum(f for _, f in parts)
    )
    effect = value / spread if spread > 0 else math.copysign(math.inf, value)
    return Estimate(value, value - half, value + half, n, effect)


def averaged(groups: list[Array]) -> Estimate:
    """Mean of the means of configurations; where one has a single run, plain mean over runs."""
    if not groups:
        return NOTHING
    if min(map(len, groups)) < 2:
        groups = [np.concatenate(groups)]
    return combination(groups, [1 / len(groups)] * len(groups))


def median(values: Array) -> float:
    """Median of what is finite, nan of nothing."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of n."""
    z2 = 1.959964**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def correlation(x: Array, y: Array) -> Array:
    """Pearson's coefficient along the last axis; nan where x or y does not vary."""
    x = x - x.mean(axis=-1, keepdims=True)
    y = y - y.mean(axis=-1, keepdims=True)
    norms = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norms > 0, (x * y).sum(axis=-1) / norms, np.nan)


def ranks(x: Array) -> Array:
    """Ranks along the last axis, ties shared: Spearman's coefficient is Pearson's of these."""
    table = pd.DataFrame(np.atleast_2d(x)).rank(axis=1).to_numpy()
    return table.reshape(x.shape)


def resamples(groups: Sequence[Any], draws: int = DRAWS, seed: int = 0) -> Index:
    """Rows of a bootstrap, `[draws, n]`.

    Runs are drawn within their configuration, whose number is part of the design. Where some
    configuration has fewer than three runs that would hide the scatter: then among all.
    """
    names = np.asarray(groups)
    parts = [np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())]
    if min(len(part) for part in parts) < FEWEST:
        parts = [np.arange(len(names))]
    draw = np.random.default_rng(seed)
    index = np.empty((draws, len(names)), np.int64)
    for part in parts:
        index[:, part] = part[draw.integers(len(part), size=(draws, len(part)))]
    return index


def interval(values: Array) -> tuple[float, float]:
    """Both ends of the middle 95 % of bootstrap values."""
    values = values[np.isfinite(values)]
    if not len(values):
        return math.nan, math.nan
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def bootstrap(
    statistic: Callable[..., Array], columns: Sequence[Array], groups: Sequence[Any]
) -> Estimate:
    """A statistic of columns (along their last axis) with a bootstrap interval over the rows."""
    good = np.isfinite(np.stack(columns)).all(axis=0)
    kept = [column[good] for column in columns]
    n = int(good.sum())
    if n < FEWEST:
        return Estimate(math.nan, math.nan, math.nan, n, math.nan)
    value = float(statistic(*kept))
    index = resamples(np.asarray(groups)[good].tolist())
    low, high = interval(statistic(*(column[index] for column in kept)))
    return Estimate(value, low, high, n, value)


def centred(x: Array, groups: Sequence[Any]) -> Array:
    """What is left of x along the last axis after the mean of its group is taken away."""
    names = np.asarray(groups)
    x = x.copy()
    for name in dict.fromkeys(names.tolist()):
        x[..., names == name] -= x[..., names == name].mean(axis=-1, keepdims=True)
    return x


def correlation_table(
    df: pd.DataFrame, quantities: Sequence[str], groups: Sequence[Any]
) -> pd.DataFrame:
    """Pearson's and Spearman's coefficients of all pairs of columns, one row a pair."""
    rows = []
    for k, x in enumerate(quantities):
        for y in quantities[k + 1 :]:
            columns = [df[name].to_numpy(np.float64) for name in (x, y)]
            pearson = bootstrap(correlation, columns, groups)
            spearman = bootstrap(lambda a, b: correlation(ranks(a), ranks(b)), columns, groups)
            rows.append({
                "x": x, "y": y, "n": pearson.n,
                "pearson": pearson.value, "pearson_low": pearson.low, "pearson_high": pearson.high,
                "spearman": spearman.value, "spearman_low": spearman.low,
                "spearman_high": spearman.high,
            })  # fmt: skip
    return pd.DataFrame(rows)
