"""The robust trend over models on logarithmic axes, with the names of classes far from it."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from flatlens.analysis.model_trend import outliers, trend
from flatlens.analysis.statistics import Array


def draw_trend(ax: Axes, x: Array, y: Array, classes: Any, above: int) -> None:
    """Draw Theil and Sen's line through points, and name the classes that lie far from it.

    Args:
        ax: the axes, which become logarithmic.
        x: decimal logarithms of the horizontal coordinates.
        y: decimal logarithms of the vertical coordinates.
        classes: the class of each point.
        above: distance of a name from its points, in typographic points.
    """
    slope, start = trend(x, y)
    ends = np.array([x.min(), x.max()])
    ax.plot(10**ends, 10 ** (slope * ends + start), color="0.3", linestyle=(0, (4, 2)), lw=0.9)
    for name, column, row in outliers(x, y, classes):
        ax.annotate(
            name, (10**column, 10**row), xytext=(0, above), textcoords="offset points", size=6,
            ha="center", weight="bold",
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
