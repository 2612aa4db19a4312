"""Draw the effect of interventions: the change of each quantity against that of sharpness."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatlens.analysis.interventions import KINDS, PLAIN, TITLES, changes, effect, fitted, with_arms
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.errors import FlatlensError, counted
from flatlens.figures import style

DOSE = "sqrt_sharpness"
PANELS = ("mls", "nmls", "eq12.rhs", "log_volume", "adaptive_sharpness", "test_loss")


@no_type_check
@typed_arguments
def dose_response(df: pd.DataFrame, moment: str = "end") -> Figure:
    """Draw one panel for each quantity, one line for each kind of intervention.

    A point is one strength: the mean change of a logarithm against plain SGD over seeds, with 95 %
    intervals paired within seeds. Horizontal is the change of the square root of S (the dose),
    vertical that of the quantity (the response). A line joins the strengths of one kind, from
    plain SGD at the origin. The dotted line is where both change by the same factor.

    Args:
        df: the table of `read_runs` of one network, with arms of interventions.
        moment: "end", or "equal loss" to compare at equal training loss.

    Returns:
        The figure.

    Raises:
        FlatlensError: if there is no arm to compare with plain SGD.
    """
    df, left_out = fitted(with_arms(df))
    table = changes(df, moment)
    if table.empty:
        plain = [reason for reason in left_out if reason.startswith(PLAIN)]
        reason = plain[0] if plain else "there are no runs to compare with plain SGD"
        raise FlatlensError(f"There is no intervention to draw: {reason}.")
    panels = [name for name in PANELS if name in table]
    with style.look():
        figure, axes = style.figure(2, 3, height=3.9)
        for ax, column in zip(axes.flat, panels, strict=False):
            for k, kind in enumerate(KINDS):
                _line(ax, table[table["arm"] == kind], column, k, TITLES[kind])
            _frame(ax, column)
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        for ax in axes[-1]:
            ax.set_xlabel("change of log √S")
        seeds, when = table["seed"].nunique(), "at the end" if moment == "end" else "at equal loss"
        title = f"change of log against plain SGD, {when}; {counted(seeds, 'seed')}, 95 % intervals"
        if left_out:
            title += f"\n{counted(len(left_out), 'arm')} left out: not all training samples fitted"
        figure.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5,
            title=title, title_fontsize=style.RC["legend.fontsize"],
        )  # fmt: skip
    return figure


def _line(ax: Axes, arms: pd.DataFrame, column: str, k: int, label: str) -> None:
    """Draw the strengths of one kind of intervention as a line from the origin."""
    points = []
    for _, arm in arms.groupby("strength", sort=True):
        pair = effect(arm, DOSE).estimate, effect(arm, column).estimate
        if np.isfinite([e.value for e in pair]).all():
            points.append(pair)
    if not points:
        return
    x, y = ([0.0, *(pair[i].value for pair in points)] for i in (0, 1))
    colour, marker = style.COLOURS[k], style.MARKERS[k]
    ax.plot(x, y, color=colour, lw=0.8, linestyle=style.DASHES[k])
    errors = [
        np.nan_to_num([[e.value - e.low for e in side], [e.high - e.value for e in side]])
        for side in zip(*points, strict=True)
    ]
    ax.errorbar(
        x[1:], y[1:], xerr=errors[0], yerr=errors[1], color=colour, marker=marker, ms=3, mew=0,
        elinewidth=0.5, linestyle="none", label=label,
    )  # fmt: skip


def _frame(ax: Axes, column: str) -> None:
    ax.set_title(style.name(column))
    ax.axhline(0, color="0.5", lw=0.5)
    ax.axvline(0, color="0.5", lw=0.5)
    if not column.startswith("log_"):
        ax.axline((0, 0), slope=1, color="0.5", lw=0.6, linestyle=":")
