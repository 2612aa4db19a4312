"""The section of the report on the runs of one network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.claim_tests import FEWEST_NETWORKS, TOLERANCE
from flatlens.errors import FlatlensError
from flatlens.figures import style
from flatlens.figures.correlations import QUANTITIES, number
from flatlens.figures.trends import PANELS
from flatlens.report import network_plots, training_plots
from flatlens.report.elements import Html, join, more, table, tag, term, verdict
from flatlens.report.glossary import explained
from flatlens.report.intervention_section import has_interventions, intervention_section
from flatlens.report.page import Page
from flatlens.report.panel_section import has_panel, panel_section
from flatlens.reproduction.end_summary import summary

FURTHER = ("log_volume_top3", "test_loss", "test_accuracy", "generalization_gap")
NO_CURVES = "No run was measured more than once, so there are no curves."


@dataclass(frozen=True)
class Observed:
    """The number of records in which one inequality holds."""

    name: str
    records: int
    broken: int
    least_slack: float
    end_slack: float  # median over runs at their last record


def training_section(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    """Yield the content of the section."""
    yield tag("h3", "Over training")
    yield or_reason(lambda: _trends(page, df))
    yield tag("h3", "At the end")
    yield or_reason(lambda: _ends(df))
    yield tag("h3", "Tightness of the bounds")
    yield or_reason(lambda: _tightness(page, df))
    yield tag("h3", "Inequalities in the records")
    yield from _inequalities(df)
    yield tag("h3", "Correlations over networks")
    yield or_reason(lambda: _correlations(page, df))
    if has_interventions(df):
        yield tag("h3", "Interventions against plain SGD")
        yield or_reason(lambda: intervention_section(page, df))
    if has_panel(df):
        yield tag("h3", "Which kind of compression happens when")
        yield or_reason(lambda: panel_section(page, df))


def or_reason(make: Callable[[], Iterable[Any]]) -> Html:
    """Return the content that a function makes, or the sentence of its FlatlensError."""
    try:
        return join(make())
    except FlatlensError as error:
        return tag("p", str(error))


def _trends(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    df = run_table.followed(df)
    if df.empty:
        raise FlatlensError(NO_CURVES)
    columns = run_table.finite_columns(df, (*PANELS, *FURTHER))
    if not columns:
        raise FlatlensError("None of the quantities of the paper's figures was recorded.")
    series, group = training_plots.configurations(df), page.group()
    near_zero = (
        " A dot marks where the training loss is at "
        f"{100 * run_table.INTERPOLATION:g} % of its start."
    )
    if run_table.without_config(df).all():
        lines = "These runs have no config, so each run has a line of its own."
    else:
        lines = "Lines are means over the runs of one configuration"
        lines += ", with one standard deviation to both sides." if len(series) <= 24 else "."
    yield tag("p", lines + near_zero)
    yield page.legend(series, group, training_plots.arms(df))
    plots = {c: page.plot(training_plots.trend(df, c, series), group) for c in columns}
    yield tag("div", *(p for c, p in plots.items() if c in PANELS), class_="plots")
    if rest := [p for c, p in plots.items() if c not in PANELS]:
        yield more("More quantities", tag("div", *rest, class_="plots"))
    if missing := [style.name(c) for c in PANELS if c not in columns]:
        yield tag("p", f"Not recorded or not finite: {', '.join(missing)}.")
    yield more("What the quantities mean", _meanings(columns))


def _meanings(columns: Iterable[str]) -> Html:
    """Return a table of the quantities with their explanations."""
    lines = [[style.name(name), meaning] for name, meaning in explained(columns)]
    return table(["quantity", "meaning"], lines, "Quantities of the plots")


def _ends(df: pd.DataFrame) -> Iterator[Html]:
    ends = summary(df)
    heads = [term(str(c), style.name(str(c))) for c in ends]
    caption = "Mean and standard deviation over runs at the last step"
    if run_table.without_config(df).all():
        caption = "Values at the last record of each run"
        ends = ends.map(lambda cell: str(cell).removesuffix(" ± nan"))
    yield table(heads, ends.to_numpy().tolist(), caption)


def _tightness(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    df = run_table.followed(df)
    if df.empty:
        raise FlatlensError(NO_CURVES)
    panels, name = training_plots.tight(df)
    yield tag("p", f"The plots show {name}." if name != "all" else "The plots show all runs.")
    columns = []
    for plot, series in panels:
        group = page.group()
        columns.append(tag("div", page.plot(plot, group), page.legend(series, group)))
    yield tag("div", *columns, class_="plots")


def observed_inequalities(df: pd.DataFrame) -> list[Observed]:
    """Count for each inequality of the records how often its left side is below its right side."""
    last = np.asarray(df["step"] == df.groupby("run")["step"].transform("max"))
    observed = []
    for name in [str(c).removesuffix(".lhs") for c in df if str(c).endswith(".lhs")]:
        if f"{name}.rhs" not in df:
            continue
        left, right = (run_table.numbers(df, f"{name}.{side}") for side in ("lhs", "rhs"))
        known = ~np.isnan(left) & ~np.isnan(right)
        with np.errstate(all="ignore"):
            if name == "log_volume":  # both sides are logarithms
                slack, fine = np.exp(right - left), right >= left - TOLERANCE
            else:
                slack, fine = right / left, right >= left * (1 - TOLERANCE)
        if known.any():
            sides = _finite(slack, np.min), _finite(slack[last], np.median)
            observed.append(Observed(name, int(known.sum()), int((known & ~fine).sum()), *sides))
    return observed


def _inequalities(df: pd.DataFrame) -> Iterator[Html]:
    observed = observed_inequalities(df)
    if not observed:
        yield tag("p", "The records hold no sides of inequalities.")
        return
    heads = ["inequality", "verdict", "holds in records", "least slack", "median slack at the end"]
    lines = [
        [
            term(o.name), verdict("broken" if o.broken else "holds"),
            f"{o.records - o.broken} of {o.records}", o.least_slack, o.end_slack,
        ]
        for o in observed
    ]  # fmt: skip
    yield table(heads, lines, "Slack is the right side over the left side, over all records")
    note = "Inequalities that do not apply to the network are not in its records. "
    if "sharpness_se" in df:
        note += "Sides of sketched records are estimates and may cross by their standard errors. "
    yield tag("p", note + "The section Layer by layer says which of them are theorems here.")
    meanings = [[name, meaning] for name, meaning in explained(o.name for o in observed)]
    yield more("What the inequalities say", table(["name", "meaning"], meanings, "Inequalities"))


def _finite(values: Any, function: Callable[[Any], Any]) -> float:
    finite = values[np.isfinite(values)]
    return float(function(finite)) if len(finite) else float("nan")


def _correlations(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    runs = df["run"].nunique()
    if runs < FEWEST_NETWORKS:
        raise FlatlensError(f"Correlations need {FEWEST_NETWORKS} runs or more, there are {runs}.")
    matrix, pairs, coefficients, series = network_plots.correlations(df)
    group = page.group()
    scatter = tag("div", page.plot(pairs, group), page.legend(series, group))
    yield tag("div", page.plot(matrix, page.group()), scatter, class_="plots two tall")
    lines = [
        [style.name(row["x"]), style.name(row["y"]), *_coefficients(row), int(row["n"])]
        for row in coefficients.to_dict("records")
    ]
    heads = ["", "", "Pearson's r", "95 %", "Spearman's ρ", "95 %", "networks"]
    yield more("The numbers", table(heads, lines, "Coefficients with intervals over seeds"))
    names = {*coefficients["x"], *coefficients["y"]}
    if missing := [style.name(c) for c in QUANTITIES if c not in names]:
        yield tag("p", f"Not recorded or not finite: {', '.join(missing)}.")


def _coefficients(row: Mapping[Any, Any]) -> Iterator[str]:
    for kind in ("pearson", "spearman"):
        yield number(row[kind])
        yield f"[{number(row[f'{kind}_low'])}, {number(row[f'{kind}_high'])}]"
