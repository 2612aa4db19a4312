"""`flatlens reproduce panel`: when does which kind of compression happen, and what bounds it?

The paper's MLP and VGG are trained with snapshots. Curvature, local and global quantities of every
snapshot are drawn side by side. Everything goes to the folder `panel` below `out`:

| file | what |
|---|---|
| `runs/RECIPE/...` | one folder for each network; the next call resumes them |
| `panel_mlp.pdf`, `.png`, `panel_vgg.*` | the figures |
| `records.jsonl.gz` | all records in one file; the figures are redrawn from it |
| `provenance.json` | commands, versions, machine, wall time, number of networks |
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.figures.panel import panel as draw_panel
from flatlens.figures.style import save
from flatlens.reproduction import bookkeeping
from flatlens.reproduction.archive import read_records, write_records
from flatlens.reproduction.recipe import Recipe, read_recipe
from flatlens.reproduction.recipe_records import Frames, counts, frames_of_runs, runs_folder
from flatlens.reproduction.reproduce import RECORDS, Reproduction
from flatlens.reproduction.training import train_recipes
from flatlens.training.snapshot_panel import snapshot_panel

NAME = "panel"
RECIPES = ("panel_mlp", "panel_vgg")


def panel(
    *,
    out: Path | str,
    scale: str = "desk",
    train: bool = True,
    source: Path | str | None = None,
    progress: bool | None = None,
    **engine: Any,
) -> Reproduction:
    """Train the networks that are missing, measure their snapshots and draw the panel.

    Args:
        out: folder in which the folder `panel` is made.
        scale: smoke or desk.
        train: whether to train; otherwise only existing records are drawn.
        source: a file of records to redraw from, without any training.
        progress: show a progress bar; by default on a terminal only.
        engine: further arguments of `sweep`.

    Returns:
        The files, an empty table of claims (the paper makes none about these), and the problems.

    Raises:
        FlatlensError: if there is no such scale, or data or records are missing.
    """
    place, began, problems = Path(out) / NAME, time.perf_counter(), list[str]()
    if source is None:
        recipes = {name: read_recipe(name) for name in RECIPES}
        if train:
            problems += train_recipes(recipes.values(), scale, place, progress, **engine)
        frames = _frames(place, recipes, scale, problems)
    else:
        frames = {k: df for k, df in read_records(Path(source)).items() if k in RECIPES}
    if not frames:
        raise FlatlensError(f"There are no records of {NAME} in {source or place}.")
    place.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for name, df in frames.items():
        try:
            files += save(draw_panel(df), place / name).values()
        except FlatlensError as error:
            problems.append(f"{name} is not drawn: {error}")
    write_records(frames, place / RECORDS)
    files.append(place / RECORDS)
    if source is None:
        facts = {name: counts(df) for name, df in frames.items()}
        seconds = time.perf_counter() - began
        files.append(bookkeeping.note_call(place, scale, seconds, {"networks": facts}))
    else:
        files += bookkeeping.copy_provenance(Path(source), place)
    return Reproduction(files, pd.DataFrame(), problems)


def _frames(place: Path, recipes: dict[str, Recipe], scale: str, problems: list[str]) -> Frames:
    """Return the records of every recipe at this scale, with the quantities of their snapshots."""
    frames: Frames = {}
    for name, df in frames_of_runs(place, scale, problems, recipes).items():
        tables = []
        for run in df["run"].unique():
            try:
                records = snapshot_panel(runs_folder(recipes[name], place) / str(run))
            except FlatlensError as error:
                problems.append(str(error))
                continue
            tables.append(pd.DataFrame(records).assign(run=run))
        if tables:
            frames[name] = df.merge(pd.concat(tables), on=["run", "step"]).reset_index(drop=True)
    return frames
