"""`flatlens report`: everything that records hold as one HTML file that works offline.

A report never trains. It measures only if `measure` is set, because records hold no numbers of
single layers. If records lack something, the section says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

import flatlens
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.errors import FlatlensError
from flatlens.figures import zoo as figure3
from flatlens.report.claims_section import claims_section, judge_source
from flatlens.report.downloads_section import downloads_section, static_figures
from flatlens.report.elements import join, tag
from flatlens.report.layer_section import Measured, layer_section
from flatlens.report.measurement_files import label, read_measurement
from flatlens.report.model_section import model_section
from flatlens.report.opening import summary_in_words
from flatlens.report.origin_section import origin_section, unreadable_section
from flatlens.report.page import Page, plotly_js
from flatlens.report.sources import Source, read
from flatlens.report.training_section import training_section
from flatlens.reproduction.json_files import write_text
from flatlens.zoo.table import precise_models


@no_type_check
@typed_arguments
def report(
    runs: Path | str,
    out: Path | str = "report.html",
    *,
    measure: bool = False,
    models: Collection[str] = (),
    trust: bool = False,
    measurements: Sequence[Path | str] = (),
    max_se: float = 0.15,
) -> Path:
    """Write the report on some runs, complete or not at all.

    Args:
        runs: a folder of runs of any depth, the results of `flatlens reproduce` (the folder, or its
            `records.jsonl.gz`), or the folder of a zoo.
        out: the file to write.
        measure: measure the last checkpoint of one run of each configuration, for the view by
            layers. Only models that flatlens itself names are rebuilt.
        models: model factories of your own that `measure` may run where a run names them.
        trust: let `measure` run every model factory that a run names.
        measurements: files of `flatlens measure --json`, for the same view.
        max_se: leave out zoo models whose relative standard error on an axis is not below this.

    Returns:
        The path of the file.

    Raises:
        FlatlensError: if there are no runs, a file is damaged, or `out` cannot be written.
    """
    out = Path(out)
    if not out.parent.is_dir():
        raise FlatlensError(f"There is no folder {out.parent} for the report; make it first.")
    if out.is_dir():
        raise FlatlensError(f"{out} is a folder; name a file for the report.")
    plotly_js()  # a missing library is reported before the work
    source = read(Path(runs))
    measured = {label(Path(m), measurements): read_measurement(Path(m)) for m in measurements}
    if measure:
        measured |= source.measured(models, trust)
    return write_text(out, build_page(source, measured, max_se))


def build_page(source: Source, measured: Measured, max_se: float) -> str:
    """Return the HTML of the report."""
    page = Page(f"flatlens report: {source.base.resolve().name}")
    figures: dict[str, Callable[[], Figure]] = {}
    several = len([recipe for recipe in source.frames if recipe]) > 1
    for k, (recipe, network, df) in enumerate(source.families()):
        title = f"{network} ({recipe})" if several else network
        page.section(title, *training_section(page, df))
        figures |= static_figures(df, f"{k + 1}-" if k else "")
    if source.zoo is not None:
        good, dropped = precise_models(source.zoo, max_se)
        content = model_section(page, source, good, dropped, max_se)
        page.section("Figure 3: the zoo", *content)
        figures["figure3"] = partial(figure3, good)
    judged = judge_source(source)
    page.section("Layer by layer", *layer_section(page, source, measured))
    page.section("Claims of the paper", *claims_section(judged))
    page.section("Configuration and provenance", *origin_section(source))
    page.section("Figures to download", *downloads_section(source, figures))
    if source.unreadable:
        page.section("Run folders that could not be read", *unreadable_section(source))
    head = join([tag("h1", page.title), summary_in_words(source, judged)])
    foot = f"Made by flatlens {flatlens.__version__}. This file needs no network."
    return page.write(head, tag("p", foot))
