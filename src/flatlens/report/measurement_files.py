"""Read the output of `flatlens measure --json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.files.plain_json import NON_FINITE
from flatlens.files.reading import LARGEST_TABLE, read_json
from flatlens.files.schema import Field, checked

# The fields that a report shows, by list of the measurement.
SHOWN = {
    "layers": {
        "name", "kind", "positions", "mls", "sharpness", "sharing_ratio", "eq5_lhs", "eq5_rhs",
        "eq5_slack", "eq5_verdict", "eq5_why",
    },
    "inequalities": {"name", "equation", "lhs", "rhs", "slack", "holds", "verdict", "why"},
}  # fmt: skip
WORDS = ("name", "kind", "weight", "why", "equation", "verdict", "eq5_verdict", "eq5_why")
WORD = Field((str,), required=True)
NUMBER = Field((int, float, str, NoneType), required=True, words=tuple(NON_FINITE))
HOLDS = Field((bool, str, NoneType), required=True)
SCHEMAS = {
    entries: {n: WORD if n in WORDS else HOLDS if n == "holds" else NUMBER for n in sorted(names)}
    for entries, names in SHOWN.items()
}


def read_measurement(file: Path) -> dict[str, Any]:
    """Read the JSON of a measurement.

    Raises:
        FlatlensError: if the file is damaged or holds something else; names the field.
    """
    try:
        content = read_json(file, LARGEST_TABLE, follow=True)
    except FlatlensError as error:
        raise FlatlensError(f"Cannot read a measurement from {file}: {error}") from error
    wrong = f"{file} is not what flatlens measure --json gives"
    if not isinstance(content, dict) or not all(isinstance(content.get(k), list) for k in SHOWN):
        raise FlatlensError(f"{wrong}: it has no {' or no '.join(SHOWN)}.")
    for entries, schema in SCHEMAS.items():
        for number, entry in enumerate(content[entries], 1):
            try:
                checked(entry, schema, f"Entry {number} of {entries} of {file}")
            except FlatlensError as error:
                raise FlatlensError(f"{wrong}. {error}") from None
    return parse_measurement(json.dumps(content))


def label(file: Path, among: Sequence[Path | str]) -> str:
    """Return the name of a file, with its folder if names repeat."""
    namesakes = [other for other in among if Path(other).stem == file.stem]
    return file.stem if len(namesakes) == 1 else str(file)


def parse_measurement(content: str) -> dict[str, Any]:
    """Parse the JSON of a measurement; strings that stand for infinities become floats."""
    return dict(json.loads(content, object_pairs_hook=_restored))


def _restored(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Restore numbers that JSON does not have, but not in names: a layer may be called "inf"."""
    return {
        k: v if k in WORDS or not isinstance(v, str) else NON_FINITE.get(v, v) for k, v in pairs
    }
