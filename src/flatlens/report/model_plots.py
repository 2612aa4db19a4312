"""Plot Figure 3: normalised MLS against adaptive sharpness over models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.model_trend import AXES, order, outliers, points, rank_correlation, trend
from flatlens.analysis.statistics import Interval
from flatlens.report.plots import Plot, Series, axes, plain, safe, spaced


@dataclass(frozen=True)
class Figure3:
    """The plot, the rank correlations beside it, and the classes far off the line."""

    plot: Plot
    series: list[Series]
    over_classes: Interval
    over_models: Interval
    far: list[str]


def zoo(df: pd.DataFrame) -> Figure3:
    """Plot normalised MLS against adaptive sharpness, with the name of each model on hover."""
    x, y = AXES
    df, a, b, classes = points(df, x, y)
    series = [Series(c, k, points=True) for k, c in enumerate(order(classes))]
    data = []
    for s in series:
        chosen = df[classes == s.name]
        errors = {
            side: {"type": "data", "array": plain(run_table.numbers(chosen, f"{column}_se")),
                   "thickness": 1, "width": 0}
            for side, column in (("error_x", x), ("error_y", y)) if f"{column}_se" in df
        }  # fmt: skip
        text = "<b>%{customdata}</b><br>adaptive sharpness %{x:.4g}<br>normalised MLS %{y:.4g}"
        data.append(
            s.trace(
                run_table.numbers(chosen, x), run_table.numbers(chosen, y), hovertemplate=text,
                customdata=[safe(name) for name in chosen["model"]], **errors,
            )
        )  # fmt: skip
    slope, start = trend(a, b)
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
    caption = "normalised MLS against adaptive sharpness, one point per model"
    return Figure3(
        spaced(Plot(caption, data, layout | {"annotations": named})),
        series,
        rank_correlation(a, b, classes),
        rank_correlation(a, b),
        [name for name, _, _ in off],
    )
