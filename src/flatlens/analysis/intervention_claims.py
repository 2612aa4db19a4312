"""Claims I1 to I5 on the table of `read_runs`: one row for each arm, quantity and moment.

The verdicts *supported*, *not supported* and *inconclusive* follow the rule of the paper's claims
(`claim_results`). Rows with `main` decide. The others (single strengths, S itself, weight decay)
are for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import run_table as records
from flatlens.analysis.claim_results import Result, judge
from flatlens.analysis.claim_tests import NOTICEABLE, SMALL_CHANGE, ClaimTests
from flatlens.analysis.interventions import (
    LOWER_SHARPNESS,
    MOMENTS,
    PLAIN,
    PREDICTORS,
    changes,
    effect,
    fitted,
    mean_correlation,
    mean_over_seeds,
    predictions,
    with_arms,
)
from flatlens.analysis.statistics import NOTHING
from flatlens.errors import FlatlensError

TEXTS = {
    "I1": "lowering S by SAM, ASAM or the sharpness penalty lowers MLS and NMLS",
    "I2": "lowering S lowers log volume",
    "I3": "the logarithm of the bound (12) falls with S, by at least as much as that of NMLS",
    "I4": "the sensitivity penalty lowers MLS and need not lower S",
    "I5": "one of S, adaptive sharpness, MLS, NMLS and the bound predicts test loss best",
}
S = "sqrt_sharpness"
RATIO = "bound / nmls"
STATISTIC = "change of log against plain SGD"


def intervention_claims(df: pd.DataFrame) -> pd.DataFrame:
    """Test I1 to I5 for every network in a table of runs.

    Args:
        df: the table of `read_runs` of one or more networks.

    Returns:
        One row for each part of a claim, with the columns of the paper's claims.
    """
    results: list[Result] = []
    for network, family in records.families(records.prepared(df)):
        results += _of_network(network, family)
    columns = [field.name for field in fields(Result)]
    return pd.DataFrame([asdict(result) for result in results], columns=columns)


def _of_network(network: str, family: pd.DataFrame) -> list[Result]:
    try:
        df, reasons = fitted(with_arms(family))
        if PLAIN not in set(df["arm"]):
            text = "; ".join(reasons) or "there is no plain run"
            raise FlatlensError(f"Nothing to compare with: {text}.")
    except FlatlensError as error:  # no run is finished, or none fits its training data
        return [
            ClaimTests(claim, network, family, {}).result(
                "-", "-", "-", NOTHING, note=f"{error}"[:-1]
            )
            for claim in TEXTS
        ]
    judges = Judges(network, df, "; ".join(reasons))
    return [*judges.I1(), *judges.I2(), *judges.I3(), *judges.I4(), *judges.I5()]


class Judges:
    """The five claims on the runs of one network; `note` lists the arms that are left out."""

    def __init__(self, network: str, df: pd.DataFrame, note: str) -> None:
        self.network, self.df, self.note = network, df, note
        self.changes = {moment: self._with_ratio(changes(df, moment)) for moment in MOMENTS}

    @staticmethod
    def _with_ratio(table: pd.DataFrame) -> pd.DataFrame:
        if {"eq12.rhs", "nmls"} <= set(table):
            return table.assign(**{RATIO: table["eq12.rhs"] - table["nmls"]})
        return table

    def I1(self) -> Iterator[Result]:
        """Test that MLS and NMLS fall in the arms that lower S; add S and weight decay."""
        for kind in (*LOWER_SHARPNESS, "weight decay"):
            yield from self.falls("I1", kind, S, main=False)
            for column in ("mls", "nmls"):
                yield from self.falls(
                    "I1", kind, column, main=kind in LOWER_SHARPNESS, needs_S=True
                )

    def I2(self) -> Iterator[Result]:
        """Test the volume, and the authors' volume of the three largest singular values."""
        for kind in LOWER_SHARPNESS:
            yield from self.falls("I2", kind, "log_volume", needs_S=True)
            yield from self.falls("I2", kind, "log_volume_top3", main=False, needs_S=True)

    def I3(self) -> Iterator[Result]:
        """Test that the bound falls, and that its ratio to NMLS rises by a small change at most."""
        for kind in LOWER_SHARPNESS:
            yield from self.falls("I3", kind, "eq12.rhs", needs_S=True)
            yield from self.falls("I3", kind, RATIO, needs_S=True, bar=-SMALL_CHANGE)

    def I4(self) -> Iterator[Result]:
        """Test that MLS falls and sharpness does not fall noticeably."""
        yield from self.falls("I4", "sensitivity", "mls")
        yield from self.effects("I4", "sensitivity", S, sign=1, bar=-NOTICEABLE)

    def falls(
        self, claim: str, kind: str, column: str, *, main: bool = True, needs_S: bool = False,
        bar: float = 0.0,
    ) -> Iterator[Result]:  # fmt: skip
        """Test whether a quantity is lower with the intervention than without."""
        margin = SMALL_CHANGE if bar == 0 else 0.0
        rule = {"sign": -1, "bar": bar, "margin": margin}
        yield from self.effects(claim, kind, column, main=main, needs_S=needs_S, **rule)

    def effects(
        self, claim: str, kind: str, column: str, *, main: bool = True, needs_S: bool = False,
        **rule: Any,
    ) -> Iterator[Result]:  # fmt: skip
        """Yield the mean over strengths at both moments, then each strength alone."""
        evidence = ClaimTests(claim, self.network, self.df, {})
        for moment, table in self.changes.items():
            arms = table[table["arm"] == kind]
            part = f"{column} under {kind}"
            if column not in table or arms.empty:
                note = f"no runs of {kind}" if arms.empty else f"{column} was not recorded"
                yield evidence.result(
                    part, moment, STATISTIC, NOTHING, main=main, note=note, **rule
                )
                continue
            strengths = sorted(set(arms["strength"]))
            for strength in (None, *strengths) if len(strengths) > 1 else (None,):
                mine = arms if strength is None else arms[arms["strength"] == strength]
                change = effect(mine, column)
                notes = [self.note if strength is None and main else ""]
                if change.left_out:
                    notes.append(f"{change.left_out} pairs left out: no finite value")
                estimate = change.estimate
                if needs_S and judge(effect(mine, S).estimate, sign=-1) != "supported":
                    notes.append("S is not clearly lower here, so the claim says nothing")
                    estimate = replace(estimate, low=math.nan, high=math.nan)
                names = strengths if strength is None else [strength]
                scope = f"{', '.join(f'{s:g}' for s in names)}; {moment}"
                yield evidence.result(
                    part, scope, STATISTIC, estimate, main=main and strength is None,
                    note="; ".join(filter(None, notes)), **rule,
                )  # fmt: skip

    def I5(self) -> Iterator[Result]:
        """Test each predictor's correlation with the test loss, and the lead of the best one."""
        evidence = ClaimTests("I5", self.network, self.df, {})
        for moment in MOMENTS:
            table = predictions(self.df, moment)
            means = {p: mean_correlation(table, p) for p in PREDICTORS if p in table}
            for name, estimate in means.items():
                yield evidence.result(
                    f"{name} with test_loss", moment, "rank correlation over arms", estimate,
                    main=False,
                )  # fmt: skip
            known = {name: e.value for name, e in means.items() if np.isfinite(e.value)}
            if len(known) < 2:
                note = "too few arms for a rank correlation"
                yield evidence.result("-", moment, "-", NOTHING, note=note)
                continue
            best = max(known, key=lambda name: known[name])
            for name in known:
                if name == best:
                    continue
                lead = mean_over_seeds(table, (table[best] - table[name]).to_numpy(np.float64))
                part = f"{best} before {name}"
                statistic = "difference of rank correlations"
                yield evidence.result(part, moment, statistic, lead, note=self.note)
