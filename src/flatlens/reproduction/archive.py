"""The records of several sweeps as one small file: gzipped JSON lines, one record a line.

A line has the recipe, the run, the step, every quantity and the config of the run, as the table of
`read_runs` has them: `pandas.read_json("records.jsonl.gz", lines=True)` reads it, DuckDB too.
Numbers are exact; infinities and NaN are the strings "inf", "-inf" and "nan". The same records
give the same bytes.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.runs.files import replacing
from flatlens.runs.run import NON_FINITE


def write_records(frames: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Writes the tables of `read_runs`, by the name of their recipe; whole or not at all."""
    with (
        replacing(path) as temporary,
        temporary.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file,
    ):
        for recipe, frame in frames.items():
            for row in frame.to_dict("records"):
                line = {"recipe": recipe} | {str(k): _plain(v) for k, v in row.items()}
                file.write((json.dumps(line, allow_nan=False) + "\n").encode())


def read_records(path: Path) -> dict[str, pd.DataFrame]:
    """The tables again."""
    rows: dict[str, list[dict[str, Any]]] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                row = {key: _back(value) for key, value in json.loads(line).items()}
                rows.setdefault(row.pop("recipe"), []).append(row)
    except (OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise FlatlensError(f"Cannot read records from {path}: {error}.") from error
    if not rows:
        raise FlatlensError(f"{path} holds no records.")
    return {recipe: pd.DataFrame(found) for recipe, found in rows.items()}


def _plain(value: Any) -> Any:
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _back(value: Any) -> Any:
    """Lists are tuples in a table, so that it can group them."""
    if isinstance(value, list):
        return tuple(map(_back, value))
    return NON_FINITE.get(value, value) if isinstance(value, str) else value
