"""The section of the report on where the numbers come from: settings, provenance, bad folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flatlens.analysis import run_table
from flatlens.report.elements import Html, table, tag
from flatlens.report.sources import Source

LONGEST = 200  # letters of one value


def origin_section(source: Source) -> Iterator[Html]:
    """Yield the content of the section."""
    frames = [*source.frames.values(), *([] if source.zoo is None else [source.zoo])]
    settings = []
    for name in source.settings:
        if values := [value for df in frames if name in df for value in df[name].drop_duplicates()]:
            settings.append([run_table.label(name), _several(values)])
    if settings:
        yield table(["setting", "values"], settings, "Settings of all runs")
    else:
        yield tag("p", "The runs have no settings in their records.")
    calls = source.provenance
    keys = dict.fromkeys(key for call in calls for key in call)
    facts = [[key, _several([call[key] for call in calls if key in call])] for key in keys]
    if facts:
        yield table(["", "values"], facts, "How the runs were made")
    else:
        yield tag("p", "There is no provenance.json beside the records.")


def unreadable_section(source: Source) -> Iterator[Html]:
    """Yield a list of the run folders that could not be read, with the reasons."""
    yield tag("p", "These runs are in no table and in no plot.")
    yield tag("ul", *(tag("li", sentence) for sentence in source.unreadable))


def _several(values: Iterable[Any], at_most: int = 20) -> str:
    """Return the different values in the order in which they come."""
    words = (" ".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for v in values)
    different = list(dict.fromkeys(word[:LONGEST] for word in words))
    rest = f" and {len(different) - at_most} more" if len(different) > at_most else ""
    return ", ".join(different[:at_most]) + rest
