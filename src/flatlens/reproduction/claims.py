"""The paper's claims, each as a test on records: a number, its 95 % interval, a verdict.

A claim says that a number lies above (or below) a bar, which is 0 where nothing else is said.
*supported*: the whole interval does. *not supported*: the whole interval lies on the other side,
or within a margin of the bar that nobody would call an effect. *inconclusive*: all else, also where
a quantity was not recorded or runs are too few.

The unit is the seed, for the runs of one seed begin with the same weights in all configurations; it
is the run where configurations share no seeds. Steps of one run are never counted as independent.
Numbers of one run (its value at the end, its change after interpolation, a rank correlation over
its steps) are averaged, configurations with equal weight; the interval is Student's over seeds (of
rank correlations, on Fisher's z). D1 and D2 are slopes of one line a seed. Correlations over
networks have intervals from leaving out one seed after another; they are given *pooled*, and with
eight or more runs in each configuration also *within* configurations (the means of each taken
away), since the one may hide the reverse of the other. D6 asks for a small correlation of either
sign: its statistic is the size. Intervals are not widened for the number of claims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import pandas as pd

from flatlens.analysis import tables as records
from flatlens.analysis.evidence import Evidence, Result
from flatlens.analysis.intervention_claims import TEXTS as INTERVENTIONS
from flatlens.errors import FlatlensError
from flatlens.reproduction.figure3_claims import TEXTS as FIGURE3

# definitions in the authors' code that differ from the paper's, beside the paper's own
VARIANTS = {"log_volume": "log_volume_top3"}

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
SAYS = {**TEXTS, **INTERVENTIONS, **FIGURE3}  # also those that other experiments judge
# networks that a claim is about, where it is not about all
ABOUT = {
    "D3": ("vgg", "vgg11"), "D4": ("mlp",), "D5": ("vgg", "vgg11", "mlp"),
    "T1": ("mlp",), "T2": ("mlp",), "T3": ("mlp",), "C8": ("mlp",), "C9": ("mlp",),
}  # fmt: skip


def claims(
    df: pd.DataFrame, only: Sequence[str] = tuple(TEXTS), variants: Mapping[str, str] = VARIANTS
) -> pd.DataFrame:
    """Tests the claims on the table of `read_runs`: one row a part, network and scope.

    `claimed` is the bar, `value` the statistic, `low` and `high` its 95 % interval, `effect` the
    value in standard deviations between runs of one configuration (of a correlation: itself), `n`
    the runs, `units` the independent ones of them (seeds, or runs). `variants` maps a column to one
    that follows another definition.
    """
    if unknown := set(only) - set(TEXTS):
        raise FlatlensError(f"There is no claim {min(unknown)}; there are {', '.join(TEXTS)}.")
    df = records.prepared(df)
    results: list[Result] = []
    for network, family in records.families(df):
        model = str(family["model"].iloc[0]) if "model" in family else None
        for claim in only:
            if model is None or model in ABOUT.get(claim, (model,)):
                results += Evidence(claim, network, family, variants).test()
    columns = [field.name for field in fields(Result)]
    return pd.DataFrame([asdict(result) for result in results], columns=columns)


def verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """One row a claim and network: supported if every part is, not supported if any is not."""
    rows = []
    for (claim, network), parts in table.groupby(["claim", "network"], sort=False):
        found = set(parts.loc[parts["main"], "verdict"])
        verdict = "supported" if found == {"supported"} else "inconclusive"
        verdict = "not supported" if "not supported" in found else verdict
        notes = [note for note in dict.fromkeys(parts.loc[parts["main"], "note"]) if note]
        rows.append({
            "claim": claim, "network": network, "says": SAYS[str(claim)], "verdict": verdict,
            "note": "; ".join(notes),
        })  # fmt: skip
    return pd.DataFrame(rows)


def markdown(table: pd.DataFrame) -> str:
    """The verdicts and, below, every part with its interval."""
    short = verdicts(table)
    parts = table.assign(
        interval=[
            f"[{_short(a)}, {_short(b)}]" for a, b in zip(table["low"], table["high"], strict=True)
        ],
        value=table["value"].map(_short),
        effect=table["effect"].map(_short),
    )
    columns = [
        "claim", "network", "part", "scope", "statistic", "claimed", "value", "interval", "effect",
        "n", "units", "verdict", "note",
    ]  # fmt: skip
    return f"{_pipes(short)}\n\n{_pipes(parts[columns])}\n"


def _pipes(table: pd.DataFrame) -> str:
    lines: list[list[Any]] = [list(table), ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return "\n".join(
        "| " + " | ".join(str(v).replace("|", r"\|") for v in row) + " |" for row in lines
    )


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"
