"""Plots over training: one quantity over the steps, and the bounds of Fig. G.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.statistics import mean_and_deviation
from flatlens.errors import FlatlensError
from flatlens.figures import style
from flatlens.figures.tightness import ORDER, SAME
from flatlens.figures.tightness import PANELS as CHAINS
from flatlens.figures.trends import PANELS
from flatlens.report.plots import (
    OVER_STEPS,
    TOGETHER,
    Plot,
    Series,
    axes,
    rounded,
    spaced,
    thinned,
)

BANDS = 24  # With more lines than this, bands would cover one another and are left out.


def configurations(df: pd.DataFrame) -> list[Series]:
    """Return one series per configuration."""
    return [Series(key, k) for k, key in enumerate(run_table.ordered(df))]


def arms(df: pd.DataFrame) -> dict[str, list[str]]:
    """Return for each setting that varies the configurations in which it alone varies."""
    keys = run_table.configurations(df)
    by_setting: dict[str, list[str]] = {}
    for name in run_table.settings(df):
        others = run_table.configurations(df, without=name)
        values = df[name].astype(str).groupby(others).nunique()
        varied_names = keys[others == values.idxmax()].unique().tolist()
        if values.max() > 1 and len(varied_names) < keys.nunique():
            by_setting[run_table.label(name)] = varied_names
    return by_setting


def trend(df: pd.DataFrame, column: str, series: Sequence[Series]) -> Plot:
    """Plot one quantity over training: mean over seeds, band, and a dot at interpolation."""
    scale = PANELS.get(column, "linear")
    keys, data = run_table.configurations(df), []
    narrow = df[[c for c in ("run", "step", "train_loss", column) if c in df]]
    narrow = narrow.loc[:, ~narrow.columns.duplicated()]
    by_key = dict(iter(narrow.groupby(keys)))
    for s in series:
        try:
            table = run_table.curve_table(by_key[s.name], column)
        except FlatlensError:  # not recorded in these runs
            continue
        data += _line(s, table, scale == "log", len(series))
        if (step := run_table.median_interpolation(by_key[s.name])) is not None:
            data.append(_near_zero(s, table, step, scale == "log"))
    caption = style.name(column)
    if not np.isfinite(run_table.numbers(df, column)).all():
        caption += " (no line where it is not finite)"
    layout = axes(**OVER_STEPS, yaxis_type=scale) | TOGETHER
    if len(series) > BANDS:
        layout["hovermode"] = "closest"  # a list of all lines would not fit the screen
    return spaced(Plot(caption, data, layout, column=column))


def _line(s: Series, table: pd.DataFrame, log: bool, lines: int) -> list[dict[str, Any]]:
    """Return the traces of one series: a band if there are several runs, and the mean."""
    at = thinned(table.shape[1], lines)
    steps = table.columns.to_numpy()[at]
    middle, low, high = (v[at] for v in mean_and_deviation(table.to_numpy(), log=log))
    name = "" if lines <= BANDS else "<b>%{fullData.name}</b><br>%{x} steps: "
    if len(table) == 1:  # no deviation to show, so none is stored
        template = f"{name}%{{y:.4g}}<extra></extra>"
        return [s.trace(steps, rounded(middle), hovertemplate=template)]
    band = []
    if lines <= BANDS:
        good = np.isfinite(low) & np.isfinite(high)
        outline = np.concatenate([high[good], low[good][::-1]])
        band_steps = np.concatenate([steps[good], steps[good][::-1]])
        fill = {"fill": "toself", "fillcolor": _faint(s.colour), "line": {"width": 0}}
        band = [
            s.trace(band_steps, rounded(outline), hoverinfo="skip", **{"mode": "lines", **fill})
        ]
    template = f"{name}%{{y:.4g}} [%{{customdata[0]:.4g}}, %{{customdata[1]:.4g}}]<extra></extra>"
    sides = [rounded(pair) for pair in np.stack([low, high], axis=1)]
    return [*band, s.trace(steps, rounded(middle), customdata=sides, hovertemplate=template)]


def _near_zero(s: Series, table: pd.DataFrame, step: float, log: bool) -> dict[str, Any]:
    """Return a dot on the line at the recorded step nearest to interpolation."""
    steps = table.columns.to_numpy()
    at = int(np.abs(steps - step).argmin())
    value = mean_and_deviation(table.to_numpy()[:, [at]], log=log)[0]
    marker = {"color": s.colour, "size": 9, "line": {"color": "white", "width": 1}}
    point = [int(steps[at])], rounded(value)
    return s.trace(*point, mode="markers", marker=marker, hoverinfo="skip")


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def tight(df: pd.DataFrame) -> tuple[list[tuple[Plot, list[Series]]], str]:
    """Return the panels of Fig. G.4 with their lines, and the configuration that they show."""
    run_table.require(df, next(iter(CHAINS.values())))
    df, name = run_table.main_configuration(df)
    panels = []
    for title, columns in CHAINS.items():
        data, series = [], []
        for column in run_table.finite_columns(df, columns):
            label = columns[column]
            s = Series(label, ORDER.index(SAME.get(label, label)))
            data += _line(s, run_table.curve_table(df, column), True, len(columns))
            series.append(s)
        plot = Plot(title, data, axes(**OVER_STEPS, yaxis_type="log") | TOGETHER)
        panels.append((spaced(plot), series))
    return panels, name
