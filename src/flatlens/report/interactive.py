"""The figures as plotly draws them: plain dicts of traces and axes, no library needed to make them.

Numbers come from the functions behind the static figures. Colours of text, grid and background are
left to the page, which knows whether it is light or dark. Traces of one series have one
`legendgroup`, by which the page shows and hides them. Strings from records are escaped, since
plotly reads a little HTML in texts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import tables as records
from flatlens.analysis.statistics import Estimate, correlation_table
from flatlens.errors import FlatlensError
from flatlens.figures import style
from flatlens.figures.correlations import number, present
from flatlens.figures.tightness import ORDER, SAME, one_configuration
from flatlens.figures.tightness import PANELS as CHAINS
from flatlens.figures.trends import PANELS, curves, interpolation
from flatlens.figures.zoo import AXES, order, outliers, points, rank_correlation
from flatlens.figures.zoo import trend as fitted

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
# of one layer: title, key of `Measurement.rows`, scale of the axis
LAYERS = (
    ("MLS of each layer (their sum is NMLS)", "mls", "linear"),
    ("slack of each layer's inequality (Eq. 5: right over left side)", "eq5_slack", "log"),
    ("sharing ratio (tied over untied gradient of the weight)", "sharing_ratio", "linear"),
    ("sharpness of each layer (their part of S)", "sharpness", "log"),
)


@dataclass(frozen=True)
class Series:
    """One line or cloud of points, and how a legend shows it."""

    name: str
    k: int
    points: bool = False  # marks, no line

    @property
    def colour(self) -> str:
        return style.COLOURS[self.k % len(style.COLOURS)]

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "dash": DASHES[self.k % len(DASHES)], "width": 2}

    @property
    def symbol(self) -> int:
        """The place of its mark: with all colours used up, the next shape."""
        return (self.k // len(style.COLOURS) if self.points else self.k) % len(SYMBOLS)

    def trace(self, x: Any, y: Any, **more: Any) -> dict[str, Any]:
        mode = {"marker": {"color": self.colour, "symbol": SYMBOLS[self.symbol], "size": 8}}
        shown = {"mode": "markers", **mode} if self.points else {"mode": "lines", "line": self.line}
        return {
            "type": "scatter", "x": plain(x), "y": plain(y), "name": safe(self.name),
            "legendgroup": self.name, **shown, **more,
        }  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """One plot with its caption; `columns` are what its axes may be switched to."""

    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    wide: bool = False


def safe(text: Any) -> str:
    """For plotly, which takes <b> and &lt; in any text."""
    return html.escape(str(text), quote=False)


def plain(values: Any) -> list[Any]:
    """Numbers that JSON has; null for the others."""
    found = values.tolist() if hasattr(values, "tolist") else list(values)
    return [None if isinstance(v, float) and not math.isfinite(v) else v for v in found]


def axes(x: str, y: str = "", **more: Any) -> dict[str, Any]:
    """A layout with two named axes; `yaxis_type="log"` and the like are further settings."""
    found: dict[str, Any] = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for key, value in more.items():
        axis, _, name = key.partition("_")
        found[axis][name] = value
        if value == "log":
            found[axis]["tickformat"] = "~g"  # whole numbers beside the ticks between powers
    return found


def spaced(plot: Plot) -> Plot:
    """Ticks at 1, 2, 5, 10 on log axes of few decades, where plotly's own would crowd."""
    for name in ("x", "y"):
        axis = plot.layout[f"{name}axis"]
        if axis.get("type") != "log":
            continue
        values = [v for trace in plot.data for v in trace[name] if v is not None and v > 0]
        if values and 0.9 < math.log10(max(values) / min(values)) < 3:
            axis["dtick"] = "D2"
    return plot


OVER_STEPS: Any = {"x": "SGD steps", "xaxis_tickformat": "~s", "xaxis_hoverformat": ","}
TOGETHER = {"hovermode": "x"}  # all series at the place of the mouse


# ------------------------------------------------------------------ over training


def configurations(df: pd.DataFrame) -> list[Series]:
    """The lines of the trends."""
    return [Series(key, k) for k, key in enumerate(records.ordered(df))]


def arms(df: pd.DataFrame) -> dict[str, list[str]]:
    """For each setting that varies, the configurations in which it alone does."""
    keys = records.configurations(df)
    found: dict[str, list[str]] = {}
    for name in records.settings(df):
        others = records.configurations(df, without=name)
        values = df[name].astype(str).groupby(others).nunique()
        mine = keys[others == values.idxmax()].unique().tolist()
        if values.max() > 1 and len(mine) < keys.nunique():
            found[records.label(name)] = mine
    return found


