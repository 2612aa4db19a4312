"""Draw when which kind of compression happens: curvature, local and global quantities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
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
    """Tell whether the records hold everything that the panel shows."""
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
        figure, axes = style.figure(2, 3, height=3.6, sharex=True)
        _lines(axes[0, 0], df, {"train_loss": "training loss"}, "log")
        _lines(axes[0, 1], df, CURVATURE, "log")
        _lines(axes[0, 2], df, LOCAL, "log")
        for ax, (name, title) in zip(axes[1], GLOBAL.items(), strict=True):
            places = [c for c in df.columns if str(c).startswith(f"{name}{SEPARATOR}")]
            if not places:
                raise FlatlensError(f"The records have no column {name!r} of any layer.")
            labels = {str(c): str(c).partition(SEPARATOR)[2] for c in places}
            _lines(ax, df, labels, "log" if name == "nc1" else "linear")
            ax.set_title(title)
        for ax in axes[1]:
            ax.set_xlabel("steps")
        for ax, title in zip(
            axes[0], ("loss", "curvature", "local: S bounds MLS, NMLS"), strict=True
        ):
            ax.set_title(title)
    return figure


def _lines(ax: Any, df: pd.DataFrame, columns: dict[str, str], scale: str) -> None:
    """Draw the mean over runs of some columns."""
    for k, (column, label) in enumerate(columns.items()):
        means = df.groupby("step")[column].mean()
        colour = style.COLOURS[k % len(style.COLOURS)]
        ax.plot(means.index, means.to_numpy(), color=colour, label=label, marker=".", ms=2)
    positive = np.concatenate([df[c].to_numpy(dtype=float) for c in columns])
    if scale == "log" and np.nanmin(positive) > 0:
        ax.set_yscale("log")
    if len(columns) > 1:
        ax.legend(fontsize=5, frameon=False)
