"""One style for all figures: distinguishable by colour-blind readers, legible in one column."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator

from flatlens.analysis.statistics import mean_and_deviation
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.errors import FlatlensError
from flatlens.files.replacing import replacing

WIDTH = 5.5  # Inches: the text width of the paper's format.
# Okabe and Ito's colours without black and yellow. Lines also differ in dashes, points in shape.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = (
    "-",
    (0, (5, 1.5)),
    (0, (1.5, 1)),
    (0, (5, 1, 1, 1)),
    (0, (8, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P")
RC: Any = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "legend.fontsize": 6.5,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.4,
    "axes.titlepad": 3,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
}

# Names of the columns of records in figures and tables.
NAMES = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "sqrt_sharpness": "sharpness (√S)",
    "sharpness": "S",
    "nmls": "NMLS",
    "mls": "MLS",
    "log_volume": "log volume",
    "log_volume_top3": "log volume (top 3)",
    "local_dimension": "local dimension",
    "generalization_gap": "gen. gap (points)",
    "eq48_cd.rhs": "D",
    "eq48_bc.rhs": "C",
    "eq12.rhs": "bound (12)",
    "bound_authors": "bound (12, authors)",
    "d_authors": "D (authors)",
    "relative_flatness": "relative sharpness",
}


def name(column: str) -> str:
    """Return a column as it is written beside an axis."""
    return NAMES.get(column, column.replace("_", " "))


def figure(row_count: int, column_count: int, height: float, **options: Any) -> tuple[Figure, Any]:
    """Return a figure of one text width, and its axes as an array `[row_count, column_count]`."""
    # Figure rather than pyplot: no window, no state shared with the caller's own figures
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.04, hspace=0.04)
    new = Figure(figsize=(WIDTH, height), layout=layout)
    return new, new.subplots(row_count, column_count, squeeze=False, **options)


@contextmanager
def look() -> Iterator[None]:
    """Apply the style while a figure is drawn, and restore the caller's settings."""
    with mpl.rc_context(RC):
        yield


def band(
    ax: Axes, steps: Any, values: Any, k: int, label: str, log: bool = False
) -> tuple[Any, Any]:
    """Draw the mean over runs with one standard deviation to both sides.

    Returns:
        x and y of the line.
    """
    middle, low, high = mean_and_deviation(values, log)
    colour, dashes = COLOURS[k % len(COLOURS)], DASHES[k % len(DASHES)]
    ax.plot(steps, middle, color=colour, linestyle=dashes, label=label)
    if len(values) > 1:
        ax.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    return steps, middle


def log_steps(ax: Axes, steps: Any) -> None:
    """Make the axis of steps logarithmic, with a place for step 0."""
    positive = np.asarray(steps)[np.asarray(steps) > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (1, 1)
    ax.set_xscale("symlog", linthresh=float(low), linscale=0.3)
    powers = 10.0 ** np.arange(np.ceil(np.log10(low)), np.floor(np.log10(high)) + 1)
    ax.xaxis.set_major_locator(FixedLocator([0, *powers]))


def note(ax: Axes, text: str) -> None:
    """Write a remark into the upper right corner of a panel."""
    ax.text(0.98, 0.97, text, size=6, color="0.35", ha="right", va="top", transform=ax.transAxes)


@no_type_check
@typed_arguments
def save(figure: Figure, path: str | Path) -> dict[str, Path]:
    """Write `path`.pdf and `path`.png, each complete or not at all, and return both paths.

    Raises:
        FlatlensError: if a file cannot be written; the old file stays.
    """
    base = Path(path)
    paths = {kind: base.with_name(f"{base.name}.{kind}") for kind in ("pdf", "png")}
    for kind, target in paths.items():
        try:
            with replacing(target) as temporary, look():
                # no date inside: the same records give the same bytes
                metadata = {"CreationDate": None} if kind == "pdf" else None
                figure.savefig(temporary, format=kind, dpi=220, metadata=metadata)
        except OSError as error:
            raise FlatlensError(f"Cannot write {target}: {error.strerror or error}.") from error
    return paths
