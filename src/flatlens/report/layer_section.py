"""The section of the report on single layers, from measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatlens.report import network_plots
from flatlens.report.elements import Html, more, table, tag, term, verdict
from flatlens.report.page import Page
from flatlens.report.sources import Source

Measured = Mapping[str, Mapping[str, Any]]  # what `Measurement.to_json` gives, by name
COLUMNS = {
    "name": "layer", "kind": "kind", "positions": "positions", "mls": "MLS",
    "sharpness": "sharpness", "eq5_lhs": "Eq. 5, left", "eq5_rhs": "right",
    "eq5_slack": "slack", "sharing_ratio": "sharing ratio",
}  # fmt: skip


def layer_section(page: Page, source: Source, measured: Measured) -> Iterator[Html]:
    """Yield the content of the section."""
    if not measured:
        sentence = "Records hold no numbers of single layers. "
        if source.frames:
            sentence += "The option --measure measures one run of each configuration. "
        yield tag(
            "p",
            sentence
            + "The option --measurements FILE takes the output of flatlens measure --json.",
        )
        return
    plots, series = network_plots.layers(measured)
    group = page.group()
    yield page.legend(series, group)
    yield tag("div", *(page.plot(plot, group) for plot in plots), class_="plots two")
    for name, measurement in measured.items():
        yield _tables(name, measurement)


def _tables(name: str, measurement: Mapping[str, Any]) -> Html:
    """Return the tables of layers and inequalities of one measurement, which open on demand."""
    total = sum(float(row["mls"]) for row in measurement["layers"])
    layers = [
        [
            *(row[key] for key in COLUMNS), 100 * row["mls"] / total if total else float("nan"),
            verdict(row["eq5_verdict"]), row["eq5_why"],
        ]
        for row in measurement["layers"]
    ]  # fmt: skip
    heads = [*COLUMNS.values(), "% of NMLS", term("eq5", "verdict on Eq. 5"), "why"]
    sides = [
        [term(row["name"]), row["equation"], *_sides(row), verdict(_holds(row)), row["why"]]
        for row in measurement["inequalities"]
    ]
    columns = ["inequality", "equation", "left side", "right side", "slack", "verdict", "why"]
    return more(
        f"{name}: {_largest_share(measurement['layers'], total)}",
        table(heads, layers, f"Layers of {name}"),
        table(columns, sides, f"Inequalities of {name}"),
    )


def _largest_share(layers: Sequence[Mapping[str, Any]], total: float) -> str:
    """Return a sentence on the layer with the largest MLS."""
    if not total > 0:
        return "no layer has an MLS above zero"
    top = max(layers, key=lambda row: float(row["mls"]))
    return f"layer {top['name']} carries most of NMLS, {top['mls'] / total:.0%}"


def _sides(row: Mapping[str, Any]) -> list[Any]:
    return [float(row[key]) for key in ("lhs", "rhs", "slack")]


def _holds(row: Mapping[str, Any]) -> str:
    return str(row["verdict"]) if row["holds"] else f"{row['verdict']} / broken"
