"""`flatlens reproduce interventions`: does flatness cause compression? Trained, drawn, judged.

Networks are trained to be flatter (SAM, ASAM, a penalty of S), to be less sensitive (a penalty of
df/dx), or with weight decay. They start from the same initial weights as plain SGD. Everything goes
to the folder `interventions` below `out`:

| file | what |
|---|---|
| `runs/RECIPE/...` | one folder for each network; the next call resumes them |
| `interventions_mlp.pdf`, `.png`, `..._equal_loss.*` | dose-response figures |
| `claims.md`, `claims.json` | I1 to I5 with intervals over seeds |
| `records.jsonl.gz` | all records in one file; everything above is redrawn from it |
| `provenance.json` | commands, versions, machine, wall time, number of networks |
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.analysis.intervention_claims import intervention_claims
from flatlens.errors import FlatlensError
from flatlens.figures.dose_response import dose_response
from flatlens.figures.style import save
from flatlens.reproduction import bookkeeping
from flatlens.reproduction.archive import write_records
from flatlens.reproduction.recipe import read_recipe
from flatlens.reproduction.recipe_records import (
    Frames,
    counts,
    frames_of_file,
    frames_of_runs,
    joined,
    known_frames,
)
from flatlens.reproduction.reproduce import RECORDS, Reproduction
from flatlens.reproduction.training import train_recipes

NAME = "interventions"
RECIPES = ("interventions_mlp", "interventions_vgg")
FIGURES = {"": "end", "_equal_loss": "equal loss"}


def interventions(
    *,
    out: Path | str,
    scale: str = "desk",
    train: bool = True,
    source: Path | str | None = None,
    known: Path | str | None = None,
    progress: bool | None = None,
    **engine: Any,
) -> Reproduction:
    """Train the arms that are missing, draw the dose-response figures and judge I1 to I5.

    Args:
        out: folder in which the folder `interventions` is made.
        scale: smoke or desk.
        train: whether to train; otherwise only existing records are drawn.
        source: a file of records to redraw from, without any training.
        known: a file of records of runs that are finished already and not trained again.
        progress: show a progress bar; by default on a terminal only.
        engine: further arguments of `sweep`.

    Returns:
        The files, the table of claims, and a sentence for each failure.

    Raises:
        FlatlensError: if there is no such scale, or data or records are missing.
    """
    place = Path(out) / NAME
    recipes = {name: read_recipe(name) for name in RECIPES}
    began, problems = time.perf_counter(), list[str]()
    if source is None:
        there = known_frames(known, scale, recipes)
        if train:
            problems += train_recipes(recipes.values(), scale, place, progress, there, **engine)
        frames = joined(frames_of_runs(place, scale, problems, recipes), there)
    else:
        frames = frames_of_file(Path(source), among=recipes)
    if not frames:
        raise FlatlensError(f"There are no records of {NAME} in {place}; train them first.")
    frames = {name: _without_nan(df) for name, df in frames.items()}
    files = _drawn(frames, place, problems)
    table = pd.concat(
        [intervention_claims(df).assign(figure=name) for name, df in frames.items()],
        ignore_index=True,
    )
    write_records(frames, place / RECORDS)
    files += [*bookkeeping.write_claims(table, "Interventions", place), place / RECORDS]
    if source is None:
        facts = {"networks": {name: counts(df) for name, df in frames.items()}}
        seconds = time.perf_counter() - began
        files.append(bookkeeping.note_call(place, scale, seconds, facts, known))
    else:
        files += bookkeeping.copy_provenance(Path(source), place)
    return Reproduction(files, table, problems)


def _without_nan(df: pd.DataFrame) -> pd.DataFrame:
    """Replace NaN by None where an arm has no radius or no penalty; pandas reads None as NaN."""
    settings = {name: df[name].astype(object) for name in ("rho", "penalty") if name in df}
    return df.assign(
        **{name: column.where(column.notna(), None) for name, column in settings.items()}
    )


def _drawn(frames: Frames, place: Path, problems: list[str]) -> list[Path]:
    """Draw the figures of every recipe; one that cannot be drawn is listed in ``problems``."""
    place.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for name, df in frames.items():
        for suffix, moment in FIGURES.items():
            try:
                files += save(dose_response(df, moment), place / f"{name}{suffix}").values()
            except FlatlensError as error:
                problems.append(f"{name}{suffix} is not drawn: {error}")
    return files
