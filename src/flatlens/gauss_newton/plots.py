"""Figures of a spectrum, drawn with matplotlib, which is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flatlens.measurement.plots import COLOURS, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THRESHOLDS = 40  # points of an estimated curve


def spectrum_plot(spectrum: Any, ax: Any = None) -> Axes:
    """Draw eigenvalues by rank; for an estimated spectrum with bands of two standard errors.

    Args:
        spectrum: a ``Spectrum``.
        ax: axes to draw on, or None.

    Returns:
        The axes.
    """
    ax = new_axes(ax, 12)
    values = spectrum.values[spectrum.values > 0]
    ranks = np.arange(1, len(values) + 1)
    label = "eigenvalues" if spectrum.exact else "block Lanczos"
    ax.loglog(ranks, values, ".", color=COLOURS[0], label=label)
    if spectrum.density is not None and len(values):
        thresholds = np.geomspace(values[0] * 1e-6, values[-1], THRESHOLDS)
        counts = np.array([spectrum.density.count_above(t) for t in thresholds])
        keep = counts[:, 0] >= 1
        ax.errorbar(
            counts[keep, 0], thresholds[keep], xerr=2 * counts[keep, 1],
            color=COLOURS[1], linewidth=1, elinewidth=0.5, label="density, 2 standard errors",
        )  # fmt: skip
        ax.legend(frameon=False)
    for (name, layer), colour in zip(spectrum.layers.items(), COLOURS * 100, strict=False):
        ax.loglog(np.arange(1, len(layer) + 1), layer, color=colour, linewidth=0.7, label=name)
    if spectrum.layers:
        ax.legend(frameon=False, fontsize="small")
    ax.set_xlabel("rank")
    ax.set_ylabel("eigenvalue of the Gauss-Newton matrix")
    return ax
