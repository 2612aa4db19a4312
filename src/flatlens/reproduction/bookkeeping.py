"""The files that every experiment writes besides its figures: claims, records, provenance."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.reproduction import claims, timing
from flatlens.reproduction.call_log import PROVENANCE, earlier_calls, read_provenance
from flatlens.reproduction.json_files import json_value, write_json, write_text
from flatlens.runs.provenance import provenance


def write_claims(table: pd.DataFrame, title: str, out: Path) -> list[Path]:
    """Write the verdicts: `claims.md` for people, `claims.json` for programs.

    Args:
        table: one row for each part of a claim.
        title: heading of `claims.md`.
        out: folder of both files.
    """
    lines = [
        {str(key): json_value(value) for key, value in row.items()}
        for row in table.to_dict("records")
    ]
    return [
        write_text(out / "claims.md", f"# {title}\n\n{claims.markdown(table)}"),
        write_json(out / "claims.json", lines),
    ]


def note_call(
    out: Path,
    scale: str,
    seconds: float,
    facts: Mapping[str, Any],
    known: Path | str | None = None,
) -> Path:
    """Add this command to the list in `provenance.json`; a damaged list is started anew.

    Args:
        out: folder of the file.
        scale: the scale that was asked for.
        seconds: wall time of the call.
        facts: further facts about the call, such as the number of runs.
        known: file of records of finished runs that the call used.
    """
    path = out / PROVENANCE
    calls: list[Any] = []
    with contextlib.suppress(FlatlensError):
        calls = list(read_provenance(earlier_calls(out, known))["calls"])
    command = "flatlens " + shlex.join(sys.argv[1:])
    call = {"command": command, "scale": scale, "wall_time": timing.duration(seconds)}
    content = {"calls": [*calls, provenance() | call], **facts}
    return write_json(path, content)


def copy_provenance(source: Path, out: Path) -> list[Path]:
    """Copy the provenance of a file of records to the results that are redrawn from it."""
    old = source.parent / PROVENANCE
    if not old.is_file():
        return []
    return [write_json(out / PROVENANCE, read_provenance(old))]
