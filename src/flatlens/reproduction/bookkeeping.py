"""Files that every experiment leaves beside its figures: claims, records, provenance."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.files.replacing import replacing
from flatlens.reproduction import claims, timing
from flatlens.runs.provenance import provenance

PROVENANCE = "provenance.json"


def write_text(path: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


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
        write_text(out / "claims.json", json.dumps(lines, indent=1) + "\n"),
    ]


def json_value(value: Any) -> Any:
    """None in place of a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def note_call(out: Path, scale: str, seconds: float, facts: Mapping[str, Any]) -> Path:
    """Add this command to the list in `provenance.json`; a damaged list begins anew.

    Args:
        out: folder of the file.
        scale: the scale that was asked for.
        seconds: wall time of the call.
        facts: what else is known now, such as the number of runs.
    """
    path = out / PROVENANCE
    calls: list[Any] = []
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        calls = list(json.loads(path.read_text())["calls"])
    command = "flatlens " + shlex.join(sys.argv[1:])
    call = {"command": command, "scale": scale, "wall_time": timing.duration(seconds)}
    content = {"calls": [*calls, provenance() | call], **facts}
    return write_text(path, json.dumps(content, indent=1) + "\n")


def copy_provenance(source: Path, out: Path) -> list[Path]:
    """Results redrawn from a file of records keep the provenance that lies beside that file."""
    old = source.parent / PROVENANCE
    if not old.is_file():
        return []
    return [write_text(out / PROVENANCE, old.read_text(encoding="utf-8"))]


def run_counts(df: pd.DataFrame) -> dict[str, int]:
    """How many runs a table has, how many are finished, and how many records there are."""
    last = df.groupby("run").tail(1)
    finished = int((last["step"] >= last["steps"]).sum())
    return {"runs": len(last), "finished": finished, "records": len(df)}