def trend(df: pd.DataFrame, column: str, series: Sequence[Series]) -> Plot:
    """One quantity over training: mean over seeds, band, and where the loss is near zero."""
    scale = PANELS.get(column, "linear")
    keys, data = records.configurations(df), []
    for s in series:
        part = df[keys == s.name]
        try:
            table = curves(part, column)
        except FlatlensError:  # not recorded in these runs
            continue
        steps = table.columns.to_numpy()
        middle, low, high = style.spread(table.to_numpy(), log=scale == "log")
        data += _band(s, steps, middle, low, high, len(table))
        if (step := interpolation(part)) is not None:
            there = int(np.abs(steps - step).argmin())
            data.append(_near_zero(s, steps[there], middle[there]))
    caption = style.name(column)
    if not np.isfinite(records.numbers(df, column)).all():
        caption += " (no line where it is not finite)"
    return spaced(Plot(caption, data, axes(**OVER_STEPS, yaxis_type=scale) | TOGETHER))


def _band(s: Series, steps: Any, middle: Any, low: Any, high: Any, runs: int) -> list[Any]:
    band = []
    good = np.isfinite(low) & np.isfinite(high)
    if runs > 1:
        outline = np.concatenate([high[good], low[good][::-1]])
        there = np.concatenate([steps[good], steps[good][::-1]])
        fill = {"fill": "toself", "fillcolor": _faint(s.colour), "line": {"width": 0}}
        band = [s.trace(there, outline, hoverinfo="skip", **{"mode": "lines", **fill})]
    sides = np.stack([low, high], axis=1)
    told = "%{y:.4g} [%{customdata[0]:.4g}, %{customdata[1]:.4g}]<extra></extra>"
    shown = [plain(pair) for pair in sides]
    return [*band, s.trace(steps, middle, customdata=shown, hovertemplate=told)]


def _near_zero(s: Series, step: Any, value: Any) -> dict[str, Any]:
    marker = {"color": s.colour, "size": 9, "line": {"color": "white", "width": 1}}
    point = [int(step)], [float(value)]
    return s.trace(*point, mode="markers", marker=marker, hoverinfo="skip")


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def tight(df: pd.DataFrame) -> tuple[list[tuple[Plot, list[Series]]], str]:
    """The panels of Fig. G.4, each with its own lines, and the configuration they are of."""
    records.require(df, next(iter(CHAINS.values())))
    df, which = one_configuration(df)
    panels = []
    for title, lines in CHAINS.items():
        data, series = [], []
        for column, label in lines.items():
            if column not in df or not np.isfinite(records.numbers(df, column)).any():
                continue
            s = Series(label, ORDER.index(SAME.get(label, label)))
            table = curves(df, column)
            data += _band(
                s, table.columns.to_numpy(), *style.spread(table.to_numpy(), log=True), len(table)
            )
            series.append(s)
        plot = Plot(title, data, axes(**OVER_STEPS, yaxis_type="log") | TOGETHER)
        panels.append((spaced(plot), series))
    return panels, which


# ------------------------------------------------------------------ over networks


def correlations(df: pd.DataFrame) -> tuple[Plot, Plot, pd.DataFrame, list[Series]]:
    """The matrix, the scatter of any two quantities, the table behind both."""
    last = records.ends(df)
    names = present(last, None)
    keys = records.configurations(last)
    values = pd.DataFrame({name: records.numbers(last, name) for name in names})
    table = correlation_table(values, names, keys.tolist(), records.seeds(last))
    series = [Series(key, k, points=True) for k, key in enumerate(records.ordered(last))]
    return _matrix(table, names), _pairs(values, last["run"], keys, series), table, series


def _matrix(table: pd.DataFrame, names: Sequence[str]) -> Plot:
    titles = [style.name(name) for name in names]
    r = pd.DataFrame(np.eye(len(names)), index=list(names), columns=list(names))
    told = pd.DataFrame("", index=list(names), columns=list(names))
    for row in table.to_dict("records"):
        text = "<br>".join(
            f"{letter} {number(row[kind])} [{number(row[kind + '_low'])}, "
            f"{number(row[kind + '_high'])}]"
            for letter, kind in (("r", "pearson"), ("ρ", "spearman"))
        )
        for a, b in ((row["x"], row["y"]), (row["y"], row["x"])):
            r.loc[a, b], told.loc[a, b] = row["pearson"], f"{text}<br>{row['n']} networks"
    cells = [plain(row) for row in r.to_numpy()]
    data = {
        "type": "heatmap", "x": titles, "y": titles, "z": cells, "zmin": -1, "zmax": 1,
        "text": [["–" if v is None else f"{v:.2f}" for v in row] for row in cells],
        "texttemplate": "%{text}", "customdata": told.to_numpy().tolist(), "xgap": 1, "ygap": 1,
        "hovertemplate": "%{y}, %{x}<br>%{customdata}<extra></extra>", "showscale": False,
    }  # fmt: skip
    layout = axes("", yaxis_autorange="reversed", xaxis_tickangle=-45)  # the first one on top
    return Plot("Pearson's r at the end of training", [data], layout, wide=True)


