"""Reduce the curve of a quantity over one run to a number: its slope, its late change, its trend.

Changes are changes of logarithms, so that quantities can be compared; a volume is a logarithm
already. A number for which the run has too few records is NaN. The *late* phase of a run begins
where its training loss is near zero (`run_table.interpolation`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.statistics import Array, correlation, ranks

Mask = np.ndarray[Any, np.dtype[np.bool_]]
SHARPNESS = "sqrt_sharpness"
FEWEST_RECORDS = 6  # Fewest records of a run for a slope or a rank correlation over steps.
LEVEL = 0.05  # Largest change of a logarithm that counts as level.


def logarithm(df: pd.DataFrame, column: str) -> Array:
    """Return the logarithm of a column; volumes are logarithms already."""
    values = run_table.numbers(df, column)
    if column.startswith("log_"):
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)


def in_phase(run: pd.DataFrame, which: str) -> Mask:
    """Return which records are before ("early") or after ("late") the loss is near zero.

    Args:
        run: the records of one run.
        which: "early", "late" or "all". The record at the boundary belongs to both phases.
    """
    steps = run["step"].to_numpy()
    step = None if which == "all" else run_table.interpolation(run)
    if which == "late":
        return np.zeros(len(steps), bool) if step is None else np.asarray(steps >= step)
    return np.ones(len(steps), bool) if step is None else np.asarray(steps <= step)


def phase(run: pd.DataFrame, which: str) -> pd.DataFrame:
    """Return the records of a run in one phase; see `in_phase`."""
    return run[in_phase(run, which)]


def slope(run: pd.DataFrame, column: str) -> float:
    """Return the change of the logarithm per step, from a straight line through the records."""
    return _slope(run["step"].to_numpy(float), logarithm(run, column))


def _slope(steps: Array, logarithms: Array) -> float:
    good = np.isfinite(logarithms)
    steps = steps[good]
    if len(steps) < FEWEST_RECORDS or np.ptp(steps) == 0:
        return math.nan
    steps = steps - steps.mean()
    return float(steps @ logarithms[good] / (steps @ steps))


def late_change(run: pd.DataFrame, column: str, start: float = 0.0) -> float:
    """Return the change of a logarithm over the late phase.

    Args:
        run: the records of one run.
        column: the quantity.
        start: share of the late phase that is left out at its beginning.
    """
    # arrays and not tables: a report asks for this number thousands of times
    late, steps = in_phase(run, "late"), run["step"].to_numpy(float)
    if not late.any():
        return math.nan
    begin, end = steps[late][[0, -1]]
    rest = late & (steps >= begin + start * (end - begin))
    change = steps[rest][-1] - steps[rest][0]
    return _slope(steps[rest], logarithm(run, column)[rest]) * float(change)


def slowing(run: pd.DataFrame, column: str) -> float:
    """Return the rate in the second half of the late phase minus the rate before it.

    The rate before it begins at the maximum of the curve. Rates are per 1,000 steps.
    """
    late, steps = in_phase(run, "late"), run["step"].to_numpy(float)
    values = logarithm(run, column)
    if not late.any() or not np.isfinite(values).any():
        return math.nan
    middle = (steps[late][0] + steps[late][-1]) / 2
    before = (steps >= steps[int(np.nanargmax(values))]) & (steps <= middle)
    after = steps >= middle
    return 1_000 * (_slope(steps[after], values[after]) - _slope(steps[before], values[before]))


def change_once_level(run: pd.DataFrame, column: str) -> float:
    """Return the change in the second half of the late phase; NaN if sharpness is not level."""
    if not abs(late_change(run, SHARPNESS, start=0.5)) < LEVEL:
        return math.nan
    return late_change(run, column, start=0.5)


def over_steps(run: pd.DataFrame, x: str, y: str, during: str = "all") -> float:
    """Return Spearman's rank correlation of two curves of one run."""
    run_table.require(run, [x, y])
    during_phase = in_phase(run, during)
    a, b = (run_table.numbers(run, name)[during_phase] for name in (x, y))
    good = np.isfinite(a) & np.isfinite(b)
    if good.sum() < FEWEST_RECORDS:
        return math.nan
    return float(correlation(ranks(a[good]), ranks(b[good])))
