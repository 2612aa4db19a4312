"""Draw six quantities over training, a line per value of a setting: Figs. 1, 2, H.8, H.9."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from flatlens.analysis import run_table
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.figures import style

# The paper's panels in its order, with the scale of the axis.
PANELS = {
    "train_loss": "log",
    "nmls": "linear",
    "sqrt_sharpness": "linear",
    "log_volume": "linear",
    "mls": "linear",
    "local_dimension": "log",
}


DOT: Any = {"marker": "o", "ms": 4, "mec": "white", "mew": 0.6}


@no_type_check
@typed_arguments
def trends(
    df: pd.DataFrame, by: str = "lr", *, volume: str = "log_volume", log_steps: bool = False
) -> Figure:
    """Draw training loss, NMLS, root sharpness, log volume, MLS and local dimension over steps.

    Lines are means over seeds with one standard deviation to both sides. A dot marks where the
    training loss is near zero (1 % of its start; the median over seeds).

    Args:
        df: table of `read_runs` with the runs of one family.
        by: the setting that varies, a line per value.
        volume: column of the log volume; the paper plots "log_volume_top3".
        log_steps: use a logarithmic axis of steps.
    """
    df = run_table.prepared(df)
    run_table.require_one_family(df)
    columns = [volume if name == "log_volume" else name for name in PANELS]
    run_table.require(df, [name for name in columns if name != "sqrt_sharpness"] + ["sharpness"])
    name, df = run_table.arm_name(df, by), run_table.arm(df, by)
    with style.look():
        figure, axes = style.figure(2, 3, height=3.3, sharex=True)
        for ax, column, scale in zip(axes.flat, columns, PANELS.values(), strict=True):
            for k, (value, part) in enumerate(df.groupby(by)):
                table = run_table.curve_table(part, column)
                label = f"{'learning rate' if by == 'lr' else run_table.label(by)} {value}"
                steps, line = style.band(
                    ax, table.columns, table.to_numpy(), k, label, log=scale == "log"
                )
                if (step := run_table.median_interpolation(part)) is not None:
                    nearest = int(np.abs(np.asarray(steps) - step).argmin())
                    colour = style.COLOURS[k % len(style.COLOURS)]
                    ax.plot(steps[nearest], line[nearest], color=colour, **DOT)
            ax.set_title(style.name(column))
            if not np.isfinite(run_table.numbers(df, column)).all():
                style.note(ax, f"no line: {'volume 0' if column == volume else 'not finite'}")
            ax.set_yscale(scale)
            if column == "local_dimension":  # less than a decade: plain numbers
                ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
                ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                ax.yaxis.set_minor_formatter(NullFormatter())
            if log_steps:
                style.log_steps(ax, df["step"])
        for ax in axes[1]:
            ax.set_xlabel("SGD steps")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        dot = Line2D([], [], linestyle="none", color="0.4", **DOT)
        figure.legend(
            [*handles, dot], [*labels, f"loss at {run_table.INTERPOLATION:.0%} of its start"],
            loc="outside upper center", ncols=len(labels) + 1, title=name or None,
        )  # fmt: skip
    return figure
