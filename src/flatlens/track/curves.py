"""Curves of records over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatlens.errors import FlatlensError
from flatlens.metrics import HEADLINE, METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_records(
    records: Sequence[Mapping[str, Any]],
    quantities: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot quantities over steps, each divided by its first nonzero value.

    Quantities differ by orders of magnitude. Relative to their first values they share one axis.
    ``log_volume`` is a logarithm already: its difference to the first value is drawn as a factor.

    Args:
        records: records with the key ``step``.
        quantities: names to draw. None draws the headline quantities that the records have.
        ax: axes to draw into. None makes a new figure.

    Returns:
        The axes; ``ax.figure`` is the figure, which a notebook shows.

    Raises:
        FlatlensError: if there are no records, or a name is not in any of them.

    Example:
        >>> records = [{"step": 0, "nmls": 4.0}, {"step": 10, "nmls": 2.0}]
        >>> ax = plot_records(records)
        >>> [line.get_ydata().tolist() for line in ax.get_lines()]
        [[1.0, 0.5]]
    """
    available = dict.fromkeys(name for record in records for name in record if name != "step")
    if not available:
        raise FlatlensError("there are no records to plot; call the tracker in the training first")
    names = list(quantities or [n for n in HEADLINE if n in METRICS and n in available])
    names = names or list(available)
    for name in names:
        if name not in available:
            raise FlatlensError(
                f"quantities has the name {name!r}, which no record has; choose from "
                f"{', '.join(available)}"
            )
    axes = ax if ax is not None else _new_axes()
    for name in names:
        steps = [record["step"] for record in records if name in record]
        values = [float(record[name]) for record in records if name in record]
        axes.plot(steps, _relative(name, values), marker=".", label=name.replace("_", " "))
    axes.set_yscale("log")
    axes.set_xlabel("steps")
    axes.set_ylabel("relative to the first record")
    axes.legend()
    return axes


def _relative(name: str, values: list[float]) -> list[float]:
    """Divide values by the first one that is finite and not zero; a logarithm becomes a factor."""
    if name.startswith("log_"):
        start = next((v for v in values if math.isfinite(v)), 0.0)
        return [math.exp(min(v - start, 700.0)) for v in values]
    start = next((v for v in values if math.isfinite(v) and v != 0), 1.0)
    return [v / start for v in values]


def _new_axes() -> Axes:
    """Make axes; with pyplot a notebook shows the figure, and a script can call plt.show()."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(layout="constrained")
    return axes
