"""The paper's claims, each as a test on records: a number, its 95 % interval, a verdict.

`flatlens.analysis.claim_results` has the rule of judgement. A part whose quantity was not recorded,
or that has too few runs, is inconclusive.

The unit is the seed, because the runs of one seed begin with the same weights in all
configurations. Where configurations share no seeds, the unit is the run. Steps of one run are never
counted as independent.

- Numbers of one run (its value at the end, its change after interpolation, a rank correlation over
  its steps) are averaged, configurations with equal weight. The interval is Student's over seeds;
  for rank correlations it is computed on Fisher's z.
- D1 and D2 are slopes, one line per seed.
- Correlations over networks have intervals from leaving out one seed after another. They are given
  *pooled*. With eight or more runs in each configuration they are also given *within*
  configurations, with the mean of each configuration subtracted, because the two can have opposite
  signs. In simulations with four seeds and five configurations the pooled intervals hold the true
  value in 91 to 97 % of cases. So four seeds are enough for the pooled value.
- D6 claims a small correlation of either sign, so its statistic is the absolute value.

Intervals are not widened for the number of claims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.claim_results import Result
from flatlens.analysis.claim_tests import ClaimTests
from flatlens.analysis.intervention_claims import TEXTS as INTERVENTIONS
from flatlens.errors import FlatlensError
from flatlens.reproduction.figure3_claims import TEXTS as FIGURE3

# The paper's column, and the column with the definition of the authors' code.
VARIANTS = {"log_volume": "log_volume_top3"}
AUTHORS = {**VARIANTS, "eq12.rhs": "bound_authors", "eq48_cd.rhs": "d_authors"}

TEXTS = {
    "D1": "a larger learning rate ends at lower sharpness, log volume, MLS and NMLS",
    "D2": "a smaller batch ends at lower sharpness, log volume, MLS and NMLS",
    "D3": "once the loss is near zero, sharpness, log volume and MLS fall with further training",
    "D4": "late, sharpness does not noticeably fall, MLS and NMLS follow it, volume falls slower",
    "D5": "volume goes on falling after sharpness has levelled off",
    "D6": "local dimension falls with the loss, and is then not explained by sharpness",
    "T1": "A <= B <= C <= D at every step",
    "T2": "the gap from C to D is larger than those from A to B and from B to C",
    "T3": "C correlates positively with MLS, D negatively",
    "C1": "the bound (12) correlates positively with NMLS",
    "C2": "NMLS, MLS and the bound correlate positively with the generalisation gap",
    "C3": "log volume correlates with sharpness and with MLS",
    "C4": "sharpness correlates positively with the generalisation gap",
    "C5": "MLS correlates positively with NMLS",
    "C6": "MLS correlates more strongly with sharpness and with test loss than log volume does",
    "C7": "local dimension correlates more weakly with sharpness than MLS and log volume do",
    "C8": "D (11) correlates negatively with MLS",
    "C9": "relative sharpness correlates weakly or negatively with the generalisation gap",
}  # fmt: skip
SAYS = {**TEXTS, **INTERVENTIONS, **FIGURE3}  # with the claims of the other experiments
# The networks that a claim is about. A claim that is not listed is about all networks.
ABOUT = {
    "D3": ("vgg", "vgg11"), "D4": ("mlp",), "D5": ("vgg", "vgg11", "mlp"),
    "T1": ("mlp",), "T2": ("mlp",), "T3": ("mlp",), "C8": ("mlp",), "C9": ("mlp",),
}  # fmt: skip


def claims(
    df: pd.DataFrame, only: Sequence[str] = tuple(TEXTS), variants: Mapping[str, str] = VARIANTS
) -> pd.DataFrame:
    """Test the claims on the table of `read_runs`.

    Args:
        df: table of runs of one or more families.
        only: names of the claims, by default all.
        variants: maps a column to one that follows another definition; both are tested.

    Returns:
        A row per part, network and scope (`flatlens.analysis.claim_results.Result`). `claimed` is
        the bar, `value` the statistic, `low` and `high` its 95 % interval, `effect` the value in
        standard deviations between runs of one configuration (for a correlation the value
        itself), `n` the number of runs and `units` the number of independent units.

    Raises:
        FlatlensError: if a claim is unknown or the table is empty.
    """
    if unknown := set(only) - set(TEXTS):
        raise FlatlensError(f"There is no claim {min(unknown)}; there are {', '.join(TEXTS)}.")
    df = run_table.prepared(df)
    results: list[Result] = []
    for network, family in run_table.families(df):
        model = str(family["model"].iloc[0]) if "model" in family else None
        for claim in only:
            if model is None or model in ABOUT.get(claim, (model,)):
                results += ClaimTests(claim, network, family, variants).test()
    columns = [field.name for field in fields(Result)]
    return pd.DataFrame([asdict(result) for result in results], columns=columns)


def verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """Return the verdict on each claim and network.

    A claim is supported if every main part is, and not supported if any main part is not.
    """
    records = []
    for (claim, network), results in table.groupby(["claim", "network"], sort=False):
        main_verdicts = set(results.loc[results["main"], "verdict"])
        verdict = "supported" if main_verdicts == {"supported"} else "inconclusive"
        verdict = "not supported" if "not supported" in main_verdicts else verdict
        notes = [note for note in dict.fromkeys(results.loc[results["main"], "note"]) if note]
        records.append({
            "claim": claim, "network": network, "says": SAYS[str(claim)], "verdict": verdict,
            "note": "; ".join(notes),
        })  # fmt: skip
    return pd.DataFrame(records)


def markdown(table: pd.DataFrame) -> str:
    """Write the verdicts and, below them, every part with its interval, in Markdown."""
    short = verdicts(table)
    results = table.assign(
        interval=[
            f"[{_digits(a)}, {_digits(b)}]"
            for a, b in zip(table["low"], table["high"], strict=True)
        ],
        value=table["value"].map(_digits),
        effect=table["effect"].map(_digits),
    )
    columns = [
        "claim", "network", "part", "scope", "statistic", "claimed", "value", "interval", "effect",
        "n", "units", "verdict", "note",
    ]  # fmt: skip
    return f"{markdown_table(short)}\n\n{markdown_table(results[columns])}\n"


def markdown_table(table: pd.DataFrame) -> str:
    """Write a table in Markdown, with a column per column of the table."""
    lines: list[list[Any]] = [list(table), ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return "\n".join(
        "| " + " | ".join(str(v).replace("|", r"\|") for v in row) + " |" for row in lines
    )


def _digits(value: float) -> str:
    """Write a number with three digits, or a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.3g}"
