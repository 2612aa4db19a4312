"""Figures of representation tables, layer by layer and over training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError
from flatlens.measurement.plots import COLOURS, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@no_type_check
def representation_plot(
    tables: Any, quantity: str = "participation_ratio", *, ax: Axes | None = None
) -> Axes:
    """Draw one column of a table of representations, layer by layer.

    Args:
        tables: a table of ``representations``, or a dict of tables by label, such as the training
            step. Each table becomes a line.
        quantity: the column to draw. If the table has its standard error, the error is drawn as a
            band.
        ax: axes of matplotlib to draw into. None makes a new figure.

    Returns:
        The axes.

    Raises:
        FlatlensError: if a table does not have the column.

    Example:
        >>> import torch, flatlens as fl
        >>> table = fl.representations(torch.nn.Linear(3, 2), torch.randn(20, 3))
        >>> representation_plot(table).get_ylabel()
        'participation_ratio'
    """
    several = dict(tables) if isinstance(tables, Mapping) else {"": tables}
    ax = new_axes(ax, 12)
    for number, (label, table) in enumerate(several.items()):
        if quantity not in table:
            numbers = [c for c in table.columns if table[c].dtype.kind == "f"]
            raise FlatlensError(
                f"the table has no column {quantity!r}; choose from {', '.join(numbers)}"
            )
        values, places = table[quantity].to_numpy(), np.arange(len(table))
        colour = COLOURS[number % len(COLOURS)]
        ax.plot(places, values, ".-", color=colour, label=str(label) or None)
        if f"{quantity}_se" in table:
            error = 2 * table[f"{quantity}_se"].to_numpy()
            ax.fill_between(places, values - error, values + error, color=colour, alpha=0.2, lw=0)
        ax.set_xticks(places, table["layer"], rotation=45, ha="right")
    if len(several) > 1:
        ax.legend(frameon=False, fontsize="small")
    ax.set_ylabel(quantity)
    return ax
