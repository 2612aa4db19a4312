"""The summary at the top of the report, in words."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from flatlens.analysis import run_table
from flatlens.errors import FlatlensError
from flatlens.report.claims_section import Judged, counted
from flatlens.report.elements import Html, tag
from flatlens.report.sources import Source
from flatlens.report.training_section import observed_inequalities

# The quantities of the summary: column, word for a low value, word for a high value.
EXTREMES = (
    ("sqrt_sharpness", "flattest", "sharpest", "square root of sharpness"),
    ("nmls", "least sensitive", "most sensitive", "NMLS, network maximum local sensitivity"),
)
SAME = 1e-3  # relative difference below which values are called equal


def summary_in_words(source: Source, judged: Judged) -> Html:
    """Return a list with one sentence or two for each network, the zoo, the claims, bad folders."""
    items: list[str] = []
    for _, network, df in source.families():
        items.append(" ".join([f"{_capital(network)}:", *_network(df)]))
    if source.zoo is not None:
        items.append(f"Zoo: {_count(len(source.zoo), 'model')} measured for Figure 3.")
    if counts := counted(judged):
        counted_words = ", ".join(f"{n} {word}" for word, n in counts.items() if n)
        items.append(f"Claims of the paper: {counted_words}.")
    elif source.frames:
        items.append("Claims of the paper: none is judged on these runs; the section says why.")
    if source.unreadable:
        items.append(
            f"{_capital(_count(len(source.unreadable), 'run folder'))} could not be read; the "
            "last section lists the reasons."
        )
    return tag("ul", *(tag("li", item) for item in items), class_="summary")


def _network(df: pd.DataFrame) -> Iterator[str]:
    """Yield sentences on the runs of one network."""
    names, runs = run_table.ordered(df), df["run"].nunique()
    if run_table.without_config(df).all():
        yield f"{_count(runs, 'run')} without a config, each shown by itself,"
    else:
        yield f"{_count(runs, 'run')} in {_count(len(names), 'configuration')},"
    yield f"up to step {df['step'].max():,}."
    yield from _interpolation(df)
    if len(names) > 1:
        yield from _extremes(df)
    observed = observed_inequalities(df)
    if broken := [o for o in observed if o.broken]:
        shown = ", ".join(f"{o.name} in {o.broken} of {o.records} records" for o in broken[:4])
        rest = f" and {len(broken) - 4} more" if len(broken) > 4 else ""
        yield f"Inequalities that some records break: {shown}{rest}."
    elif observed:
        yield f"All {len(observed)} recorded inequalities hold in every record."


def _interpolation(df: pd.DataFrame) -> Iterator[str]:
    curves = run_table.followed(df)
    if "train_loss" not in df or curves.empty:
        return
    steps = run_table.interpolation_steps(curves)
    reached = int(steps.notna().sum())
    yield (
        f"The training loss came to {100 * run_table.INTERPOLATION:g} % of its start in {reached} "
        f"of {_count(len(steps), 'followed run')}."
    )


def _extremes(df: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence on the configurations with the lowest and the highest values at the end."""
    try:
        last = run_table.ends(df)
    except FlatlensError:
        return
    keys = run_table.configurations(last)
    for column, low, high, meaning in EXTREMES:
        if column not in last:
            continue
        means = pd.Series(run_table.numbers(last, column)).groupby(keys.to_numpy()).mean().dropna()
        if len(means) > 1 and means.max() - means.min() > SAME * abs(means.max()):
            yield (
                f"At the end {means.idxmin()} is {low} and {means.idxmax()} {high} ({meaning}: "
                f"{means.min():.3g} and {means.max():.3g})."
            )


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
