"""V1 and V2 on Figure 3, with the true numbers and with the paper's estimators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields

import numpy as np
import pandas as pd

from flatlens.analysis.claim_results import Result
from flatlens.analysis.claim_tests import ClaimTests
from flatlens.analysis.model_trend import (
    estimates,
    outliers,
    points,
    rank_correlation,
    trend,
)
from flatlens.analysis.statistics import Interval, wilson
from flatlens.errors import FlatlensError
from flatlens.figures.figure3 import ESTIMATORS, trained

TEXTS = {
    "V1": "normalised MLS rises with adaptive sharpness over models",
    "V2": "a family lies off the trend as a cluster, MobileViT at the upper left",
}
RHO = "Spearman's rho over models, interval over families"


def figure3_claims(df: pd.DataFrame) -> pd.DataFrame:
    """Judge V1 and V2 for both ways to compute the two axes, and compare the two ways.

    V1: the rank correlation of the two axes is above 0, by its interval over families. V2: most
    MobileViT models lie above the trend and left of the median; families off the trend are named in
    a note. Two rows that do not count for a verdict give the rank correlation between the paper's
    estimator and the true number of each axis.

    Args:
        df: the table that `figures.figure3.figure3` draws.
    """
    results: list[Result] = []
    for name, columns in ESTIMATORS.items():
        results += [*_V1(df, name, columns), *_V2(df, name, columns)]
    names = [field.name for field in fields(Result)]
    return pd.DataFrame([asdict(result) for result in results], columns=names)


def _V1(df: pd.DataFrame, name: str, columns: tuple[str, str]) -> Iterator[Result]:
    evidence = ClaimTests("V1", name, df, {})
    try:
        _, a, b, families = estimates(trained(df), *columns)
    except FlatlensError as error:
        yield evidence.result("-", "-", RHO, _nothing(), note=f"{error}"[:-1])
        return
    e = _over_families(a, b, families)
    part = f"{columns[1]} with {columns[0]}"
    yield evidence.result(part, "all families", RHO, e, note=_not_positive(df, columns))
    if name == "true numbers":
        return
    for estimated, true in zip(columns, ESTIMATORS["true numbers"], strict=True):
        _, a, b, families = estimates(trained(df), true, estimated)
        agreement = _over_families(a, b, families)
        part = f"{estimated} with {true}"
        yield evidence.result(part, "all families", RHO, agreement, main=False)


def _over_families(a: np.ndarray, b: np.ndarray, families: np.ndarray) -> Interval:
    e = rank_correlation(a, b, families)
    return Interval(e.value, e.low, e.high, e.n, e.effect, units=len(set(families)))


def _V2(df: pd.DataFrame, name: str, columns: tuple[str, str]) -> Iterator[Result]:
    evidence = ClaimTests("V2", name, df, {})
    try:
        _, a, b, families = points(trained(df), *columns)
    except FlatlensError as error:
        yield evidence.result("-", "-", "-", _nothing(), note=f"{error}"[:-1])
        return
    slope, start = trend(a, b)
    off = [family for family, _, _ in outliers(a, b, families)]
    note = f"off the trend: {', '.join(off)}" if off else "no family is off the trend"
    mobile = np.array([str(family).startswith("mobilevit") for family in families])
    upper_left = (b > slope * a + start) & (a < np.median(a))
    estimate = _nothing()
    if n := int(mobile.sum()):
        share = float(upper_left[mobile].mean())
        estimate = Interval(share, *wilson(share, n), n, share, units=n)
    part, statistic = "MobileViT at the upper left", "share of its models"
    if _not_positive(df, columns):
        note = f"{note}; the trend is drawn without those at or below 0"
    yield evidence.result(part, "mobilevit", statistic, estimate, bar=0.5, note=note)


def _not_positive(df: pd.DataFrame, columns: tuple[str, str]) -> str:
    """Name the models with an estimate that has no logarithm; empty if there are none."""
    used, a, b, _ = estimates(trained(df), *columns)
    names = [f"{row['class']} {row['training']}" for _, row in used[(a <= 0) | (b <= 0)].iterrows()]
    return f"at or below 0: {', '.join(names)}" if names else ""


def _nothing() -> Interval:
    return Interval(np.nan, np.nan, np.nan, 0, np.nan)
