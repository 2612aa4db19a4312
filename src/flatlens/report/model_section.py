"""The section of the report on a zoo of models: Figure 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from flatlens.analysis.statistics import Interval
from flatlens.figures import style
from flatlens.figures.correlations import number
from flatlens.report import model_plots
from flatlens.report.elements import Html, more, table, tag, term
from flatlens.report.page import Page
from flatlens.report.sources import Source
from flatlens.report.training_section import or_reason
from flatlens.zoo.zoo import SKIPPED

COLUMNS = ("adaptive_sharpness", "normalized_mls", "top1", "parameters")
LARGEST_REASON = 100_000  # bytes of a file that says why a model was skipped


def model_section(
    page: Page, source: Source, good: pd.DataFrame, dropped: Mapping[str, float], max_se: float
) -> Iterator[Html]:
    """Yield the content of the section.

    Args:
        page: the page.
        source: the place of the zoo.
        good: the models to plot.
        dropped: the relative standard errors of models that are left out.
        max_se: the limit of that error.
    """
    yield or_reason(lambda: _figure3(page, good))
    shown = [c for c in COLUMNS if c in good]
    models = good.sort_values(["class", "model"])[["model", "class", *shown]].to_numpy().tolist()
    heads = ["model", "class", *(term(c, style.name(c)) for c in shown)]
    yield more(f"The numbers of {len(models)} models", table(heads, models, "One row per model"))
    if dropped:
        caption = f"Left out: relative standard error on an axis of {max_se:g} or more"
        caption += " (inf: Lanczos did not converge)"
        yield table(["model", "relative standard error"], dropped.items(), caption)
    if reasons := _skipped(source):
        yield table(["model", "reason"], reasons, "Skipped: could not be measured")


def _skipped(source: Source) -> list[list[str]]:
    """Return the models that could not be measured, with the last line of the reason."""
    reasons = []
    for file in sorted(source.base.rglob(SKIPPED)):
        if file.is_symlink() or not file.is_file() or file.stat().st_size > LARGEST_REASON:
            continue
        lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reasons.append([file.parent.name, (lines or [""])[-1]])
    return reasons


def _figure3(page: Page, good: pd.DataFrame) -> Iterator[Html]:
    figure = model_plots.zoo(good)
    models, classes = figure.over_models, figure.over_classes
    yield tag(
        "p",
        f"{models.n} models of {len(figure.series)} classes. Spearman's ρ is "
        f"{number(models.value)}, {_interval(classes)} over classes, {_interval(models)} over "
        "models. Intervals are 95 % bootstrap intervals. Variants of one class are not "
        "independent, so the interval over classes counts. The line is a robust fit of the "
        "logarithms; bars are standard errors over images.",
    )
    yield tag("p", f"Classes that lie far off the line: {', '.join(figure.far) or 'none'}.")
    group = page.group()
    yield tag("div", page.plot(figure.plot, group), class_="tall")
    yield page.legend(figure.series, group)


def _interval(e: Interval) -> str:
    return f"[{number(e.low)}, {number(e.high)}]" if np.isfinite(e.low) else "no interval"
