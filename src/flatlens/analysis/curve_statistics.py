"""Reduce the curve of a quantity over one run to a number: its slope, its late change, its trend.

Changes are changes of logarithms, so that quantities can be compared; a volume is a logarithm
already. A number for which the run has too few records is NaN. The *late* phase of a run begins
where its training loss is near zero (`run_table.interpolation`).
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.statistics import Array, correlation, ranks

SHARPNESS = "sqrt_sharpness"
FEWEST_RECORDS = 6  # A slope or a rank correlation over steps needs this many records of a run.
LEVEL = 0.05  # A logarithm that changes by less has levelled off.


def logarithm(df: pd.DataFrame, column: str) -> Array:
    """Return the logarithm of a column; volumes are logarithms already."""
    values = run_table.numbers(df, column)
    if column.startswith("log_"):
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)


def phase(run: pd.DataFrame, which: str) -> pd.DataFrame:
    """Return the records of a run before ("early") or after ("late") its loss is near zero.

    Args:
        run: the records of one run.
        which: "early", "late" or "all". The record at the boundary belongs to both phases.
    """
    step = run_table.interpolation(run)
    if which == "all":
        return run
    if which == "early":
        return run if step is None else run[run["step"] <= step]
    return run[:0] if step is None else run[run["step"] >= step]


def slope(run: pd.DataFrame, column: str) -> float:
    """Return the change of the logarithm per step, from a straight line through the records."""
    y = logarithm(run, column)
    step = run["step"].to_numpy(float)[np.isfinite(y)]
    if len(step) < FEWEST_RECORDS or np.ptp(step) == 0:
        return math.nan
    step = step - step.mean()
    return float(step @ y[np.isfinite(y)] / (step @ step))


def late_change(run: pd.DataFrame, column: str, start: float = 0.0) -> float:
    """Return the change of a logarithm over the late phase.

    Args:
        run: the records of one run.
        column: the quantity.
        start: share of the late phase that is left out at its beginning.
    """
    late = phase(run, "late")
    if late.empty:
        return math.nan
    begin, end = late["step"].iloc[0], late["step"].iloc[-1]
    rest = late[late["step"] >= begin + start * (end - begin)]
    return slope(rest, column) * float(rest["step"].iloc[-1] - rest["step"].iloc[0])


def slowing(run: pd.DataFrame, column: str) -> float:
    """Return the rate in the second half of the late phase minus the rate before it.

    The rate before it begins at the maximum of the curve. Rates are per 1,000 steps.
    """
    late, values = phase(run, "late"), logarithm(run, column)
    if late.empty or not np.isfinite(values).any():
        return math.nan
    middle = (late["step"].iloc[0] + late["step"].iloc[-1]) / 2
    peak = run["step"].to_numpy()[int(np.nanargmax(values))]
    before = run[(run["step"] >= peak) & (run["step"] <= middle)]
    after = run[run["step"] >= middle]
    return 1_000 * (slope(after, column) - slope(before, column))


def change_once_level(run: pd.DataFrame, column: str) -> float:
    """Return the change over the second half of the late phase, or NaN if sharpness moves there."""
    if not abs(late_change(run, SHARPNESS, start=0.5)) < LEVEL:
        return math.nan
    return late_change(run, column, start=0.5)


def over_steps(run: pd.DataFrame, x: str, y: str, during: str = "all") -> float:
    """Return Spearman's rank correlation of two curves of one run."""
    records = phase(run, during)
    run_table.require(records, [x, y])
    a, b = run_table.numbers(records, x), run_table.numbers(records, y)
    good = np.isfinite(a) & np.isfinite(b)
    if good.sum() < FEWEST_RECORDS:
        return math.nan
    return float(correlation(ranks(a[good]), ranks(b[good])))
