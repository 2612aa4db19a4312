"""Draw when which kind of compression happens: curvature, local and global quantities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from flatlens.errors import FlatlensError
from flatlens.figures import style
from flatlens.training.snapshot_panel import SEPARATOR

CURVATURE = {"sharpness": "S (trace)", "lambda_max": "λ max", "stability_limit": "stability limit"}
LOCAL = {"mls": "MLS", "nmls": "NMLS", "local_dimension": "local dimension"}
GLOBAL = {
    "participation_ratio": "participation ratio",
    "intrinsic_dimension": "intrinsic dimension",
    "nc1": "NC1",
}


def has_panel(df: pd.DataFrame) -> bool:
    """Return whether the records hold everything that the panel shows."""
    places = [str(column).partition(SEPARATOR)[0] for column in df if SEPARATOR in str(column)]
    return {"step", "train_loss", *CURVATURE, *LOCAL} <= set(df) and set(GLOBAL) <= set(places)


def panel(df: pd.DataFrame) -> Figure:
    """Draw loss, curvature, local compression and three global quantities over training steps.

    Sharpness bounds MLS and NMLS (Eqs. 11 and 12). Nothing bounds the global quantities, which have
    a line for each place of the network. S is the trace of Eq. 3; lambda_max and the limit are
    those of the loss of the training, which may have another factor.

    Args:
        df: one row for each record, with the columns of ``training.snapshot_panel``.

    Returns:
        The figure.

    Raises:
        FlatlensError: if a column is missing.
    """
    needed = ["step", "train_loss", *CURVATURE, *LOCAL]
    if missing := [name for name in needed if name not in df]:
        raise FlatlensError(f"The records have no column {missing[0]!r}; train with snapshots.")
    with style.look():
        figure, axes = style.figure(2, 3, height=3.9, sharex=True)
        kinds = {
            "loss": {"train_loss": "training loss"},
            "curvature": CURVATURE,
            "local: S bounds MLS, NMLS": LOCAL,
        }
        for ax, (title, columns) in zip(axes[0], kinds.items(), strict=True):
            _lines(ax, df, columns, style.COLOURS)
            ax.set_title(title)
            ax.set_yscale("log")
        for ax in axes[0, 1:]:
            ax.legend(fontsize=5, frameon=False)
        for ax, (name, title) in zip(axes[1], GLOBAL.items(), strict=True):
            _lines(ax, df, _places(df, name), None)
            ax.set(title=title, xlabel="steps")
        axes[1, 2].set_yscale("log")
        lines, labels = axes[1, 0].get_legend_handles_labels()
        figure.legend(
            lines, labels, loc="outside lower center", ncols=len(labels), fontsize=6,
            frameon=False, title="before layer", title_fontsize=6,
        )  # fmt: skip
    return figure


def _places(df: pd.DataFrame, name: str) -> dict[str, str]:
    """Return the columns of a quantity by the place where it was measured, from input to output."""
    columns = [str(c) for c in df.columns if str(c).startswith(f"{name}{SEPARATOR}")]
    if not columns:
        raise FlatlensError(f"The records have no column {name!r} of any layer.")
    return {column: column.partition(SEPARATOR)[2] for column in columns}


def _lines(
    ax: Any, df: pd.DataFrame, columns: dict[str, str], colours: Sequence[str] | None
) -> None:
    """Draw the mean over runs of some columns; without colours they go from dark to light."""
    shades = colormaps["viridis"](np.linspace(0, 0.95, len(columns)))
    for k, (column, label) in enumerate(columns.items()):
        means = df.groupby("step")[column].mean()
        colour = shades[k] if colours is None else colours[k]
        ax.plot(means.index, means.to_numpy(), color=colour, label=label, marker=".", ms=2)
