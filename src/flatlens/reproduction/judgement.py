"""Judge the claims of every figure that has records, and keep the verdicts in files.

`claims.md` is for people, `claims.json` for programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.analysis import run_table
from flatlens.errors import FlatlensError
from flatlens.reproduction.claims import (
    AUTHORS,
    SAYS,
    claims,
    markdown,
    markdown_table,
    verdicts,
)
from flatlens.reproduction.json_files import (
    is_number,
    json_value,
    read_json,
    refuse_field,
    write_json,
    write_text,
)
from flatlens.reproduction.recipe import Drawing, recipes
from flatlens.reproduction.recipe_records import counts

CLAIMS = "claims.json"
# Significant digits in `claims.json`. The last digits of a float depend on the processor, because
# BLAS adds numbers in another order on each; with fewer digits all machines write the same bytes.
DIGITS = 10
VERDICTS = ("supported", "not supported", "inconclusive")
# The fields of a row of `claims.json` by kind.
TEXT_FIELDS = ("claim", "network", "part", "scope", "statistic", "claimed", "note", "figure")
NUMBER_FIELDS = ("value", "low", "high", "effect")
COUNT_FIELDS = ("n", "units")


def judged(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Judge the claims of every figure that has records, on the runs that the figure shows."""
    tables = [
        claims(runs_of(drawing, frames[recipe.name]), drawing.claims, AUTHORS).assign(
            figure=drawing.name
        )
        for recipe in recipes().values()
        if recipe.name in frames
        for drawing in recipe.figures.values()
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def runs_of(drawing: Drawing, df: pd.DataFrame) -> pd.DataFrame:
    """Return the finished runs that a figure shows."""
    df = run_table.finished(df)
    if drawing.by is not None:
        with suppress(FlatlensError):  # one configuration so far: the claims say so
            df = run_table.arm(df, drawing.by)
    return df


def overview(table: pd.DataFrame) -> pd.DataFrame:
    """Return the verdicts with one row per claim and one column per figure."""
    by_figure = [
        verdicts(results).assign(figure=figure)
        for figure, results in table.groupby("figure", sort=False)
    ]
    wide = pd.concat(by_figure).pivot_table(
        index="claim", columns="figure", values="verdict", aggfunc=" / ".join, sort=False
    )
    order = [name for name in SAYS if name in wide.index]
    wide = wide.loc[order, list(dict.fromkeys(table["figure"]))].fillna("")
    wide.insert(0, "says", [SAYS[name] for name in order])
    return wide.reset_index()


def write_claims(table: pd.DataFrame, frames: Mapping[str, pd.DataFrame], out: Path) -> list[Path]:
    """Write `claims.md` and `claims.json`, and return their paths."""
    titles = {d.name: d.title for r in recipes().values() for d in r.figures.values()}
    by_recipe = {name: counts(df) for name, df in frames.items()}
    networks = [f"{name} {c['finished']} of {c['runs']}" for name, c in by_recipe.items()]
    paragraphs = [
        "# The paper's claims on these runs\n",
        f"Networks that have come to their last step, of those begun: {', '.join(networks)}.\n",
        markdown_table(overview(table)) + "\n",
        *(
            f"## {titles[str(figure)]}\n\n{markdown(results)}"
            for figure, results in table.groupby("figure", sort=False)
        ),
    ]
    results = [
        {key: json_value(value, digits=DIGITS) for key, value in row.items()}
        for row in table.to_dict("records")
    ]
    return [
        write_text(out / "claims.md", "\n".join(paragraphs)),
        write_json(out / CLAIMS, results),
    ]


def read_claims(path: Path) -> pd.DataFrame:
    """Read the table in `claims.json`.

    Raises:
        FlatlensError: if the file is damaged; names the row and the field.
    """
    content = read_json(path)
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise FlatlensError(f"{path} is no table of claims; make it again with flatlens reproduce.")
    for number, row in enumerate(content, 1):
        _check_row(row, f"Row {number} of {path}")
    fields = (*TEXT_FIELDS, *NUMBER_FIELDS, *COUNT_FIELDS, "verdict", "main")
    table = pd.DataFrame(content, columns=list(fields))
    return table.assign(**{name: run_table.numbers(table, name) for name in NUMBER_FIELDS})


def _check_row(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row of `claims.json` that lacks a field or has one of a wrong type."""
    for field in (*TEXT_FIELDS, *NUMBER_FIELDS, *COUNT_FIELDS, "verdict", "main"):
        if field not in row:
            raise FlatlensError(
                f"{where} has no {field!r}, so the file is no table of claims; make it again with "
                "flatlens reproduce."
            )
    expected = {field: "text" for field in TEXT_FIELDS if not isinstance(row[field], str)}
    if row["claim"] not in tuple(SAYS):  # a tuple: a list has no hash
        expected["claim"] = "the name of a claim"
    if row["verdict"] not in VERDICTS:
        expected["verdict"] = f"one of {', '.join(VERDICTS)}"
    if not isinstance(row["main"], bool):
        expected["main"] = "true or false"
    expected |= {
        field: "a number or null"
        for field in NUMBER_FIELDS
        if row[field] is not None and not is_number(row[field])
    }
    expected |= {
        field: "a whole number" for field in COUNT_FIELDS if not is_number(row[field], low=0)
    }
    for field, description in expected.items():
        raise refuse_field(where, field, row[field], description)
