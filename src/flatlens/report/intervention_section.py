"""The section of the report on interventions: runs trained to be flatter, against plain runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis.interventions import KINDS, PLAIN, TITLES, changes, effect, fitted, with_arms
from flatlens.errors import FlatlensError
from flatlens.figures import style
from flatlens.figures.dose_response import DOSE, PANELS
from flatlens.report.elements import Html, table, tag
from flatlens.report.page import Page
from flatlens.report.plots import SYMBOLS, Plot, Series, axes, rounded


def has_interventions(df: pd.DataFrame) -> bool:
    """Tell whether a family has plain runs, and runs that were trained to be flatter."""
    if not {"optimizer", "seed", "train_accuracy", "sqrt_sharpness"} <= set(df):
        return False
    try:
        arms = set(with_arms(df)["arm"])
    except FlatlensError:  # an optimiser that is no intervention
        return False
    return PLAIN in arms and bool(arms & set(KINDS))


def intervention_section(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    """Yield the content of the section.

    Raises:
        FlatlensError: if no arm can be compared with plain SGD.
    """
    df, left_out = fitted(with_arms(df))
    effects = changes(df, "end")
    if effects.empty:
        raise FlatlensError("No run with an intervention has a plain run of the same seed.")
    series = [
        Series(TITLES[kind], k) for k, kind in enumerate(KINDS) if (effects["arm"] == kind).any()
    ]
    group = page.group()
    yield tag(
        "p",
        "Each point is one strength of an intervention. It shows the change of a logarithm against "
        "plain SGD with the same seed, at the end of training, with a 95 % interval. Horizontal is "
        "the change of the square root of sharpness.",
    )
    yield page.legend(series, group)
    plots = [_plot(effects, column, series) for column in PANELS if column in effects]
    yield tag("div", *(page.plot(plot, group) for plot in plots), class_="plots")
    if left_out:
        lines = [[reason] for reason in left_out]
        yield table(["arm and reason"], lines, "Arms that are left out")


def _plot(effects: pd.DataFrame, column: str, series: list[Series]) -> Plot:
    """Plot the change of one quantity against that of sharpness, a line per intervention."""
    data = []
    for s in series:
        kind = next(kind for kind in KINDS if TITLES[kind] == s.name)
        arms = effects[effects["arm"] == kind]
        points = []
        for strength, arm in arms.groupby("strength", sort=True):
            dose, response = effect(arm, DOSE).estimate, effect(arm, column).estimate
            if np.isfinite([dose.value, response.value]).all():
                points.append((strength, dose, response))
        if points:
            data.append(_trace(s, points))
    title = f"change of log {style.name(DOSE)}"
    layout: dict[str, Any] = axes(title, "change of log")
    return Plot(style.name(column), data, layout, column=column)


def _trace(s: Series, points: list[Any]) -> dict[str, Any]:
    """Return a line from the origin, plain SGD, through the strengths, with error bars."""
    doses, responses = ([0.0, *(point[k].value for point in points)] for k in (1, 2))
    ends = [
        [0.0, *np.nan_to_num([abs(getattr(p[2], side) - p[2].value) for p in points])]
        for side in ("high", "low")
    ]
    texts = ["plain SGD", *(f"strength {point[0]:g}" for point in points)]
    bars = {
        "type": "data", "symmetric": False, "array": rounded(ends[0]),
        "arrayminus": rounded(ends[1]), "thickness": 1, "width": 2,
    }  # fmt: skip
    mark = {"color": s.colour, "symbol": SYMBOLS[s.symbol], "size": 7}
    return s.trace(
        rounded(doses), rounded(responses), mode="lines+markers", marker=mark, error_y=bars,
        customdata=texts,
        hovertemplate="%{fullData.name}, %{customdata}<br>(%{x:.3g}, %{y:.3g})<extra></extra>",
    )  # fmt: skip
