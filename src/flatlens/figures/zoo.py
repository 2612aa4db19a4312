"""Draw normalised MLS against adaptive sharpness over models, coloured by class: Figure 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatlens.analysis import run_table
from flatlens.analysis.model_trend import AXES, order, points, rank_correlation
from flatlens.analysis.statistics import Interval
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.figures import style
from flatlens.figures.correlations import number
from flatlens.figures.trend_line import draw_trend
from flatlens.zoo.zoo import converged


@no_type_check
@typed_arguments
def zoo(df: pd.DataFrame, x: str = "adaptive_sharpness", y: str = "normalized_mls") -> Figure:
    """Draw one point per model on logarithmic axes, with standard errors over images.

    The line is a robust fit (Theil and Sen) of the logarithms. Spearman's rank correlation has a
    95 % bootstrap interval over classes, because variants of one class are not independent, and one
    over models. Classes that lie far off the line are named beside their points. Models whose
    Lanczos iteration did not converge are left out, and the title gives their number.

    Args:
        df: table of `read_runs` with one row per model.
        x: column of the horizontal axis; another estimator of it can be drawn as well.
        y: column of the vertical axis.
    """
    left_out = int((~converged(df)).sum())
    df, a, b, classes = points(df, x, y)
    names = order(classes)
    with style.look():
        figure, axes = style.figure(1, 1, height=3.6)
        ax: Axes = axes[0, 0]
        for k, name in enumerate(names):
            chosen = classes == name
            errors: dict[str, Any] = {
                side: run_table.numbers(df[chosen], f"{column}_se")
                for side, column in (("xerr", x), ("yerr", y))
                if f"{column}_se" in df
            }
            ax.errorbar(10 ** a[chosen], 10 ** b[chosen], **errors, label=name, **_marker(k))
        draw_trend(ax, a, b, classes, above=9)
        ax.set_xlabel(AXES.get(x, style.name(x)))
        ax.set_ylabel(AXES.get(y, style.name(y)))
        over = rank_correlation(a, b, classes), rank_correlation(a, b)
        _legend(figure, ax, *over, len(names), left_out)
    return figure


def _marker(k: int) -> dict[str, Any]:
    colour = style.COLOURS[k % len(style.COLOURS)]
    shape = style.MARKERS[(k // len(style.COLOURS)) % len(style.MARKERS)]
    return {
        "color": colour, "marker": shape, "ms": 3.5, "mew": 0, "alpha": 0.85, "linestyle": "none",
        "elinewidth": 0.5,
    }  # fmt: skip


def _legend(
    figure: Figure, ax: Axes, over: Interval, models: Interval, classes: int, left_out: int
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
