"""The section of the report with static figures to download."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from flatlens.analysis import run_table
from flatlens.analysis.claim_tests import FEWEST_NETWORKS
from flatlens.errors import FlatlensError
from flatlens.figures import correlations, style, tightness, trends
from flatlens.figures.dose_response import dose_response
from flatlens.figures.panel import has_panel, panel
from flatlens.report.elements import Html, download, tag
from flatlens.report.intervention_section import has_interventions
from flatlens.report.sources import Source

MOST_CONFIGURATIONS = 24  # With more, the legend of a printed figure covers its panels.
LARGEST = 1_000_000  # bytes of a figure that is embedded
LARGEST_TOTAL = 6_000_000  # bytes of all embedded figures

Figures = Mapping[str, Callable[[], Figure]]


def static_figures(df: pd.DataFrame, prefix: str) -> dict[str, Callable[[], Figure]]:
    """Return functions that draw the static figures of one network, by name."""
    curves = run_table.followed(df)
    figures: dict[str, Callable[[], Figure]] = {}
    if len(run_table.ordered(df)) > MOST_CONFIGURATIONS:
        return {f"{prefix}tightness": partial(tightness, curves)}
    for name in [name for name in run_table.settings(df) if name in ("lr", "batch_size")]:
        figures[f"{prefix}trends-{name}"] = partial(trends, curves, name)
    figures[f"{prefix}tightness"] = partial(tightness, curves)
    if has_interventions(df):
        figures[f"{prefix}interventions"] = partial(dose_response, df)
    if has_panel(df):
        figures[f"{prefix}panel"] = partial(panel, df)
    if df["run"].nunique() >= FEWEST_NETWORKS:
        figures[f"{prefix}correlations"] = partial(correlations, df)
    return figures


def downloads_section(source: Source, figures: Figures) -> Iterator[Html]:
    """Yield links to the figures beside the records or, without such files, to drawn ones."""
    links, total = [], 0
    for name, data in _files(source.base) or _drawn(figures):
        total += len(data)
        if total <= LARGEST_TOTAL:
            links.append(download(name, data))
    if links:
        yield tag("ul", *(tag("li", link) for link in links))
    else:
        yield tag("p", "There is no static figure beside the records, and none can be drawn.")


def _files(folder: Path) -> list[tuple[str, bytes]]:
    """Return the PDF and PNG files of a folder; links, FIFOs and devices are not opened."""
    return [
        (file.name, file.read_bytes())
        for file in sorted(folder.iterdir())
        if file.suffix in (".pdf", ".png")
        and not file.is_symlink()
        and file.is_file()
        and file.stat().st_size <= LARGEST
    ]


def _drawn(figures: Figures) -> Iterator[tuple[str, bytes]]:
    """Draw the figures as PDF; a figure that cannot be drawn is left out, its section says why."""
    for name, make in figures.items():
        data = io.BytesIO()
        try:
            with style.look():
                make().savefig(data, format="pdf", metadata={"CreationDate": None})
        except FlatlensError:
            continue
        if data.tell() <= LARGEST:
            yield f"{name}.pdf", data.getvalue()
