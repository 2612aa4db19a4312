"""`flatlens reproduce fig3`: Figure 3 on vision transformers that we train, with both estimators.

Everything goes to the folder `fig3` below `out`:

| file | what |
|---|---|
| `runs/...` | one folder for each training; the next call resumes them |
| `measured/...`, `published/...` | one record for each model, on test images or photographs |
| `fig3.pdf`, `fig3.png` | true numbers and the paper's estimators side by side |
| `claims.md`, `claims.json` | V1 and V2 for both, with intervals over families |
| `records.jsonl.gz`, `provenance.json` | as for the other experiments |
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.figures import figure3 as drawing
from flatlens.figures.style import save
from flatlens.reproduction import bookkeeping
from flatlens.reproduction.archive import read_records, write_records
from flatlens.reproduction.figure3_claims import figure3_claims
from flatlens.reproduction.figure3_recipe import Figure3Recipe, figure3_recipe
from flatlens.reproduction.reproduce import RECORDS, Reproduction
from flatlens.reproduction.training import train_configs
from flatlens.runs import read_runs
from flatlens.training.samples import load_data
from flatlens.zoo.trained import measure_trained
from flatlens.zoo.zoo import Zoo, zoo

NAME = "fig3"
RECIPES = ("fig3",)
PUBLISHED = "deit_tiny_patch16_224"


def figure3(
    *,
    out: Path | str,
    scale: str = "desk",
    train: bool = True,
    source: Path | str | None = None,
    progress: bool | None = None,
    **engine: Any,
) -> Reproduction:
    """Train the models that are missing, measure them, draw Figure 3 and judge V1 and V2.

    DeiT-Tiny with its ImageNet weights is measured too if the folder that FLATLENS_DATA names has
    the folders `photos` and `weights`.

    Args:
        out: folder in which the folder `fig3` is made.
        scale: smoke or desk.
        train: whether to train and measure; otherwise only existing records are drawn.
        source: a file of records to redraw from.
        progress: show a progress bar; by default on a terminal only.
        engine: further arguments of `sweep`.

    Returns:
        The files, the table of claims, and a sentence for each failure.

    Raises:
        FlatlensError: if there is no such scale, data or records are missing, or no model comes to
            the accuracy that the recipe asks for.
    """
    place, began, problems = Path(out) / NAME, time.perf_counter(), list[str]()
    if source is None:
        recipe = figure3_recipe(scale)
        if train:
            _train(recipe, place, progress, engine, problems)
            _measure(recipe, place, problems)
            problems += _published(place, scale)
        df = _table(recipe, place)
    else:
        df = _redrawable(Path(source))
    used, left_out = drawing.require_models(df, float(df["needed_accuracy"].max()))
    problems += left_out
    files: list[Path] = []
    try:
        files += save(drawing.figure3(used), _made(place) / NAME).values()
    except FlatlensError as error:
        problems.append(f"{NAME} is not drawn: {error}")
    table = figure3_claims(used).assign(figure=NAME)
    write_records({NAME: df}, _made(place) / RECORDS)
    files += [*bookkeeping.write_claims(table, "Figure 3", place), place / RECORDS]
    if source is None:
        facts = {"networks": {NAME: {"measured": len(df)}}}
        seconds = time.perf_counter() - began
        files.append(bookkeeping.note_call(place, scale, seconds, facts))
    else:
        files += bookkeeping.copy_provenance(Path(source), place)
    return Reproduction(files, table, problems)


def _made(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place


def _train(
    recipe: Figure3Recipe, place: Path, progress: bool | None, engine: Any, problems: list[str]
) -> None:
    """Train every model; failures are listed at the end and do not stop other models."""
    load_data(recipe.configs[0])  # missing data is refused before any training
    problems += train_configs(recipe.configs, place / "runs", progress, **engine)


def _measure(recipe: Figure3Recipe, place: Path, problems: list[str]) -> None:
    """Measure every finished training on test images, with both estimators."""
    for model in recipe.models:
        name = model.config.name
        if not (place / "runs" / name / "done").exists():
            continue
        try:
            folder = place / "measured" / name
            measure_trained(place / "runs" / name, folder, recipe.images, paper=True)
        except FlatlensError as error:
            problems.append(f"{name} is not measured: {error}")


def _published(place: Path, scale: str) -> list[str]:
    """Measure DeiT-Tiny on photographs at desk scale; return sentences on what was left out."""
    if scale == "smoke":
        return []
    folder = Path(os.environ.get("FLATLENS_DATA", ""))
    photos, weights = folder / "photos", folder / "weights"
    if not photos.is_dir() or not weights.is_dir():
        return [f"{PUBLISHED} is left out: FLATLENS_DATA has no folders photos and weights."]
    try:
        settings = Zoo(str(photos), 100, str(weights), paper=True)
        skipped = zoo([PUBLISHED], settings, out=place / "published").attrs["skipped"]
    except FlatlensError as error:
        return [f"{PUBLISHED} is left out: {error}"]
    return [f"{name} is left out: {reason}" for name, reason in skipped.items()]


def _table(recipe: Figure3Recipe, place: Path) -> pd.DataFrame:
    """Return a table with one row for each measured model."""
    frames = []
    if any((place / "measured").glob("*/records.jsonl")):
        measured = read_runs(place / "measured")
        trainings = read_runs(place / "runs").groupby("run").tail(1).set_index("run")
        for model in recipe.models:
            mine = measured[measured["run"] == model.config.name]
            if len(mine):
                facts: dict[str, Any] = {
                    "kind": "trained", "class": model.family, "training": model.recipe,
                    "model": model.config.model, "needed_accuracy": recipe.accuracy,
                    "test_accuracy": trainings.loc[model.config.name, "test_accuracy"],
                }  # fmt: skip
                frames.append(mine.assign(**facts))
    if any((place / "published").rglob("records.jsonl")):
        frames.append(read_runs(place / "published").assign(kind="published", training="-"))
    if not frames:
        raise FlatlensError(f"There are no measured models in {place}; train them first.")
    return pd.concat(frames, ignore_index=True)


def _redrawable(source: Path) -> pd.DataFrame:
    frames = read_records(source)
    if NAME not in frames:
        raise FlatlensError(f"{source} has no records of {NAME}.")
    return frames[NAME]
