"""Figure 3 twice, side by side: with the true numbers and with the paper's estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flatlens.analysis import run_table as records
from flatlens.analysis.model_trend import estimates, order, points, rank_correlation
from flatlens.analysis.statistics import Array
from flatlens.errors import FlatlensError, counted
from flatlens.figures import style
from flatlens.figures.correlations import number
from flatlens.figures.trend_line import draw_trend

# horizontal and vertical axis of each panel
ESTIMATORS = {
    "true numbers": ("adaptive_sharpness", "normalized_mls"),
    "the paper's estimators": ("adaptive_sharpness_paper", "normalized_mls_paper"),
}
TITLES = {"true numbers": "Eq. 41 and exact MLS", "the paper's estimators": "Eqs. 46 and 47"}


def figure3(df: pd.DataFrame) -> Figure:
    """Draw normalised MLS against adaptive sharpness, once for each way to compute them.

    Colours are families, shapes are recipes of training, bars are standard errors over images. The
    line is Theil and Sen's through the models that were trained here. A model with published
    weights on other images (`kind` is "published") is drawn as a star and enters no number. A model
    whose estimate is not positive cannot be drawn on logarithmic axes. It enters the rank
    correlation, and the panel gives the number of such models.

    Args:
        df: one row for each model with `class`, `training`, `kind` and the columns of a zoo.

    Returns:
        The figure.

    Raises:
        FlatlensError: if fewer than three trained models have both numbers.
    """
    with style.look():
        figure, axes = style.figure(1, 2, height=3.1)
        for ax, (name, columns) in zip(axes[0], ESTIMATORS.items(), strict=True):
            _panel(ax, df, columns)
            ax.set_title(f"{TITLES[name]}: {_rank_text(df, columns)}")
        axes[0, 0].set_ylabel("normalised MLS")
        _legend(figure, df)
    return figure


def trained(df: pd.DataFrame) -> pd.DataFrame:
    """Return the models that were trained here."""
    return df[df["kind"] == "trained"]


def _panel(ax: Axes, df: pd.DataFrame, columns: tuple[str, str]) -> None:
    used, a, b, families = points(trained(df), *columns)
    ways = used["training"].to_numpy()
    names, recipes = _order(df)
    for k, family in enumerate(names):
        for j, recipe in enumerate(recipes):
            mine = (families == family) & (ways == recipe)
            _points(ax, used[mine], a[mine], b[mine], columns, _look(k, j))
    draw_trend(ax, a, b, families, above=7)
    for _, star in df[df["kind"] == "published"].iterrows():
        if all(name in star and star[name] > 0 for name in columns):
            ax.plot(star[columns[0]], star[columns[1]], marker="*", ms=7, color="0.2", ls="none")
    ax.set_xlabel("adaptive sharpness")
    if missing := len(estimates(trained(df), *columns)[0]) - len(used):
        text = f"not drawn: {counted(missing, 'model')} at or below 0"
        ax.text(0.03, 0.97, text, transform=ax.transAxes, va="top", fontsize=6)


def _points(
    ax: Axes, df: pd.DataFrame, a: Array, b: Array, columns: tuple[str, str], look: dict[str, Any]
) -> None:
    if df.empty:
        return
    errors: dict[str, Any] = {
        side: records.numbers(df, f"{column}_se")
        for side, column in zip(("xerr", "yerr"), columns, strict=True)
        if f"{column}_se" in df
    }
    ax.errorbar(10**a, 10**b, **errors, **look, elinewidth=0.5)


def _look(k: int, j: int) -> dict[str, Any]:
    colour, marker = style.COLOURS[k % len(style.COLOURS)], style.MARKERS[j % len(style.MARKERS)]
    return {"color": colour, "marker": marker, "ms": 3.5, "mew": 0, "alpha": 0.85, "ls": "none"}


def _order(df: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return families and recipes in the order of their colours and shapes."""
    own = trained(df)
    return order(own["class"].to_numpy()), sorted(set(own["training"]))


def _rank_text(df: pd.DataFrame, columns: tuple[str, str]) -> str:
    _, a, b, families = estimates(trained(df), *columns)
    e = rank_correlation(a, b, families)
    interval = f" [{number(e.low)}, {number(e.high)}]" if np.isfinite(e.low) else ""
    return f"ρ {number(e.value)}{interval}"


def _legend(figure: Figure, df: pd.DataFrame) -> None:
    families, recipes = _order(df)
    handles = [Line2D([], [], **_look(k, 0)) for k in range(len(families))]
    handles += [Line2D([], [], **(_look(0, j) | {"color": "0.4"})) for j in range(len(recipes))]
    labels = [*families, *(recipe.replace("_", " ") for recipe in recipes)]
    for _, star in df[df["kind"] == "published"].iterrows():
        handles.append(Line2D([], [], marker="*", ms=6, color="0.2", ls="none"))
        # the size of the patches is too long for the legend
        name = str(star["model"]).split("_patch")[0]
        labels.append(f"{name}, ImageNet")
    figure.legend(
        handles, labels, loc="outside upper center", ncols=5, handletextpad=0.1,
        title=f"{len(trained(df))} models; Spearman's ρ with its interval over families",
        title_fontsize=style.RC["legend.fontsize"],
    )  # fmt: skip


def require_models(df: pd.DataFrame, accuracy: float) -> tuple[pd.DataFrame, list[str]]:
    """Leave out trained models below an accuracy.

    Returns:
        The other models, and a sentence for each that is left out.

    Raises:
        FlatlensError: if no trained model is left.
    """
    low = (df["kind"] == "trained") & ~(records.numbers(df, "test_accuracy") >= accuracy)
    reasons = [
        f"{row['run']} is left out: its test accuracy {row['test_accuracy']:.1f} % is below "
        f"{accuracy:g} %"
        for _, row in df[low].iterrows()
    ]
    if low.sum() == (df["kind"] == "trained").sum():
        raise FlatlensError(f"No model comes to a test accuracy of {accuracy:g} %.")
    return df[~low].reset_index(drop=True), reasons
