"""Write `provenance.json`, the list of calls that made the runs of a reproduction."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.files.reading import read_json
from flatlens.files.schema import Field, checked
from flatlens.reproduction.json_files import write_json
from flatlens.reproduction.recipe_records import Frames, counts, frames_of_runs, joined
from flatlens.reproduction.timing import duration
from flatlens.runs.provenance import provenance

PROVENANCE = "provenance.json"
SCHEMA = {"calls": Field((list,), required=True), "networks": Field((dict,))}
TEXT = Field((str,))
CALL = {"command": TEXT, "scale": TEXT, "wall_time": TEXT}
Known = tuple[Frames, Path | str | None]  # runs that were trained before, and their file


def read_provenance(path: Path) -> dict[str, Any]:
    """Read a `provenance.json`.

    Raises:
        FlatlensError: if the file is damaged or has no list of calls; names the field.
    """
    content = checked(read_json(path, follow=True), SCHEMA, str(path))
    for number, call in enumerate(content["calls"], 1):
        checked(call, CALL, f"Entry {number} of 'calls' in {path}")
    return content


def scale_of(folder: Path) -> str:
    """Return the scale that the calls of a folder were made at, or the folder's name."""
    try:
        calls = read_provenance(folder / PROVENANCE)["calls"]
    except FlatlensError:
        return folder.name
    scales = dict.fromkeys(call.get("scale") for call in calls)
    names = [name for name in scales if isinstance(name, str)]
    return ", ".join(names) or folder.name


@contextmanager
def logged_call(
    out: Path, scale: str, source: Path | str | None, problems: list[str], known: Known
) -> Iterator[None]:
    """Add this call to `provenance.json` when it ends, also with Ctrl-C.

    Args:
        out: folder of the results.
        scale: scale of the call.
        source: file of records; what is redrawn from it keeps the provenance of the records.
        problems: list to which a sentence is added if the old file is damaged.
        known: records of runs that were trained before, and the file that they come from.
    """
    before = time.perf_counter()
    try:
        yield
    except KeyboardInterrupt:
        problems += _add_call(out, scale, source, time.perf_counter() - before, known)
        raise
    problems += _add_call(out, scale, source, time.perf_counter() - before, known)


def earlier_calls(out: Path, source: Path | str | None) -> Path:
    """Return the list of calls to continue.

    It is the one in `out`, else the one beside a file of records.
    """
    own = out / PROVENANCE
    return own if source is None or own.exists() else Path(source).parent / PROVENANCE


def _add_call(
    out: Path, scale: str, source: Path | str | None, seconds: float, known: Known
) -> list[str]:
    """Add a call to the list, or begin a new list if the old one is damaged and say so."""
    frames, place = known
    old = earlier_calls(out, place) if source is None else Path(source).parent / PROVENANCE
    content: dict[str, Any] = {"calls": []}
    problems = []
    if old.exists():
        try:
            content = read_provenance(old)
        except FlatlensError:
            problems.append(f"{old} was damaged; a new list of calls is begun.")
    if source is None:
        command = "flatlens " + shlex.join(sys.argv[1:])
        call = {"command": command, "scale": scale, "wall_time": duration(seconds)}
        content["calls"].append(provenance() | call)
        frames = joined(frames_of_runs(out, scale), frames)
        content["networks"] = {name: counts(df) for name, df in frames.items()}
    write_json(out / PROVENANCE, content)
    return problems
