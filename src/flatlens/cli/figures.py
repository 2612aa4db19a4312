"""The option ``--figure``: a file that is new, or a figure that flatlens wrote before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatlens.cli.outputs import begins_with, check_output_file
from flatlens.errors import FlatlensError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AUTHOR = "Drawn by flatlens"  # in the metadata of every figure
# the field of the metadata that takes the author, by format
FIELDS = {".png": "Software", ".pdf": "Creator", ".svg": "Creator"}


def check_figure(path: Path) -> None:
    """Raise if a figure has another format, or would replace a file of the user.

    Raises:
        FlatlensError: if the name has another suffix, the folder does not exist, or the file is
            not a figure that flatlens wrote.
    """
    if path.suffix.lower() not in FIELDS:
        raise FlatlensError(f"A figure ends in {', '.join(FIELDS)}; rename {path}.")
    if not path.absolute().parent.is_dir():
        raise FlatlensError(f"There is no folder {path.parent} for the figure; make it first.")
    largest = 50_000_000  # a PDF has its metadata near its end
    check_output_file(path, begins_with(AUTHOR, within=largest), "a figure")


def write_figure(path: Path, axes: Axes) -> None:
    """Write the figure of some axes, complete or not at all, and close it."""
    from matplotlib import pyplot as plt
    from matplotlib import rc_context

    from flatlens.files.replacing import replacing

    kind = path.suffix.lower()
    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}  # the same numbers, same bytes
    metadata: dict[str, Any] = {FIELDS[kind]: AUTHOR} | dates.get(kind, {})
    figure: Any = axes.figure
    try:
        # the names inside an SVG are random without a salt
        with replacing(path) as temporary, rc_context({"svg.hashsalt": "flatlens"}):
            figure.savefig(temporary, format=kind[1:], dpi=220, metadata=metadata)
    except OSError as error:
        raise FlatlensError(f"Cannot write {path}: {error.strerror or error}.") from error
    finally:
        plt.close(figure)
