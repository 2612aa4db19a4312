"""One look for all figures: told apart by all readers, legible at the width of one column."""

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

from flatlens.errors import FlatlensError
from flatlens.files.replacing import replacing

WIDTH = 5.5  # inches: the text width of the paper's format
# Okabe and Ito's colours, black and yellow left out; lines differ in dashes, points in shape too
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
    "pdf.fonttype": 42,  # letters stay letters
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
}

# what the columns of records are called in figures and tables
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
    """A column as it is written beside an axis."""
    return NAMES.get(column, column.replace("_", " "))


def figure(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure of one text width, and its axes as an array `[rows, columns]`."""
    # Figure rather than pyplot: no window, no state shared with the caller's own figures
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.04, hspace=0.04)
    made = Figure(figsize=(WIDTH, height), layout=layout)
    return made, made.subplots(rows, columns, squeeze=False, **options)


@contextmanager
def look() -> Iterator[None]:
    """Settings of matplotlib for as long as a figure is drawn."""
    with mpl.rc_context(RC):
        yield


def spread(values: Any, log: bool = False) -> tuple[Any, Any, Any]:
    """Mean over runs (rows of `values`), and one standard deviation below and above it.

    With `log` all three are of the logarithms.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        table = np.log(values) if log else np.asarray(values, float)
        mean = table.mean(axis=0)  # -inf where a volume is 0
        width = table.std(axis=0, ddof=1) if len(table) > 1 else np.zeros_like(mean)
        middle, low, high = (np.exp(v) if log else v for v in (mean, mean - width, mean + width))
    return middle, low, high


def band(
    ax: Axes, steps: Any, values: Any, k: int, label: str, log: bool = False
) -> tuple[Any, Any]:
    """The mean with its spread to both sides, on a log axis of the logarithms.

    Gives x and y of the line.
    """
    middle, low, high = spread(values, log)
    colour, dashes = COLOURS[k % len(COLOURS)], DASHES[k % len(DASHES)]
    ax.plot(steps, middle, color=colour, linestyle=dashes, label=label)
    if len(values) > 1:
        ax.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    return steps, middle


def log_steps(ax: Axes, steps: Any) -> None:
    """A log axis of steps that has step 0 too."""
    positive = np.asarray(steps)[np.asarray(steps) > 0]
    first, last = (positive.min(), positive.max()) if len(positive) else (1, 1)
    ax.set_xscale("symlog", linthresh=float(first), linscale=0.3)
    powers = 10.0 ** np.arange(np.ceil(np.log10(first)), np.floor(np.log10(last)) + 1)
    ax.xaxis.set_major_locator(FixedLocator([0, *powers]))


def note(ax: Axes, text: str) -> None:
    """A remark in the upper right corner of a panel."""
    ax.text(0.98, 0.97, text, size=6, color="0.35", ha="right", va="top", transform=ax.transAxes)


def save(figure: Figure, path: str | Path) -> dict[str, Path]:
    """Writes `path`.pdf and `path`.png, each whole or not at all; gives both paths."""
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
