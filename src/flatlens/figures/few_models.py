"""Draw a zoo of a few models: points with names, without a trend or a correlation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatlens.figures import style


def few_models(
    df: pd.DataFrame, x: str = "adaptive_sharpness", y: str = "normalized_mls"
) -> Figure:
    """Draw one named point per model on logarithmic axes, with standard errors over images.

    A few points support neither a trend nor a correlation, so none is drawn.

    Args:
        df: table of `read_runs` with one row per model.
        x: column of the horizontal axis.
        y: column of the vertical axis.
    """
    positive = (df[x] > 0) & (df[y] > 0) & np.isfinite(df[x]) & np.isfinite(df[y])
    df = df[positive]
    with style.look():
        figure, axes = style.figure(1, 1, height=3.0)
        ax = axes[0, 0]
        for k, record in enumerate(df.to_dict("records")):
            errors: dict[str, Any] = {
                side: record[f"{column}_se"]
                for side, column in (("xerr", x), ("yerr", y))
                if np.isfinite(record.get(f"{column}_se", np.nan))
            }
            colour = style.COLOURS[k % len(style.COLOURS)]
            ax.errorbar(record[x], record[y], **errors, fmt="o", ms=3.5, color=colour)
            ax.annotate(
                str(record["model"]), (record[x], record[y]), xytext=(4, 4),
                textcoords="offset points", size=6,
            )  # fmt: skip
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel(x.replace("_", " "))
        ax.set_ylabel(y.replace("_", " ").replace("mls", "MLS"))
    return figure
