"""Collect the records of each recipe, from run folders or from a file of records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.reproduction.archive import read_records
from flatlens.reproduction.recipe import Recipe, recipes
from flatlens.runs import read_runs

Frames = dict[str, pd.DataFrame]  # the table of `read_runs` of each recipe


def runs_folder(recipe: Recipe, out: Path) -> Path:
    """Return the folder of the runs of a recipe."""
    return out / "runs" / recipe.name


def frames_of_runs(
    out: Path,
    scale: str,
    problems: list[str] | None = None,
    among: Mapping[str, Recipe] | None = None,
) -> Frames:
    """Read the records below `out` of every recipe that has some at this scale.

    Args:
        out: folder of the reproduction.
        scale: scale of the recipes; runs of other scales are ignored.
        problems: list to which a sentence is added for each run that cannot be read, once.
        among: the recipes by name, by default those of the paper's figures.
    """
    frames = {}
    damaged: list[str] = []
    for recipe in (among or recipes()).values():
        begun = any(runs_folder(recipe, out).glob("*/records.jsonl"))
        if not begun or scale not in recipe.scales:
            continue
        frame = read_runs(runs_folder(recipe, out), damaged=damaged)
        if "run" not in frame:  # no readable run
            continue
        frame = frame[frame["run"].isin([config.name for config in recipe.configs(scale)])]
        if len(frame):
            frames[recipe.name] = frame.reset_index(drop=True)
    if problems is not None:
        problems += [text for text in damaged if not any(text in old for old in problems)]
    return frames


def frames_of_file(
    source: Path, scale: str | None = None, among: Mapping[str, Recipe] | None = None
) -> Frames:
    """Read a file of records, and check that its recipes are known.

    Args:
        source: a `records.jsonl.gz`.
        scale: refuse records of another scale.
        among: the recipes by name, by default those of the paper's figures.

    Raises:
        FlatlensError: if the file is damaged, or has records of an unknown recipe or another scale.
    """
    frames, known = read_records(source), among or recipes()
    for name, df in frames.items():
        if name not in known:
            raise FlatlensError(
                f"{source} has records of the recipe {name!r}; those known are {', '.join(known)}."
            )
        if scale is not None:
            _require_scale(df, known[name], scale, source)
    return frames


def known_frames(
    source: Path | str | None, scale: str, among: Mapping[str, Recipe] | None = None
) -> Frames:
    """Read the finished runs of a file of records; no file has none.

    Args:
        source: a `records.jsonl.gz`.
        scale: refuse records of another scale.
        among: the recipes by name, by default those of the paper's figures.

    Raises:
        FlatlensError: if the file is damaged, or has records of an unknown recipe or another scale.
    """
    if source is None:
        return {}
    finished = {}
    for name, df in frames_of_file(Path(source), scale, among).items():
        last = df.groupby("run")["step"].transform("max")
        finished[name] = df[last >= df["steps"]].reset_index(drop=True)
    return finished


def joined(frames: Frames, known: Frames) -> Frames:
    """Add the known runs that are not among the runs of a folder; these come first."""
    result = {}
    for name in {**known, **frames}:
        tables = [table[name] for table in (known, frames) if name in table]
        if len(tables) == 2:
            old, new = tables
            tables = [old[~old["run"].isin(set(new["run"]))], new]
        tables = [table for table in tables if len(table)]
        if tables:
            result[name] = pd.concat(tables, ignore_index=True)
    return result


def _require_scale(df: pd.DataFrame, recipe: Recipe, scale: str, source: Path) -> None:
    expected = recipe.sweep(scale)[0]["steps"]  # refuses a scale that the recipe does not have
    steps = sorted(set(df["steps"].tolist()) - {expected})
    if steps:
        raise FlatlensError(
            f"{source} has runs of {recipe.name} with {steps[0]:,.0f} steps; at scale {scale} they "
            f"have {expected:,}."
        )


def counts(df: pd.DataFrame) -> dict[str, int]:
    """Return the number of runs, of finished runs and of records."""
    last = df.groupby("run").tail(1)
    return {
        "runs": len(last),
        "finished": int((last["step"] >= last["steps"]).sum()),
        "records": len(df),
    }
