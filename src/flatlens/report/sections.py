"""`flatlens report`: all that records hold as one HTML file that works offline.

A report never trains; it measures only where `measure` asks for it, since records hold no numbers
of single layers. What the records lack, its section says.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import flatlens
from flatlens.analysis import tables as records
from flatlens.analysis.evidence import NETWORKS, TOLERANCE
from flatlens.analysis.statistics import Estimate
from flatlens.errors import FlatlensError
from flatlens.figures import correlations, style, tightness, trends
from flatlens.figures import zoo as figure3
from flatlens.figures.correlations import QUANTITIES, number
from flatlens.figures.trends import PANELS
from flatlens.files.replacing import replacing
from flatlens.report import interactive
from flatlens.report.page import Html, Page, download, join, more, plotly_js, table, tag, verdict
from flatlens.report.sources import PARTS, Source, label, read, read_measurement
from flatlens.reproduction import claims
from flatlens.reproduction.reproduce import followed, judged, overview, summary
from flatlens.zoo.zoo import SKIPPED, kept

EXTRA = ("log_volume_top3", "test_loss", "test_accuracy", "generalization_gap")  # further trends
LARGEST = 1_000_000  # bytes of a static figure that is taken in
LAYER = {
    "name": "layer", "kind": "kind", "positions": "positions", "mls": "MLS",
    "sharpness": "sharpness", "eq5_lhs": "Eq. 5, left", "eq5_rhs": "right",
    "eq5_slack": "slack", "sharing_ratio": "sharing ratio",
}  # fmt: skip
RULES = (
    "supported: the whole 95 % interval lies where the claim says. not supported: it lies on the "
    "other side, or too near to matter. inconclusive: all else."
)
MODEL = ("adaptive_sharpness", "normalized_mls", "top1", "parameters")  # beside name and class

Measured = Mapping[str, Mapping[str, Any]]  # what `Measurement.to_json` gives, by name


def report(
    runs: Path | str,
    out: Path | str = "report.html",
    *,
    measure: bool = False,
    measurements: Sequence[Path | str] = (),
    max_se: float = 0.15,
) -> Path:
    """Writes the report on `runs` to `out`, whole or not at all.

    `runs` is a folder of runs of any depth, what `flatlens reproduce` made (the folder, or its
    `records.jsonl.gz`), or a zoo. The layer-by-layer view comes from `measurements`, files of
    `flatlens measure --json`, and with `measure` from the last checkpoint of one run of each
    configuration. `max_se` is that of `flatlens zoo`.
    """
    out = Path(out)
    if not out.parent.is_dir():
        raise FlatlensError(f"There is no folder {out.parent} for the report; make it first.")
    if out.is_dir():
        raise FlatlensError(f"{out} is a folder; name a file for the report.")
    plotly_js()  # an absent library is told before the work
    source = read(Path(runs))
    measured = {label(Path(m), measurements): read_measurement(Path(m)) for m in measurements}
    if measure:
        measured |= source.measured()
    content = _page(source, measured, max_se)
    try:
        with replacing(out) as temporary:
            temporary.write_text(content, encoding="utf-8")
    except OSError as error:
        raise FlatlensError(f"Cannot write {out}: {error.strerror or error}.") from error
    return out


def _page(source: Source, measured: Measured, max_se: float) -> str:
    page = Page(f"flatlens report: {source.path.resolve().name}")
    told = []
    drawn: dict[str, Callable[[], Figure]] = {}
    for k, (_, network, df) in enumerate(source.families()):
        runs = df["run"].nunique()
        told.append(f"{network}: {runs} {'run' if runs == 1 else 'runs'}")
        page.section(network, *_training(page, df))
        drawn |= _figures(df, f"{k + 1}-" if k else "")
    if source.zoo is not None:
        good, dropped = kept(source.zoo, max_se)
        told.append(f"zoo: {len(source.zoo)} {'model' if len(source.zoo) == 1 else 'models'}")
        page.section("Figure 3: the zoo", *_zoo(page, source, good, dropped, max_se))
        drawn["figure3"] = partial(figure3, good)
    page.section("Layer by layer", *_layers(page, source, measured))
    page.section("Claims of the paper", _or_why(lambda: _claims(source)))
    page.section("Configuration and provenance", *_how(source))
    page.section("Figures to download", *_downloads(source, drawn))
    head = join([tag("h1", page.title), tag("p", "; ".join(told) + ".", class_="soft")])
    foot = f"Made by flatlens {flatlens.__version__}. This file needs no network."
    return page.write(head, tag("p", foot))


def _or_why(make: Callable[[], Iterable[Any]]) -> Html:
    """What it makes, or a sentence on why there is none."""
    try:
        return join(make())
    except FlatlensError as error:
        return tag("p", str(error))


# ------------------------------------------------------------------ training


def _training(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    """The runs of one network."""
    yield tag("h3", "Over training")
    yield _or_why(lambda: _trends(page, df))
    yield tag("h3", "At the end")
    yield _or_why(lambda: _ends(df))
    yield tag("h3", "Tightness of the bounds")
    yield _or_why(lambda: _tightness(page, df))
    yield tag("h3", "Inequalities in the records")
    yield from _inequalities(df)
    yield tag("h3", "Correlations over networks")
    yield _or_why(lambda: _correlations(page, df))


def _trends(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    df = followed(df)
    if df.empty:
        raise FlatlensError("No run was measured more than once, so there are no curves.")
    there = [c for c in (*PANELS, *EXTRA) if c in df and np.isfinite(records.numbers(df, c)).any()]
    if not there:
        raise FlatlensError("None of the quantities of the paper's figures was recorded.")
    series, group = interactive.configurations(df), page.group()
    yield tag(
        "p",
        "Means over runs of one configuration, with one standard deviation to both sides. A dot "
        f"marks where the training loss is at {records.INTERPOLATION:.0%} of its start.",
    )
    yield page.legend(series, group, interactive.arms(df))
    plots = {c: page.plot(interactive.trend(df, c, series), group) for c in there}
    yield tag("div", *(p for c, p in plots.items() if c in PANELS), class_="plots")
    if rest := [p for c, p in plots.items() if c not in PANELS]:
        yield more("More quantities", tag("div", *rest, class_="plots"))
    if missing := [style.name(c) for c in PANELS if c not in there]:
        yield tag("p", f"Not recorded or not finite: {', '.join(missing)}.")


def _ends(df: pd.DataFrame) -> Iterator[Html]:
    records.require(df, ["steps"])
    found = summary(df)
    heads = [style.name(str(c)) for c in found]
    told = "Mean and standard deviation over runs at the last step"
    yield table(heads, found.to_numpy().tolist(), told)


def _tightness(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    df = followed(df)
    if df.empty:
        raise FlatlensError("No run was measured more than once, so there are no curves.")
    panels, which = interactive.tight(df)
    yield tag("p", f"Of the configuration {which}." if which != "all" else "Of all runs.")
    found = []
    for plot, series in panels:
        group = page.group()
        found.append(tag("div", page.plot(plot, group), page.legend(series, group)))
    yield tag("div", *found, class_="plots")


def _inequalities(df: pd.DataFrame) -> Iterator[Html]:
    """Whether lhs <= rhs was seen in every record."""
    rows = []
    last = np.asarray(df["step"] == df.groupby("run")["step"].transform("max"))
    for name in [str(c).removesuffix(".lhs") for c in df if str(c).endswith(".lhs")]:
        if f"{name}.rhs" not in df:
            continue
        left, right = (records.numbers(df, f"{name}.{side}") for side in ("lhs", "rhs"))
        known = ~np.isnan(left) & ~np.isnan(right)
        with np.errstate(all="ignore"):
            if name == "log_volume":  # both sides are logarithms
                slack, fine = np.exp(right - left), right >= left - TOLERANCE
            else:
                slack, fine = right / left, right >= left * (1 - TOLERANCE)
        broken, n = int((known & ~fine).sum()), int(known.sum())
        if n:
            word = verdict("broken") if broken else verdict("holds")
            least, end = _finite(slack, np.min), _finite(slack[last], np.median)
            rows.append([name, word, f"{n - broken} of {n}", least, end])
    if not rows:
        yield tag("p", "The records hold no sides of inequalities.")
        return
    heads = ["inequality", "verdict", "holds in records", "least slack", "median slack at the end"]
    yield table(heads, rows, "Right side over left side, over all records")
    told = "Inequalities that do not apply to the network are not in its records. "
    if "sharpness_se" in df:
        told += "Sides of sketched records are estimates and may cross by their standard errors. "
    yield tag("p", told + "Which are theorems for this network is told layer by layer, below.")


def _finite(values: Any, function: Callable[[Any], Any]) -> float:
    finite = values[np.isfinite(values)]
    return float(function(finite)) if len(finite) else float("nan")


def _correlations(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    runs = df["run"].nunique()
    if runs < NETWORKS:
        raise FlatlensError(f"Correlations need {NETWORKS} runs or more, there are {runs}.")
    matrix, pairs, found, series = interactive.correlations(df)
    group = page.group()
    scatter = tag("div", page.plot(pairs, group), page.legend(series, group))
    yield tag("div", page.plot(matrix, page.group()), scatter, class_="plots two tall")
    rows = [
        [style.name(row["x"]), style.name(row["y"]), *_coefficients(row), int(row["n"])]
        for row in found.to_dict("records")
    ]
    heads = ["", "", "Pearson's r", "95 %", "Spearman's ρ", "95 %", "networks"]
    told = "Coefficients with intervals over seeds"
    yield more("The numbers", table(heads, rows, told))
    names = {*found["x"], *found["y"]}
    if missing := [style.name(c) for c in QUANTITIES if c not in names]:
        yield tag("p", f"Not recorded or not finite: {', '.join(missing)}.")


def _coefficients(row: Mapping[Any, Any]) -> Iterator[str]:
    for kind in ("pearson", "spearman"):
        yield number(row[kind])
        yield f"[{number(row[f'{kind}_low'])}, {number(row[f'{kind}_high'])}]"


# ------------------------------------------------------------------ the zoo


def _zoo(
    page: Page, source: Source, good: pd.DataFrame, dropped: Mapping[str, float], max_se: float
) -> Iterator[Html]:
    yield _or_why(lambda: _figure3(page, good))
    shown = [c for c in MODEL if c in good]
    rows = good.sort_values(["class", "model"])[["model", "class", *shown]].to_numpy().tolist()
    heads = ["model", "class", *map(style.name, shown)]
    yield more(f"The numbers of {len(rows)} models", table(heads, rows, "One row a model"))
    if dropped:
        told = f"Left out: relative standard error on an axis of {max_se:g} or more"
        told += " (inf: Lanczos did not converge)"
        yield table(["model", "relative standard error"], dropped.items(), told)
    skipped = {f.parent.name: f.read_text() for f in sorted(source.base.rglob(SKIPPED))}
    if skipped:
        lines = [[name, (why.strip().splitlines() or [""])[-1]] for name, why in skipped.items()]
        yield table(["model", "reason"], lines, "Skipped: could not be measured")


def _figure3(page: Page, good: pd.DataFrame) -> Iterator[Html]:
    found = interactive.zoo(good)
    models, classes = found.over_models, found.over_classes
    yield tag(
        "p",
        f"{models.n} models of {len(found.series)} classes. Spearman's ρ is {number(models.value)},"
        f" {_interval(classes)} over classes, {_interval(models)} over models. Intervals are 95 % "
        "bootstrap intervals; variants of one class are not independent, so the one over classes "
        "counts. The line is a robust fit of the logarithms; bars are standard errors over images.",
    )
    yield tag("p", f"Classes that lie far off the line: {', '.join(found.far) or 'none'}.")
    group = page.group()
    yield tag("div", page.plot(found.plot, group), class_="tall")
    yield page.legend(found.series, group)


def _interval(e: Estimate) -> str:
    return f"[{number(e.low)}, {number(e.high)}]" if np.isfinite(e.low) else "no interval"


# ------------------------------------------------------------------ layers


def _layers(page: Page, source: Source, measured: Measured) -> Iterator[Html]:
    if not measured:
        told = "Records hold no numbers of single layers. "
        if source.frames:
            told += "--measure measures the last checkpoint of one run of each configuration. "
        yield tag("p", told + "--measurements FILE takes what flatlens measure --json printed.")
        return
    plots, series = interactive.layers(measured)
    group = page.group()
    yield page.legend(series, group)
    yield tag("div", *(page.plot(plot, group) for plot in plots), class_="plots two")
    for name, found in measured.items():
        total = sum(float(row["mls"]) for row in found["layers"])
        rows = [
            [
                *(row[key] for key in LAYER), 100 * row["mls"] / total if total else float("nan"),
                verdict(row["eq5_verdict"]), row["eq5_why"],
            ]
            for row in found["layers"]
        ]  # fmt: skip
        heads = [*LAYER.values(), "% of NMLS", "verdict on Eq. 5", "why"]
        sides = [
            [row["name"], row["equation"], *_sides(row), verdict(_holds(row)), row["why"]]
            for row in found["inequalities"]
        ]
        columns = ["inequality", "equation", "left side", "right side", "slack", "verdict", "why"]
        yield more(
            f"{name}: {_most(found['layers'], total)}",
            table(heads, rows, f"Layers of {name}"),
            table(columns, sides, f"Inequalities of {name}"),
        )


def _most(rows: Sequence[Mapping[str, Any]], total: float) -> str:
    """Which layer carries NMLS."""
    if not total > 0:
        return "no layer has an MLS above zero"
    top = max(rows, key=lambda row: float(row["mls"]))
    return f"layer {top['name']} carries most of NMLS, {top['mls'] / total:.0%}"


def _sides(row: Mapping[str, Any]) -> list[Any]:
    return [float(row[key]) for key in ("lhs", "rhs", "slack")]


def _holds(row: Mapping[str, Any]) -> str:
    return str(row["verdict"]) if row["holds"] else f"{row['verdict']} / broken"


# ------------------------------------------------------------------ claims


def _claims(source: Source) -> Iterator[Html]:
    if not source.frames:
        raise FlatlensError("The claims are about training runs; there are none here.")
    found = source.claims
    if found is None and "" not in source.frames:
        found = judged(source.frames)
    yield tag("p", RULES)
    if found is not None and len(found):
        wide = overview(found)
        rows = [[*row[:2], *map(verdict, row[2:])] for row in wide.to_numpy().tolist()]
        yield table(list(map(str, wide)), rows, "Verdicts by figure of the paper")
        for figure, part in found.groupby("figure", sort=False):
            yield more(f"{figure}: every part with its interval", _parts(part))
        return
    runs = pd.concat([df for _, _, df in source.families()], ignore_index=True)
    found = claims.claims(runs)
    rows = [
        [row["claim"], verdict(row["verdict"]), row["says"], row["network"], row["note"]]
        for row in claims.verdicts(found).to_dict("records")
    ]
    yield table(["claim", "verdict", "says", "network", "note"], rows, "Verdicts by network")
    for network, part in found.groupby("network", sort=False):
        yield more(f"{network}: every part with its interval", _parts(part))


def _parts(part: pd.DataFrame) -> Html:
    rows = [
        [verdict(row[c]) if c == "verdict" else row[c] for c in ("claim", *PARTS)]
        for row in part.to_dict("records")
    ]
    return table(["claim", *PARTS], rows, "Statistics with their 95 % intervals, low to high")


# ------------------------------------------------------------------ how it was made


def _how(source: Source) -> Iterator[Html]:
    frames = [*source.frames.values(), *([] if source.zoo is None else [source.zoo])]
    rows = []
    for name in source.settings:
        if values := [value for df in frames if name in df for value in df[name]]:
            rows.append([records.label(name), _several(values)])
    if rows:
        yield table(["setting", "values"], rows, "Settings of all runs")
    else:
        yield tag("p", "The runs have no settings in their records.")
    calls = source.provenance
    keys = dict.fromkeys(key for call in calls for key in call)
    made = [[key, _several([call[key] for call in calls if key in call])] for key in keys]
    if made:
        yield table(["", "values"], made, "How the runs were made")
    else:
        yield tag("p", "There is no provenance.json beside the records.")


def _several(values: Iterable[Any], at_most: int = 20) -> str:
    """Different values, in the order in which they come."""
    words = (" ".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for v in values)
    found = list(dict.fromkeys(words))
    rest = f" and {len(found) - at_most} more" if len(found) > at_most else ""
    return ", ".join(found[:at_most]) + rest


def _figures(df: pd.DataFrame, prefix: str) -> dict[str, Callable[[], Figure]]:
    """The static figures that can be drawn of one network."""
    curves = followed(df)
    found: dict[str, Callable[[], Figure]] = {}
    for name in [name for name in records.settings(df) if name in ("lr", "batch_size")]:
        found[f"{prefix}trends-{name}"] = partial(trends, curves, name)
    found[f"{prefix}tightness"] = partial(tightness, curves)
    if df["run"].nunique() >= NETWORKS:
        found[f"{prefix}correlations"] = partial(correlations, df)
    return found


def _downloads(source: Source, drawn: Mapping[str, Callable[[], Figure]]) -> Iterator[Html]:
    """Those that lie beside the records; where there is none, those that can be drawn."""
    files = [f for f in sorted(source.base.iterdir()) if f.suffix in (".pdf", ".png")]
    links = [download(f.name, f.read_bytes()) for f in files if f.stat().st_size <= LARGEST]
    if not links:
        for name, make in drawn.items():
            data = io.BytesIO()
            try:
                with style.look():
                    make().savefig(data, format="pdf", metadata={"CreationDate": None})
            except FlatlensError:
                continue  # its section says why
            links.append(download(f"{name}.pdf", data.getvalue()))
    if links:
        yield tag("ul", *(tag("li", link) for link in links))
    else:
        yield tag("p", "There is no static figure beside the records, and none can be drawn.")
