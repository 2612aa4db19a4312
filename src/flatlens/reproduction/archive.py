"""Keep the records of several sweeps in one small file: gzipped JSON lines, one record per line.

A line has the recipe, the run, the step, every quantity and the config of the run, as the table of
`read_runs` has them. `pandas.read_json("records.jsonl.gz", lines=True)` and DuckDB read it.
Numbers are exact; infinities and NaN are the strings "inf", "-inf" and "nan". The same records
give the same bytes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.files.plain_json import NON_FINITE
from flatlens.files.reading import parse_json, read_gzip_lines
from flatlens.files.replacing import replacing
from flatlens.files.schema import Field, checked
from flatlens.metrics import METRICS
from flatlens.reproduction.json_files import json_value
from flatlens.training.config import Config

CONFIG_FIELDS = {field.name for field in fields(Config)}
NAME = Field((str,), required=True, empty=False)
COUNT = Field((int, float, NoneType), low=1)
WORD = Field((str, NoneType))
SCHEMA = {
    "recipe": NAME,
    "run": NAME,
    "step": Field((int, float), required=True, low=0, whole=True),
    "lr": Field((int, float, NoneType), low=1e-300),
    "batch_size": COUNT,
    "steps": COUNT,
    "samples": COUNT,
    "train_size": COUNT,
    "seed": Field((int, float, NoneType), low=0),
    "model": WORD,
    "data": WORD,
    "optimizer": WORD,
}
SETTING = Field((int, float, str, bool, list, NoneType))
QUANTITY = Field((int, float, str, NoneType), words=tuple(NON_FINITE))
CELL = Field((int, float, str, bool, NoneType))  # of a user's own record
# Numbers of a record that are neither sides of inequalities nor standard errors.
QUANTITIES = {
    *METRICS, "train_loss", "test_loss", "train_accuracy", "test_accuracy", "loss_gap",
    "generalization_gap", "relative_flatness", "bound_authors", "d_authors",
}  # fmt: skip


def write_records(frames: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Write the tables of `read_runs`, by the name of their recipe, complete or not at all."""
    with (
        replacing(path) as temporary,
        temporary.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file,
    ):
        for recipe, frame in frames.items():
            for row in frame.to_dict("records"):
                values = {str(key): json_value(value, text=True) for key, value in row.items()}
                line = json.dumps({"recipe": recipe} | values, allow_nan=False)
                file.write(f"{line}\n".encode())


def read_records(path: Path) -> dict[str, pd.DataFrame]:
    """Read the tables that `write_records` wrote, by the name of their recipe.

    Raises:
        FlatlensError: if the file is damaged or a field has a wrong type; names line and field.
    """
    by_recipe: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(read_gzip_lines(path, follow=True), 1):
        where = f"Line {number} of {path}"
        record = check_record(parse_json(line, where), where)
        values = {key: _restored(value) for key, value in record.items()}
        by_recipe.setdefault(values.pop("recipe"), []).append(values)
    if not by_recipe:
        raise FlatlensError(f"{path} holds no records.")
    return {recipe: pd.DataFrame(records) for recipe, records in by_recipe.items()}


def check_record(record: Any, where: str) -> dict[str, Any]:
    """Refuse a record without recipe, run or step, and fields of a wrong type.

    Args:
        record: the value of one line of the file.
        where: beginning of the sentence of a refusal, such as "Line 3 of FILE".

    Returns:
        The record.

    Raises:
        FlatlensError: names the field, its value and what is expected.
    """
    checked(record, SCHEMA, where, others=_field)
    if record.get("steps") is None and "parameters" not in record:  # a measured model has none
        raise FlatlensError(f"{where} is damaged: the field 'steps' is missing.")
    return dict(record)


def _field(name: str) -> Field:
    """Return the expected type of a field that is not in the table."""
    if name.startswith("config.") or name.split(".")[0] in CONFIG_FIELDS - {"loss"}:
        return SETTING
    return QUANTITY if is_quantity(name) else CELL


def is_quantity(field: str) -> bool:
    """Return whether a field of a record is a number that flatlens measures."""
    return field in QUANTITIES or field.endswith((".lhs", ".rhs", "_se"))


def _restored(value: Any) -> Any:
    """Return a value as `read_runs` has it: lists are tuples, so that a table can group them."""
    if isinstance(value, list):
        return tuple(map(_restored, value))
    return NON_FINITE.get(value, value) if isinstance(value, str) else value
