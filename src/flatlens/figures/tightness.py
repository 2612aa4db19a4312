"""How tight the bounds are over training: Fig. G.4, and beside it the bounds that are tighter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatlens.analysis import tables as records
from flatlens.figures import style
from flatlens.figures.trends import curves

# title of each panel, and the columns in it with their labels; lowest line first
PANELS = {
    "Eq. 48, as in the paper": {
        "eq48_ab.lhs": "A = MLS",
        "eq48_ab.rhs": "B",
        "eq48_bc.rhs": "C",
        "eq48_cd.rhs": "D = Eq. 11",
    },
    "MLS and its bounds": {
        "eq11.lhs": "MLS",
        "eq48_bc.rhs": "C",
        "eq11_bias.rhs": "Eq. 11, bias",
        "eq11.rhs": "Eq. 11",
    },
    "NMLS and its bounds": {
        "eq12.lhs": "NMLS",
        "eq12_bias.rhs": "Eq. 12, bias",
        "eq12_untied.rhs": "untied",
        "eq12.rhs": "Eq. 12",
    },
}
# one colour for one idea in all panels
ORDER = ("MLS", "B", "C", "Eq. 11", "Eq. 11, bias", "untied")
SAME = {
    "A = MLS": "MLS",
    "NMLS": "MLS",
    "D = Eq. 11": "Eq. 11",
    "Eq. 12": "Eq. 11",
    "Eq. 12, bias": "Eq. 11, bias",
}


LEGEND: Any = {"handlelength": 2.4, "labelspacing": 0.25, "columnspacing": 1.0}


def tightness(df: pd.DataFrame, *, log_steps: bool = False) -> Figure:
    """A, B, C and D of Eq. 48 over training; then MLS and NMLS under the paper's bounds and ours.

    Runs of one configuration are drawn, as mean over seeds with one standard deviation (of
    logarithms) to both sides: of the one with most runs, else of the middle one.
    """
    df = records.prepared(df)
    records.require_one_family(df)
    records.require(df, next(iter(PANELS.values())))
    df, which = one_configuration(df)
    with style.look():
        figure, axes = style.figure(1, 3, height=2.3, sharey=True)
        for ax, (title, lines) in zip(axes[0], PANELS.items(), strict=True):
            for column, label in lines.items():
                # A bound that a network does not have is left out, or infinite
                if column not in df or not np.isfinite(records.numbers(df, column)).any():
                    continue
                table, k = curves(df, column), ORDER.index(SAME.get(label, label))
                style.band(ax, table.columns, table.to_numpy(), k, label, log=True)
            ax.set_yscale("log")
            ax.set_title(title)
            ax.set_xlabel("SGD steps")
            if log_steps:
                style.log_steps(ax, df["step"])
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2, **LEGEND)
        if which != "all":
            figure.suptitle(which, fontsize=style.RC["font.size"])
    return figure


def one_configuration(df: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The runs of the configuration with most runs, of several the middle one; and its name."""
    keys = records.configurations(df)
    runs = df["run"].groupby(keys).nunique()
    most = [key for key in records.ordered(df) if runs[key] == runs.max()]
    which = most[len(most) // 2]
    return df[keys == which], which
