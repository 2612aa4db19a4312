"""Draw every quantity against every other at the end of training: Figs. G.5 to G.7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flatlens.analysis import run_table
from flatlens.analysis.statistics import correlation_table
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.errors import FlatlensError
from flatlens.figures import style

# The paper's nine quantities, in the order of its captions.
QUANTITIES = (
    "local_dimension",
    "sqrt_sharpness",
    "log_volume",
    "mls",
    "nmls",
    "generalization_gap",
    "eq48_cd.rhs",
    "eq12.rhs",
    "relative_flatness",
)
TITLES = {
    "local_dimension": "local\ndimension",
    "sqrt_sharpness": "sharpness\n√S",
    "log_volume": "log\nvolume",
    "log_volume_top3": "log vol.\n(top 3)",
    "generalization_gap": "gen. gap\n(points)",
    "eq12.rhs": "bound\n(12)",
    "bound_authors": "bound\n(authors)",
    "d_authors": "D\n(authors)",
    "relative_flatness": "relative\nsharpness",
}
# Vermilion for -1, white for 0, blue for +1.
SHADES = LinearSegmentedColormap.from_list("sign", ["#D55E00", "#FFFFFF", "#0072B2"])


@no_type_check
@typed_arguments
def correlations(df: pd.DataFrame, quantities: Sequence[str] | None = None) -> Figure:
    """Draw scatter plots below the diagonal and coefficients above it.

    Above the diagonal: Pearson's r, then Spearman's rho, each with its 95 % interval over seeds;
    the shade is r. Each point is a network, coloured by configuration.

    Args:
        df: table of `read_runs`.
        quantities: columns of the table, or "sqrt_sharpness". By default the paper's nine, as far
            as they were recorded and finite.
    """
    last = run_table.ends(run_table.prepared(df))
    chosen = recorded_quantities(last, quantities)
    keys, order = run_table.configurations(last), run_table.ordered(last)
    values = pd.DataFrame({name: run_table.numbers(last, name) for name in chosen})
    table = correlation_table(values, chosen, keys.tolist(), run_table.seeds(last))
    table = table.set_index(["x", "y"])
    with style.look():
        n = len(chosen)
        figure, axes = style.figure(n, n, height=style.WIDTH + 0.35)
        for i, row in enumerate(chosen):
            for j, column in enumerate(chosen):
                ax = axes[i, j]
                if i > j:
                    _scatter(ax, values[column], values[row], keys, order)
                elif i < j:
                    _coefficients(ax, table.loc[(row, column)], n)
                else:
                    _title(ax, row, n)
        _outer(axes)
        missing = [] if quantities else [name for name in QUANTITIES if name not in chosen]
        _legend(figure, order, len(last), missing)
    return figure


def recorded_quantities(last: pd.DataFrame, quantities: Sequence[str] | None) -> list[str]:
    """Return the quantities asked for, by default the paper's nine as far as they are finite."""
    if quantities is not None:
        run_table.require(last, quantities)
        chosen = list(quantities)
    else:
        chosen = run_table.finite_columns(last, QUANTITIES)
    if len(chosen) < 2:
        raise FlatlensError("Correlations need at least two quantities in the table of runs.")
    return chosen


def _scatter(ax: Axes, x: Any, y: Any, keys: Any, order: Sequence[str]) -> None:
    for k, key in enumerate(order):
        chosen = np.asarray(keys == key) & np.isfinite(x) & np.isfinite(y)
        ax.plot(x[chosen], y[chosen], linestyle="none", label=key, **_marker(k))
    ax.margins(0.08)
    ax.grid(False)


def _marker(k: int) -> dict[str, Any]:
    colour = style.COLOURS[k % len(style.COLOURS)]
    marker = style.MARKERS[k % len(style.MARKERS)]
    return {"color": colour, "marker": marker, "ms": 1.8, "mew": 0, "alpha": 0.8}


def _coefficients(ax: Axes, row: Any, n: int) -> None:
    size = _size(n)
    ax.set_facecolor(SHADES(Normalize(-1, 1)(0.75 * row["pearson"])))
    lines = [
        (0.78, f"r {number(row['pearson'])}", size + 1, "bold"),
        (0.59, _interval(row, "pearson"), size, "normal"),
        (0.36, f"ρ {number(row['spearman'])}", size + 1, "normal"),
        (0.17, _interval(row, "spearman"), size, "normal"),
    ]
    for height, text, points, weight in lines:
        ax.text(
            0.5, height, text, size=points, weight=weight, ha="center", va="center",
            transform=ax.transAxes,
        )  # fmt: skip
    _bare(ax)


def number(value: float) -> str:
    """Write a coefficient with two digits and without the zero before the point.

    >>> number(0.834), number(-0.05), number(1.0)
    ('.83', '−.05', '1.00')
    """
    if np.isnan(value):
        return "–"
    text = f"{abs(value):.2f}"
    text = text[1:] if text.startswith("0") else text
    return ("−" if value < 0 and float(f"{value:.2f}") else "") + text


def _interval(row: Any, kind: str) -> str:
    return f"[{number(row[f'{kind}_low'])}, {number(row[f'{kind}_high'])}]"


def _title(ax: Axes, column: str, n: int) -> None:
    text = TITLES.get(column, style.name(column))
    ax.text(0.5, 0.5, text, size=_size(n) + 1.5, ha="center", va="center", transform=ax.transAxes)
    ax.set_facecolor("#F2F2F2")
    _bare(ax)


def _size(n: int) -> float:
    """Return the font size that fits a cell if n cells share a row."""
    return float(np.clip(42 / n, 4.3, 6))


def _bare(ax: Axes) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def _outer(axes: Any) -> None:
    """Put tick labels at the left and the bottom only; cells of a row or column share a scale."""
    n = len(axes)
    for i in range(n):
        for j in range(i):
            ax = axes[i, j]
            ax.xaxis.set_major_locator(MaxNLocator(2, prune="both"))
            ax.yaxis.set_major_locator(MaxNLocator(2, prune="both"))
            ax.tick_params(labelsize=4.5, length=1.5, pad=1)
            ax.tick_params(labelleft=j == 0, labelbottom=i == n - 1)
            if j > 0:
                ax.sharey(axes[i, 0])
            if i < n - 1:
                ax.sharex(axes[n - 1, j])


def _legend(figure: Figure, order: Sequence[str], runs: int, missing: Sequence[str]) -> None:
    handles = [
        Line2D([], [], linestyle="none", **{**_marker(k), "ms": 4}) for k in range(len(order))
    ]
    title = f"{runs} networks; Pearson's r and Spearman's ρ with 95 % intervals over seeds"
    if missing:
        title += f"\nnot recorded or infinite: {', '.join(map(style.name, missing))}"
    labels = ["all of one configuration"] if order == ["all"] else list(order)
    figure.legend(
        handles, labels, loc="outside upper center", ncols=min(len(labels), 3), title=title,
        title_fontsize=style.RC["legend.fontsize"], handletextpad=0.1, columnspacing=1.2,
    )  # fmt: skip
