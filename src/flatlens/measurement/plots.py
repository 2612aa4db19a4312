"""Figures of a measurement and of a comparison, drawn with matplotlib.

matplotlib is imported on first use. Every function takes ``ax`` and returns the axes. Without
``ax`` it draws on a new pyplot figure, which a notebook displays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flatlens.arguments import check_choice
from flatlens.errors import FlatlensError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: readers with any colour vision can tell them apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
VERDICT_COLOURS = {"theorem": COLOURS[0], "observation": COLOURS[5]}
LAYER_PLOTS = {
    "norm": ("norm", "norm of the weight"),
    "gradient_share": ("sharpness", "share of the sharpness"),
    "sensitivity": ("mls", "maximum local sensitivity (MLS)"),
}
MOST_BARS = 60


def new_axes(ax: Any, bars: int) -> Axes:
    """Return the given axes, or those of a new figure high enough for some horizontal bars."""
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes

    if ax is None:
        height = min(12.0, max(2.0, 0.8 + 0.22 * bars))
        _, ax = plt.subplots(figsize=(6.0, height), layout="constrained")
    elif not isinstance(ax, Axes):
        raise FlatlensError(
            f"ax is a value of type {type(ax).__name__}; give the axes of a matplotlib figure"
        )
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", alpha=0.25, linewidth=0.4)
    ax.set_axisbelow(True)
    return ax


def measurement_plot(m: Any, what: Any, ax: Any = None) -> Axes:
    """Draw the layers or the inequalities of a Measurement.

    Args:
        m: the measurement.
        what: "inequalities", or one of ``LAYER_PLOTS``.
        ax: axes to draw on, or None.

    Returns:
        The axes.

    Raises:
        FlatlensError: if ``what`` is unknown or there is nothing to draw.
    """
    check_choice("what", what, ["inequalities", *LAYER_PLOTS])
    if what == "inequalities":
        return slack_bars(m, ax)
    if not m.rows:
        raise FlatlensError("this measurement has no layers to draw; measure more than sharpness")
    column, title = LAYER_PLOTS[what]
    values = np.array([row[column] for row in m.rows])
    if what == "gradient_share":
        values = values / m.values["sharpness"] if m.values.get("sharpness") else values * np.nan
    ax = new_axes(ax, len(values))
    _bars(ax, [row["name"] or "(network)" for row in m.rows], values, COLOURS[0])
    ax.set_xlabel(title)
    return ax


def slack_bars(m: Any, ax: Any = None) -> Axes:
    """Draw the slack rhs / lhs of each inequality; a bar left of 0 fails."""
    from matplotlib.patches import Patch

    shown = [
        b for b in m.bounds if b.verdict != "not applicable" and np.isfinite(b.slack) and b.slack
    ]
    if not shown:
        raise FlatlensError("this measurement has no inequality with a finite slack to draw")
    ax = new_axes(ax, len(shown))
    colours = [VERDICT_COLOURS[b.verdict] for b in shown]
    logs = np.log10([b.slack for b in shown])
    _bars(ax, [b.name for b in shown], logs, colours)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_xlabel("slack of the inequality, log10(rhs / lhs); negative: it fails")
    verdicts = dict.fromkeys(b.verdict for b in shown)
    ax.legend(handles=[Patch(color=VERDICT_COLOURS[v], label=v) for v in verdicts], frameon=False)
    return ax


def ratio_bars(names: list[str], ratios: dict[str, Any], errors: dict[str, Any], ax: Any) -> Axes:
    """Draw the ratio of each quantity to that of the first measurement, on a log scale.

    Args:
        names: the quantities, from top to bottom.
        ratios: for each measurement its ratios.
        errors: for each measurement the standard errors of its ratios, NaN where there are none.
        ax: axes to draw on, or None.

    Returns:
        The axes.
    """
    ax = new_axes(ax, len(names) * len(ratios))
    width = 0.8 / len(ratios)
    places = np.arange(len(names))
    for k, (label, values) in enumerate(ratios.items()):
        logs = np.log10(values)
        spread = np.nan_to_num(np.asarray(errors[label]) / np.asarray(values) / np.log(10))
        ax.barh(
            places + (k - (len(ratios) - 1) / 2) * width,
            logs,
            width,
            xerr=spread if spread.any() else None,
            color=COLOURS[(k + 1) % len(COLOURS)],
            label=label,
        )
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.legend(frameon=False)
    return ax


def _bars(ax: Axes, names: list[str], values: Any, colour: Any) -> None:
    """Draw horizontal bars from top to bottom; beyond ``MOST_BARS`` only some are labelled."""
    places = np.arange(len(names))
    ax.barh(places, np.nan_to_num(values, posinf=0.0, neginf=0.0), color=colour)
    step = -(-len(names) // MOST_BARS)
    ax.set_yticks(places[::step], names[::step])
    ax.invert_yaxis()
