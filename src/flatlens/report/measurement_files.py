"""Read what `flatlens measure --json` printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.files.plain_json import NON_FINITE
from flatlens.reproduction.json_files import is_number, read_json, refuse_field

# The fields that a report shows, by list of the measurement.
SHOWN = {
    "layers": {
        "name", "kind", "positions", "mls", "sharpness", "sharing_ratio", "eq5_lhs", "eq5_rhs",
        "eq5_slack", "eq5_verdict", "eq5_why",
    },
    "inequalities": {"name", "equation", "lhs", "rhs", "slack", "holds", "verdict", "why"},
}  # fmt: skip
WORDS = ("name", "kind", "weight", "why", "equation", "verdict", "eq5_verdict", "eq5_why")


def read_measurement(file: Path) -> dict[str, Any]:
    """Read the JSON of a measurement.

    Raises:
        FlatlensError: if the file is damaged or holds something else; names the field.
    """
    try:
        content = read_json(file)
    except FlatlensError as error:
        raise FlatlensError(f"Cannot read a measurement from {file}: {error}") from error
    wrong = f"{file} is not what flatlens measure --json gives"
    if not isinstance(content, dict) or not all(isinstance(content.get(k), list) for k in SHOWN):
        raise FlatlensError(f"{wrong}: it has no {' or no '.join(SHOWN)}.")
    for part, needed in SHOWN.items():
        for number, row in enumerate(content[part], 1):
            if not isinstance(row, dict) or not needed <= set(row):
                raise FlatlensError(f"{wrong}: entry {number} of {part} is incomplete.")
            _check_entry(row, needed, f"Entry {number} of {part} of {file}")
    return parse_measurement(json.dumps(content))


def _check_entry(row: dict[str, Any], needed: set[str], where: str) -> None:
    for field in sorted(needed):
        value = row[field]
        if field in WORDS:
            if not isinstance(value, str):
                raise refuse_field(where, field, value, "text")
        elif field != "holds" and not is_number(value) and value not in (*NON_FINITE, None):
            raise refuse_field(where, field, value, "a number")


def label(file: Path, among: Sequence[Path | str]) -> str:
    """Return the name of a file, with its folder if names repeat."""
    same = [other for other in among if Path(other).stem == file.stem]
    return file.stem if len(same) == 1 else str(file)


def parse_measurement(content: str) -> dict[str, Any]:
    """Parse the JSON of a measurement; strings that stand for infinities become floats."""
    return dict(json.loads(content, object_pairs_hook=_restored))


def _restored(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Restore numbers that JSON does not have; a layer may well be called "inf"."""
    return {
        k: v if k in WORDS or not isinstance(v, str) else NON_FINITE.get(v, v) for k, v in pairs
    }
