"""The section of the report on the paper's claims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from flatlens.analysis.sweeps import judgeable
from flatlens.report.elements import Html, more, table, tag, verdict
from flatlens.report.sources import Source
from flatlens.reproduction.claims import ABOUT, TEXTS, claims, verdicts
from flatlens.reproduction.judgement import judged, overview

RULES = (
    "supported: the whole 95 % interval lies where the claim says. not supported: it lies on the "
    "other side, or too near to matter. inconclusive: all else."
)
CONDITION = (
    "The claims are about sweeps over the learning rate or the batch size of the paper's networks "
    "(mlp, lenet, vgg) that are trained until the training loss is at 1 % of its start."
)
COLUMNS = (
    "part", "scope", "statistic", "claimed", "value", "low", "high", "effect", "n", "verdict",
    "note",
)  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """The claims that were judged, and a sentence for each network that they leave out."""

    results: pd.DataFrame
    by: str  # the column that results are grouped by: figure or network
    reasons: list[str]


def judge_source(source: Source) -> Judged:
    """Judge the claims on the runs of a source, or take the verdicts that `reproduce` wrote."""
    if not source.frames:
        return Judged(pd.DataFrame(), "", ["The claims are about training runs; there are none."])
    if source.claims is not None:
        return Judged(source.claims, "figure", [])
    if "" not in source.frames:
        return Judged(judged(source.frames), "figure", [])
    tables, reasons = [], []
    for _, network, df in source.families():
        model = str(df["model"].iloc[0]) if "model" in df else ""
        about = [name for name in TEXTS if model in ABOUT.get(name, (model,))]
        runs, chosen, sentence = judgeable(df, about)
        if chosen:
            tables.append(claims(runs, chosen).assign(network=network))
        if sentence:
            reasons.append(f"{network}: {sentence}.")
    results = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    return Judged(results, "network", reasons)


def counted(judged: Judged) -> dict[str, int]:
    """Return how many claims have each verdict, counted by figure or network."""
    if judged.results.empty:
        return {}
    words = [
        word
        for _, results in judged.results.groupby(judged.by, sort=False)
        for word in verdicts(results)["verdict"]
    ]
    return {word: words.count(word) for word in ("supported", "not supported", "inconclusive")}


def claims_section(judged: Judged) -> Iterator[Html]:
    """Yield the content of the section."""
    if judged.results.empty:
        yield tag("p", "No claim of the paper is judged on these runs. " + CONDITION)
    else:
        yield tag("p", RULES)
        yield _overview(judged)
        for name, results in judged.results.groupby(judged.by, sort=False):
            yield more(f"{name}: every part with its interval", _statistics(results))
    if judged.reasons:
        if len(judged.results):
            yield tag("p", CONDITION)
        yield tag("ul", *(tag("li", reason) for reason in judged.reasons))


def _overview(judged: Judged) -> Html:
    if judged.by == "figure":
        wide = overview(judged.results)
        lines = [[*row[:2], *map(verdict, row[2:])] for row in wide.to_numpy().tolist()]
        return table(list(map(str, wide)), lines, "Verdicts by figure of the paper")
    lines = [
        [row["claim"], verdict(row["verdict"]), row["says"], row["network"], row["note"]]
        for row in verdicts(judged.results).to_dict("records")
    ]
    return table(["claim", "verdict", "says", "network", "note"], lines, "Verdicts by network")


def _statistics(results: pd.DataFrame) -> Html:
    lines = [
        [verdict(row[c]) if c == "verdict" else row[c] for c in ("claim", *COLUMNS)]
        for row in results.to_dict("records")
    ]
    return table(["claim", *COLUMNS], lines, "Statistics with their 95 % intervals, low to high")