def _pairs(values: pd.DataFrame, runs: Any, keys: Any, series: Sequence[Series]) -> Plot:
    """Any quantity against any other; the page switches the axes."""
    mine = [np.asarray(keys == s.name) for s in series]
    columns = {str(c): [plain(values[c].to_numpy()[rows]) for rows in mine] for c in values}
    names = list(columns)
    x, y = ("mls", "nmls") if {"mls", "nmls"} <= set(names) else names[:2]
    data = [
        s.trace(
            columns[x][k], columns[y][k], customdata=[safe(run) for run in runs[rows]],
            hovertemplate="%{customdata}<br>(%{x:.4g}, %{y:.4g})<extra></extra>",
        )
        for k, (s, rows) in enumerate(zip(series, mine, strict=True))
    ]  # fmt: skip
    layout = axes(style.name(x), style.name(y))
    return Plot("one quantity against another, one point a network", data, layout, columns)


# ------------------------------------------------------------------ over layers


def layers(measured: Mapping[str, Mapping[str, Any]]) -> tuple[list[Plot], list[Series]]:
    """What each layer carries, one line a measured network."""
    series = [Series(name, k) for k, name in enumerate(measured)]
    plots = []
    for title, key, scale in LAYERS:
        data = []
        for s, found in zip(series, measured.values(), strict=True):
            rows = found["layers"]
            place = _places([str(row["name"]) for row in rows])
            values = [float(row[key]) for row in rows]
            text = "%{y:.4g}<extra></extra>"
            mark = {"color": s.colour, "symbol": SYMBOLS[s.symbol], "size": 8}
            more: Any = {"mode": "lines+markers", "marker": mark, "hovertemplate": text}
            data.append(s.trace(place, values, **more))
        layout = axes("layer", yaxis_type=scale, xaxis_type="category", yaxis_rangemode="tozero")
        plots.append(spaced(Plot(title, data, layout | TOGETHER)))
    return plots, series


def _places(names: Sequence[str]) -> list[str]:
    """Names as marks of an axis; a layer that is called again gets a number.

    >>> _places(["fc", "tied", "tied"])
    ['fc', 'tied', 'tied (2)']
    """
    times = [names[: k + 1].count(name) for k, name in enumerate(names)]
    found = zip(map(safe, names), times, strict=True)
    return [name if time == 1 else f"{name} ({time})" for name, time in found]


# ------------------------------------------------------------------ over models


@dataclass(frozen=True)
class Figure3:
    """The plot, and what is said beside it: rank correlation, classes far off the line."""

    plot: Plot
    series: list[Series]
    over_classes: Estimate
    over_models: Estimate
    far: list[str]


def zoo(df: pd.DataFrame) -> Figure3:
    """Figure 3 for a mouse to ask: normalised MLS against adaptive sharpness."""
    x, y = AXES
    df, a, b, classes = points(df, x, y)
    series = [Series(c, k, points=True) for k, c in enumerate(order(classes))]
    data = []
    for s in series:
        mine = df[classes == s.name]
        errors = {
            side: {"type": "data", "array": plain(records.numbers(mine, f"{column}_se")),
                   "thickness": 1, "width": 0}
            for side, column in (("error_x", x), ("error_y", y)) if f"{column}_se" in df
        }  # fmt: skip
        text = "<b>%{customdata}</b><br>adaptive sharpness %{x:.4g}<br>normalised MLS %{y:.4g}"
        data.append(
            s.trace(
                records.numbers(mine, x), records.numbers(mine, y), hovertemplate=text,
                customdata=[safe(name) for name in mine["model"]], **errors,
            )
        )  # fmt: skip
    slope, start = fitted(a, b)
    ends = np.array([a.min(), a.max()])
    data.append({
        "type": "scatter", "mode": "lines", "x": plain(10**ends),
        "y": plain(10 ** (slope * ends + start)), "name": "trend", "hoverinfo": "skip",
        "line": {"color": "#808080", "dash": "dash", "width": 1.5}, "legendgroup": "",
    })  # fmt: skip
    off = outliers(a, b, classes)
    named = [
        {"x": column, "y": row, "text": f"<b>{safe(name)}</b>", "showarrow": False, "yshift": 14}
        for name, column, row in off
    ]
    layout = axes("adaptive sharpness", "normalised MLS", xaxis_type="log", yaxis_type="log")
    caption = "normalised MLS against adaptive sharpness, one point a model"
    return Figure3(
        spaced(Plot(caption, data, layout | {"annotations": named})),
        series,
        rank_correlation(a, b, classes),
        rank_correlation(a, b),
        [name for name, _, _ in off],
    )
