"""The records of several sweeps as one small file: gzipped JSON lines, one record a line.

A line has the recipe, the run, the step, every quantity and the config of the run, as the table of
`read_runs` has them: `pandas.read_json("records.jsonl.gz", lines=True)` reads it, DuckDB too.
Numbers are exact; infinities and NaN are the strings "inf", "-inf" and "nan". The same records
give the same bytes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.files.plain_json import restored, to_plain
from flatlens.files.reading import parse_json, read_gzip_lines
from flatlens.files.replacing import replacing
from flatlens.files.schema import Field, checked

SCHEMA = {
    "recipe": Field((str,), required=True),
    "run": Field((str,), required=True),
    "step": Field((int,), required=True, low=0),
}
CELL = Field((int, float, str, bool, list, dict, type(None)))


def write_records(frames: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Writes the tables of `read_runs`, by the name of their recipe; whole or not at all."""
    with (
        replacing(path) as temporary,
        temporary.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file,
    ):
        for recipe, frame in frames.items():
            for row in frame.to_dict("records"):
                line = {"recipe": recipe} | {str(k): to_plain(v) for k, v in row.items()}
                file.write((json.dumps(line, allow_nan=False) + "\n").encode())


def read_records(path: Path) -> dict[str, pd.DataFrame]:
    """Return the tables that `write_records` wrote, by the name of their recipe.

    Raises:
        FlatlensError: if the file is damaged; the message names the line and the field.
    """
    rows_of_recipe: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(read_gzip_lines(path), 1):
        where = f"Line {number} of {path}"
        record = checked(parse_json(line, where), SCHEMA, where, others=CELL)
        row = {key: _cell(value) for key, value in record.items()}
        rows_of_recipe.setdefault(row.pop("recipe"), []).append(row)
    if not rows_of_recipe:
        raise FlatlensError(f"{path} holds no records.")
    return {recipe: pd.DataFrame(rows) for recipe, rows in rows_of_recipe.items()}


def _cell(value: Any) -> Any:
    """Return a value as a table holds it: tuples for lists, so that it can group them."""
    return tuple(map(_cell, value)) if isinstance(value, list) else restored(value)
