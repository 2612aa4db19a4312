"""Plots in plotly's format: plain dicts of traces and axes, made without the library.

Colours of text, grid and background are left to the page, which knows whether it is light or dark.
Traces of one series have one `legendgroup`, by which the page shows and hides them. Strings from
records are escaped, because plotly reads a little HTML in texts.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flatlens.figures import style
from flatlens.reproduction.json_files import json_value

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
DIGITS = 7  # Significant digits of a curve: more than a screen shows, half the size of a float.
POINTS_OF_PLOT = 20_000  # Curves are thinned so that a plot has about this many points,
POINTS_OF_CURVE = (40, 400)  # but not to fewer points, and never with more.


@dataclass(frozen=True)
class Series:
    """One line or cloud of points, and how a legend shows it."""

    name: str
    k: int
    points: bool = False  # marks without a line

    @property
    def colour(self) -> str:
        """The colour of the series."""
        return style.COLOURS[self.k % len(style.COLOURS)]

    @property
    def line(self) -> dict[str, Any]:
        """The line style in plotly's terms."""
        return {"color": self.colour, "dash": DASHES[self.k % len(DASHES)], "width": 2}

    @property
    def symbol(self) -> int:
        """The index of the mark: points change it once all colours are used."""
        return (self.k // len(style.COLOURS) if self.points else self.k) % len(SYMBOLS)

    def trace(self, x: Any, y: Any, **more: Any) -> dict[str, Any]:
        """Return the trace of the series with these points."""
        mode = {"marker": {"color": self.colour, "symbol": SYMBOLS[self.symbol], "size": 8}}
        shown = {"mode": "markers", **mode} if self.points else {"mode": "lines", "line": self.line}
        return {
            "type": "scatter", "x": plain(x), "y": plain(y), "name": safe(self.name),
            "legendgroup": self.name, **shown, **more,
        }  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """One plot with its caption."""

    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    columns: dict[str, list[Any]] = field(default_factory=dict)  # choices for the axes
    wide: bool = False
    column: str | None = None  # the quantity that the caption names


def safe(value: Any) -> str:
    """Escape a text for plotly, which reads <b> and &lt; in any text."""
    return html.escape(str(value), quote=False)


def plain(values: Any) -> list[Any]:
    """Return values that JSON has, with null for infinities and NaN."""
    return [json_value(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]


def rounded(values: Any) -> list[Any]:
    """Return numbers with seven significant digits, with null for infinities and NaN.

    >>> rounded([0.123456789, float("inf"), 2.0])
    [0.1234568, None, 2.0]
    """
    return [json_value(v, digits=DIGITS) for v in map(float, values)]


def thinned(steps: int, curves: int) -> Any:
    """Return the indices of the points to draw of each curve, with the first and the last point.

    Args:
        steps: number of points that each curve has.
        curves: number of curves in the plot.

    >>> thinned(5, 3).tolist(), len(thinned(1_000, 500))
    ([0, 1, 2, 3, 4], 40)
    """
    fewest, most = POINTS_OF_CURVE
    room = min(most, max(fewest, POINTS_OF_PLOT // max(curves, 1)))
    return np.unique(np.linspace(0, steps - 1, min(steps, room)).round().astype(int))


def axes(x: str, y: str = "", **more: Any) -> dict[str, Any]:
    """Return a layout with two named axes; `yaxis_type="log"` and the like are further settings."""
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for key, value in more.items():
        axis, _, name = key.partition("_")
        layout[axis][name] = value
        if value == "log":
            layout[axis]["tickformat"] = "~g"  # whole numbers beside the ticks between powers
    return layout


def spaced(plot: Plot) -> Plot:
    """Put ticks at 1, 2, 5, 10 on log axes of few decades, where plotly's own ticks overlap."""
    for name in ("x", "y"):
        axis = plot.layout[f"{name}axis"]
        if axis.get("type") != "log":
            continue
        values = [v for trace in plot.data for v in trace[name] if v is not None and v > 0]
        if values and 0.9 < math.log10(max(values) / min(values)) < 3:
            axis["dtick"] = "D2"
    return plot


OVER_STEPS: Any = {"x": "steps", "xaxis_tickformat": "~s", "xaxis_hoverformat": ","}
TOGETHER = {"hovermode": "x"}  # the values of all series at the place of the mouse
