"""Normalised MLS against adaptive sharpness over models, coloured by class: Figure 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatlens.analysis import tables as records
from flatlens.analysis.evidence import Verdict, judge
from flatlens.analysis.statistics import DRAWS, Array, Estimate, correlation, interval, ranks
from flatlens.errors import FlatlensError
from flatlens.figures import style
from flatlens.figures.correlations import number
from flatlens.zoo.zoo import converged

AXES = {"adaptive_sharpness": "adaptive sharpness", "normalized_mls": "normalised MLS"}
FEWEST = 3  # models
FAR = 2.0  # a cluster is an outlier from so many (robust) standard deviations off the trend


def zoo(df: pd.DataFrame, x: str = "adaptive_sharpness", y: str = "normalized_mls") -> Figure:
    """One point a model, both axes logarithmic, with standard errors over images.

    The line is a robust fit (Theil and Sen) of the logarithms. Spearman's rank correlation comes
    with a 95 % bootstrap interval over classes, for variants of one class are not independent, and
    one over models. Classes that lie far off the line as a whole are named beside their points.
    `x` and `y` are columns of `read_runs`: other estimators of the axes can be drawn as well.
    Models whose Lanczos did not converge are left out, and their number is told.
    """
    left_out = int((~converged(df)).sum())
    df, a, b, classes = points(df, x, y)
    names = order(classes)
    with style.look():
        figure, axes = style.figure(1, 1, height=3.6)
        ax: Axes = axes[0, 0]
        for k, name in enumerate(names):
            mine = classes == name
            errors: dict[str, Any] = {
                side: records.numbers(df[mine], f"{column}_se")
                for side, column in (("xerr", x), ("yerr", y))
                if f"{column}_se" in df
            }
            ax.errorbar(10 ** a[mine], 10 ** b[mine], **errors, label=name, **_marker(k))
        slope, start = trend(a, b)
        ends = np.array([a.min(), a.max()])
        ax.plot(10**ends, 10 ** (slope * ends + start), color="0.3", linestyle=(0, (4, 2)), lw=0.9)
        for name, column, row in outliers(a, b, classes):
            ax.annotate(
                name, (10**column, 10**row), xytext=(0, 9), textcoords="offset points", size=6,
                ha="center", weight="bold",
            )  # fmt: skip
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel(AXES.get(x, style.name(x)))
        ax.set_ylabel(AXES.get(y, style.name(y)))
        over = rank_correlation(a, b, classes), rank_correlation(a, b)
        _legend(figure, ax, *over, len(names), left_out)
    return figure


def points(df: pd.DataFrame, x: str, y: str) -> tuple[pd.DataFrame, Array, Array, Any]:
    """The models that have both numbers, converged; the logarithms of these, and their classes."""
    records.require(df, ["model", "class", x, y])
    a, b = records.numbers(df, x), records.numbers(df, y)
    good = np.isfinite(a) & np.isfinite(b) & (a > 0) & (b > 0) & converged(df)
    if good.sum() < FEWEST:
        raise FlatlensError(f"Figure 3 needs {FEWEST} models or more, there are {good.sum()}.")
    df = df[good]
    return df, np.log10(a[good]), np.log10(b[good]), df["class"].astype(str).to_numpy()


def claims(df: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """What the paper says of Figure 3, judged on these models.

    V1: Spearman's coefficient is above 0, by its interval over classes. V2: the class of MobileViT
    lies to the upper left and two of FastViT to the lower right; *upper* is above the trend of all
    models, *left* is below their median sharpness.
    """
    _, a, b, classes = points(df, *AXES)
    e = rank_correlation(a, b, classes)
    slope, start = trend(a, b)
    upper, left = b > slope * a + start, a < np.median(a)
    mobile, fast = (
        np.array([c.startswith(name) for c in classes]) for name in ("mobilevit", "fastvit")
    )
    at_left, at_right = (mobile & upper & left).sum(), (fast & ~upper & ~left).sum()
    verdict: Verdict = "inconclusive"
    if mobile.any() and fast.sum() > 1:
        there = at_left == mobile.sum() and at_right > 1
        verdict = "supported" if there else "not supported"
    found = f"{at_left} of {mobile.sum()} MobileViT upper left, "
    found += f"{at_right} of {fast.sum()} FastViT lower right"
    rho = f"Spearman's rho {number(e.value)} [{number(e.low)}, {number(e.high)}] over classes"
    return {
        "V1": {
            "says": "normalised MLS rises with adaptive sharpness over models",
            "found": rho,
            "verdict": judge(e),
        },
        "V2": {
            "says": "MobileViT cluster at the upper left, two FastViT at the lower right",
            "found": found,
            "verdict": verdict,
        },
    }


def order(classes: Any) -> list[str]:
    """Classes with most models first."""
    return sorted(set(classes), key=lambda c: (-int((classes == c).sum()), c))


def trend(a: Array, b: Array) -> tuple[float, float]:
    """Slope and start of Theil and Sen's line: the median slope over all pairs of points.

    >>> trend(np.arange(5.0), np.array([1.0, 3.0, 5.0, 7.0, 99.0]))
    (2.0, 1.0)
    """
    i, j = np.triu_indices(len(a), 1)
    apart = a[i] != a[j]
    if not apart.any():
        return 0.0, float(np.median(b))
    slope = float(np.median((b[j] - b[i])[apart] / (a[j] - a[i])[apart]))
    return slope, float(np.median(b - slope * a))


def rank_correlation(a: Array, b: Array, classes: Sequence[Any] | Any = None) -> Estimate:
    """Spearman's coefficient with a bootstrap over models or, if they are given, over classes.

    >>> e = rank_correlation(np.arange(6.0), np.arange(6.0) ** 2, list("aabbcc"))
    >>> e.value, e.low, e.high
    (1.0, 1.0, 1.0)
    """
    names = np.arange(len(a)) if classes is None else np.asarray(classes)
    parts = [np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())]
    value = float(correlation(ranks(a), ranks(b)))
    if len(parts) < FEWEST:
        return Estimate(value, np.nan, np.nan, len(a), value)
    draw = np.random.default_rng(0)
    found = []
    for _ in range(DRAWS):
        rows = np.concatenate([parts[k] for k in draw.integers(len(parts), size=len(parts))])
        found.append(float(correlation(ranks(a[rows]), ranks(b[rows]))))
    return Estimate(value, *interval(np.array(found)), len(a), value)


def outliers(a: Array, b: Array, classes: Any) -> list[tuple[str, float, float]]:
    """Classes whose median distance from the trend is large, and where their middle is.

    The scale is that of all models, from the median absolute deviation.
    """
    slope, start = trend(a, b)
    off = b - slope * a - start
    scale = 1.4826 * float(np.median(np.abs(off - np.median(off))))
    found = []
    for name in dict.fromkeys(np.asarray(classes).tolist()):
        mine = classes == name
        middle = float(np.median(off[mine]))
        if scale > 0 and abs(middle) > FAR * scale:
            found.append((str(name), float(np.median(a[mine])), float(b[mine].max())))
    return found


def _marker(k: int) -> dict[str, Any]:
    colour = style.COLOURS[k % len(style.COLOURS)]
    shape = style.MARKERS[(k // len(style.COLOURS)) % len(style.MARKERS)]
    return {
        "color": colour, "marker": shape, "ms": 3.5, "mew": 0, "alpha": 0.85, "linestyle": "none",
        "elinewidth": 0.5,
    }  # fmt: skip


def _legend(
    figure: Figure, ax: Axes, over: Estimate, models: Estimate, classes: int, left_out: int
) -> None:
    title = f"{models.n} models of {classes} classes; Spearman's ρ {number(models.value)}"
    for estimate, what in ((over, "classes"), (models, "models")):
        if np.isfinite(estimate.low):
            title += f", [{number(estimate.low)}, {number(estimate.high)}] over {what}"
    title += f"; {left_out} left out, not converged" if left_out else ""
    figure.legend(
        *ax.get_legend_handles_labels(), loc="outside upper center", ncols=6, title=title,
        title_fontsize=style.RC["legend.fontsize"], handletextpad=0.1, columnspacing=1.0,
    )  # fmt: skip
