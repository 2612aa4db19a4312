"""Judge the claims of every figure that has records, and write the verdicts to files.

`claims.md` is for people, `claims.json` for programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType

import pandas as pd

from flatlens.analysis import run_table
from flatlens.errors import FlatlensError
from flatlens.files.reading import read_json
from flatlens.files.schema import Field, checked
from flatlens.reproduction.claims import (
    AUTHORS,
    SAYS,
    claims,
    markdown,
    markdown_table,
    verdicts,
)
from flatlens.reproduction.json_files import json_value, write_json, write_text
from flatlens.reproduction.recipe import Drawing, recipes
from flatlens.reproduction.recipe_records import counts

CLAIMS = "claims.json"
# Significant digits in `claims.json`. The last digits of a float depend on the processor, because
# BLAS adds numbers in another order on each; with fewer digits all machines write the same bytes.
DIGITS = 10
VERDICTS = ("supported", "not supported", "inconclusive")
TEXT = Field((str,), required=True)
NUMBER = Field((int, float, NoneType), required=True)
COUNT = Field((int, float), required=True, low=0)
# The fields of a row of `claims.json`.
SCHEMA = {
    "claim": Field((str,), required=True, words=tuple(SAYS)),
    "network": TEXT,
    "part": TEXT,
    "scope": TEXT,
    "statistic": TEXT,
    "claimed": TEXT,
    "note": TEXT,
    "figure": TEXT,
    "value": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "effect": NUMBER,
    "n": COUNT,
    "units": COUNT,
    "verdict": Field((str,), required=True, words=VERDICTS),
    "main": Field((bool,), required=True),
}


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
    content = read_json(path, follow=True)
    again = "make it again with flatlens reproduce."
    if not isinstance(content, list):
        raise FlatlensError(f"{path} is not a table of claims; {again}")
    for number, row in enumerate(content, 1):
        try:
            checked(row, SCHEMA, f"Row {number} of {path}")
        except FlatlensError as error:
            reason = str(error).rstrip(".")
            raise FlatlensError(
                f"{reason}, so the file is not a table of claims; {again}"
            ) from None
    table = pd.DataFrame(content, columns=list(SCHEMA))
    numbers = [name for name, field in SCHEMA.items() if field is NUMBER]
    return table.assign(**{name: run_table.numbers(table, name) for name in numbers})
