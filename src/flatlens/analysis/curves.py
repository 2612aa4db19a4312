"""Curves into numbers: what is said of one quantity, or two, over the steps of one run.

Changes are of logarithms, so that they compare between quantities; a volume is a logarithm already.
A number that the run has no records for is nan. The *late* phase begins where the training loss is
near zero (`records.interpolation`).
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from flatlens.analysis import tables as records
from flatlens.analysis.statistics import Array, correlation, ranks

SHARPNESS = "sqrt_sharpness"
FEWEST = 6  # records of a run in a phase, to say anything of it
LEVEL = 0.05  # a logarithm that changes by less has levelled off


def logarithm(df: pd.DataFrame, column: str) -> Array:
    """log of a quantity; volumes are logarithms already. Not finite where there is none."""
    values = records.numbers(df, column)
    if column.startswith("log_"):
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)


def phase(run: pd.DataFrame, which: str) -> pd.DataFrame:
    """The records of one run until ("early") or from ("late") where the loss is near zero."""
    step = records.interpolation(run)
    if which == "all":
        return run
    if which == "early":
        return run if step is None else run[run["step"] <= step]
    return run[:0] if step is None else run[run["step"] >= step]


def slope(run: pd.DataFrame, column: str) -> float:
    """Change of the logarithm per step: a straight line through the records; nan for too few."""
    y = logarithm(run, column)
    step = run["step"].to_numpy(float)[np.isfinite(y)]
    if len(step) < FEWEST or np.ptp(step) == 0:
        return math.nan
    step = step - step.mean()
    return float(step @ y[np.isfinite(y)] / (step @ step))


def late_change(run: pd.DataFrame, column: str, start: float = 0.0) -> float:
    """Change of a logarithm over the late phase, or over what follows its share `start`."""
    late = phase(run, "late")
    if late.empty:
        return math.nan
    first, last = late["step"].iloc[0], late["step"].iloc[-1]
    rest = late[late["step"] >= first + start * (last - first)]
    return slope(rest, column) * float(rest["step"].iloc[-1] - rest["step"].iloc[0])


def slowing(run: pd.DataFrame, column: str) -> float:
    """Rate in the second half of the late phase minus the rate from the maximum until then."""
    late, values = phase(run, "late"), logarithm(run, column)
    if late.empty or not np.isfinite(values).any():
        return math.nan
    middle = (late["step"].iloc[0] + late["step"].iloc[-1]) / 2
    peak = run["step"].to_numpy()[int(np.nanargmax(values))]
    before = run[(run["step"] >= peak) & (run["step"] <= middle)]
    after = run[run["step"] >= middle]
    return 1_000 * (slope(after, column) - slope(before, column))


def change_once_level(run: pd.DataFrame, column: str) -> float:
    """Change over the second half of the late phase, if sharpness is level there; else nan."""
    if not abs(late_change(run, SHARPNESS, start=0.5)) < LEVEL:
        return math.nan
    return late_change(run, column, start=0.5)


def over_steps(run: pd.DataFrame, x: str, y: str, during: str = "all") -> float:
    """Spearman's coefficient of two curves."""
    part = phase(run, during)
    records.require(part, [x, y])
    a, b = records.numbers(part, x), records.numbers(part, y)
    good = np.isfinite(a) & np.isfinite(b)
    if good.sum() < FEWEST:
        return math.nan
    return float(correlation(ranks(a[good]), ranks(b[good])))
