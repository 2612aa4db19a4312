"""Plots over networks and layers: correlations at the end of training, and layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.statistics import correlation_table
from flatlens.figures import style
from flatlens.figures.correlations import number, recorded_quantities
from flatlens.report.plots import SYMBOLS, TOGETHER, Plot, Series, axes, plain, safe, spaced

# For each plot over layers: title, key of `Measurement.rows`, scale of the axis.
LAYERS = (
    ("MLS of each layer (their sum is NMLS)", "mls", "linear"),
    ("slack of each layer's inequality (Eq. 5: right over left side)", "eq5_slack", "log"),
    ("sharing ratio (tied over untied gradient of the weight)", "sharing_ratio", "linear"),
    ("sharpness of each layer (their part of S)", "sharpness", "log"),
)


def correlations(df: pd.DataFrame) -> tuple[Plot, Plot, pd.DataFrame, list[Series]]:
    """Return the matrix, the scatter of any two quantities, the table behind both, the series."""
    last = run_table.ends(df)
    names = recorded_quantities(last, None)
    keys = run_table.configurations(last)
    values = pd.DataFrame({name: run_table.numbers(last, name) for name in names})
    table = correlation_table(values, names, keys.tolist(), run_table.seeds(last))
    series = [Series(key, k, points=True) for k, key in enumerate(run_table.ordered(last))]
    return _matrix(table, names), _pairs(values, last["run"], keys, series), table, series


def _matrix(table: pd.DataFrame, names: Sequence[str]) -> Plot:
    titles = [style.name(name) for name in names]
    r = pd.DataFrame(np.eye(len(names)), index=list(names), columns=list(names))
    texts = pd.DataFrame("", index=list(names), columns=list(names))
    for row in table.to_dict("records"):
        text = "<br>".join(
            f"{letter} {number(row[kind])} [{number(row[kind + '_low'])}, "
            f"{number(row[kind + '_high'])}]"
            for letter, kind in (("r", "pearson"), ("ρ", "spearman"))
        )
        for a, b in ((row["x"], row["y"]), (row["y"], row["x"])):
            r.loc[a, b], texts.loc[a, b] = row["pearson"], f"{text}<br>{row['n']} networks"
    cells = [plain(row) for row in r.to_numpy()]
    data = {
        "type": "heatmap", "x": titles, "y": titles, "z": cells, "zmin": -1, "zmax": 1,
        "text": [["–" if v is None else f"{v:.2f}" for v in row] for row in cells],
        "texttemplate": "%{text}", "customdata": texts.to_numpy().tolist(), "xgap": 1, "ygap": 1,
        "hovertemplate": "%{y}, %{x}<br>%{customdata}<extra></extra>", "showscale": False,
    }  # fmt: skip
    layout = axes("", yaxis_autorange="reversed", xaxis_tickangle=-45)  # the first quantity on top
    return Plot("Pearson's r at the end of training", [data], layout, wide=True)


def _pairs(values: pd.DataFrame, runs: Any, keys: Any, series: Sequence[Series]) -> Plot:
    """Plot any quantity against any other; the page switches the axes."""
    masks = [np.asarray(keys == s.name) for s in series]
    columns = {str(c): [plain(values[c].to_numpy()[each]) for each in masks] for c in values}
    names = list(columns)
    x, y = ("mls", "nmls") if {"mls", "nmls"} <= set(names) else names[:2]
    data = [
        s.trace(
            columns[x][k], columns[y][k], customdata=[safe(run) for run in runs[each]],
            hovertemplate="%{customdata}<br>(%{x:.4g}, %{y:.4g})<extra></extra>",
        )
        for k, (s, each) in enumerate(zip(series, masks, strict=True))
    ]  # fmt: skip
    layout = axes(style.name(x), style.name(y))
    return Plot("one quantity against another, one point per network", data, layout, columns)


def layers(measured: Mapping[str, Mapping[str, Any]]) -> tuple[list[Plot], list[Series]]:
    """Plot the quantities of each layer, one line per measured network."""
    series = [Series(name, k) for k, name in enumerate(measured)]
    plots = []
    for title, key, scale in LAYERS:
        data = []
        for s, measurement in zip(series, measured.values(), strict=True):
            layer_rows = measurement["layers"]
            place = _places([str(row["name"]) for row in layer_rows])
            values = [float(row[key]) for row in layer_rows]
            text = "%{y:.4g}<extra></extra>"
            mark = {"color": s.colour, "symbol": SYMBOLS[s.symbol], "size": 8}
            more: Any = {"mode": "lines+markers", "marker": mark, "hovertemplate": text}
            data.append(s.trace(place, values, **more))
        layout = axes("layer", yaxis_type=scale, xaxis_type="category", yaxis_rangemode="tozero")
        plots.append(spaced(Plot(title, data, layout | TOGETHER)))
    return plots, series


def _places(names: Sequence[str]) -> list[str]:
    """Return names as marks of an axis; a layer that is called again gets a number.

    >>> _places(["fc", "tied", "tied"])
    ['fc', 'tied', 'tied (2)']
    """
    times = [names[: k + 1].count(name) for k, name in enumerate(names)]
    pairs = zip(map(safe, names), times, strict=True)
    return [name if time == 1 else f"{name} ({time})" for name, time in pairs]
