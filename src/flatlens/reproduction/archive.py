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
from typing import Any

import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.files.plain_json import NON_FINITE
from flatlens.files.replacing import replacing
from flatlens.metrics import METRICS
from flatlens.reproduction.json_files import (
    is_number,
    json_value,
    read_json_lines,
    refuse_field,
)
from flatlens.training.config import Config

CONFIG_FIELDS = {field.name for field in fields(Config)}
# Config fields that are numbers, with the least value that makes sense.
NUMBERS: dict[str, int | float] = {
    "lr": 1e-300,
    "batch_size": 1,
    "steps": 1,
    "samples": 1,
    "train_size": 1,
    "seed": 0,
}
WORDS = ("model", "data", "optimizer")
# Numbers of a record beside the sides of inequalities and standard errors.
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
    """Read the tables again, by the name of their recipe.

    Raises:
        FlatlensError: if the file is damaged or a field has a wrong type; names line and field.
    """
    by_recipe: dict[str, list[dict[str, Any]]] = {}
    for number, record in read_json_lines(path):
        check_record(record, f"Line {number} of {path}")
        values = {key: _restored(value) for key, value in record.items()}
        by_recipe.setdefault(values.pop("recipe"), []).append(values)
    if not by_recipe:
        raise FlatlensError(f"{path} holds no records.")
    return {recipe: pd.DataFrame(records) for recipe, records in by_recipe.items()}


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Refuse a record without recipe, run or step, and fields of a wrong type.

    Args:
        record: one line of the file.
        where: beginning of the sentence of a refusal, such as "Line 3 of FILE".

    Raises:
        FlatlensError: names the field, its value and what is expected.
    """
    # A measured model has no steps of training.
    needed = (
        ("recipe", "run", "step") if "parameters" in record else ("recipe", "run", "step", "steps")
    )
    for field in needed:
        if record.get(field) is None:
            raise FlatlensError(f"{where} has no {field!r}.")
    for field in ("recipe", "run"):
        if not isinstance(record[field], str) or not record[field]:
            raise refuse_field(where, field, record[field], "a name")
    if not is_number(record["step"], low=0, whole=True):
        raise refuse_field(where, "step", record["step"], "a whole number of at least 0")
    for field, value in record.items():
        if field not in ("recipe", "run", "step") and value is not None:
            _check_value(field, value, where)


def _check_value(field: str, value: Any, where: str) -> None:
    if field in NUMBERS:
        if not is_number(value, low=NUMBERS[field]):
            raise refuse_field(where, field, value, f"a number of at least {NUMBERS[field]:g}")
    elif field in WORDS:
        if not isinstance(value, str):
            raise refuse_field(where, field, value, "a name")
    elif field.startswith("config.") or field.split(".")[0] in CONFIG_FIELDS - {"loss"}:
        if isinstance(value, dict):
            raise refuse_field(where, field, value, "a setting")
    elif isinstance(value, list | dict) or (
        is_quantity(field) and isinstance(value, str | bool) and value not in NON_FINITE
    ):
        raise refuse_field(where, field, value, "a number")


def _is_word(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value not in NON_FINITE)


def is_quantity(field: str) -> bool:
    """Return whether a field of a record is a number that flatlens measures."""
    return field in QUANTITIES or field.endswith((".lhs", ".rhs", "_se"))


def _restored(value: Any) -> Any:
    """Return a value as `read_runs` has it: lists are tuples, so that a table can group them."""
    if isinstance(value, list):
        return tuple(map(_restored, value))
    return NON_FINITE.get(value, value) if isinstance(value, str) else value
