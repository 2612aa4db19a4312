"""Draw the bounds over training: Fig. G.4 of the paper, and beside it tighter bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatlens.analysis import run_table
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.figures import style

# The title of each panel, and its columns with their labels, the lowest line at the front.
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
# Lines of the same idea have the same colour in all panels.
ORDER = ("MLS", "B", "C", "Eq. 11", "Eq. 11, bias", "untied")
SAME = {
    "A = MLS": "MLS",
    "NMLS": "MLS",
    "D = Eq. 11": "Eq. 11",
    "Eq. 12": "Eq. 11",
    "Eq. 12, bias": "Eq. 11, bias",
}


LEGEND: Any = {"handlelength": 2.4, "labelspacing": 0.25, "columnspacing": 1.0}


@no_type_check
@typed_arguments
def tightness(df: pd.DataFrame, *, log_steps: bool = False) -> Figure:
    """Draw A, B, C and D of Eq. 48 over training, then MLS and NMLS with their bounds.

    The runs of one configuration are drawn: the one with most runs, of several the middle one.
    Lines are means over seeds with one standard deviation (of logarithms) to both sides.

    Args:
        df: table of `read_runs` with the runs of one family.
        log_steps: use a logarithmic axis of steps.
    """
    df = run_table.prepared(df)
    run_table.require_one_family(df)
    run_table.require(df, next(iter(PANELS.values())))
    df, name = run_table.main_configuration(df)
    with style.look():
        figure, axes = style.figure(1, 3, height=2.3, sharey=True)
        for ax, (title, lines) in zip(axes[0], PANELS.items(), strict=True):
            for column, label in lines.items():
                # A bound that does not apply to a network is missing or infinite.
                if column not in df or not np.isfinite(run_table.numbers(df, column)).any():
                    continue
                table, k = run_table.curve_table(df, column), ORDER.index(SAME.get(label, label))
                style.band(ax, table.columns, table.to_numpy(), k, label, log=True)
            ax.set_yscale("log")
            ax.set_title(title)
            ax.set_xlabel("SGD steps")
            if log_steps:
                style.log_steps(ax, df["step"])
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2, **LEGEND)
        if name != "all":
            figure.suptitle(name, fontsize=style.RC["font.size"])
    return figure
