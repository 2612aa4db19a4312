"""Reproduce the paper's figures and claims: train what is missing, draw, judge, keep the records.

A folder then holds:

| file                         | content                                                          |
|------------------------------|------------------------------------------------------------------|
| `runs/RECIPE/...`            | one folder per network, resumed by the next call                 |
| `fig1.pdf`, `fig1.png`, ...  | the figures asked for; `fig1_authors.*` with the definitions of  |
|                              | the authors' code where these differ from the paper's            |
| `claims.md`, `claims.json`   | a verdict on each claim, for each figure that has records        |
| `summary.md`                 | quantities at the end of training, by configuration              |
| `records.jsonl.gz`           | all records in one file, from which all of the above is redrawn  |
| `provenance.json`            | commands, versions, machine, wall time, networks                 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.reproduction.archive import write_records
from flatlens.reproduction.call_log import logged_call
from flatlens.reproduction.drawing import draw_recipe
from flatlens.reproduction.end_summary import write_summary
from flatlens.reproduction.judgement import judged, overview, write_claims
from flatlens.reproduction.recipe import COVERED, drawings, recipes
from flatlens.reproduction.recipe_records import (
    Frames,
    frames_of_file,
    frames_of_runs,
    joined,
    known_frames,
)
from flatlens.reproduction.training import require_data, train_recipe

__all__ = ["Reproduction", "overview", "reproduce"]
RECORDS = "records.jsonl.gz"


@dataclass(frozen=True)
class Reproduction:
    """The files written, the table of claims, and a sentence for each thing that failed."""

    files: list[Path]
    claims: pd.DataFrame
    problems: list[str]


def reproduce(
    names: Sequence[str],
    *,
    out: Path | str,
    scale: str | None = None,
    train: bool = True,
    source: Path | str | None = None,
    known: Path | str | None = None,
    progress: bool | None = None,
    **engine: Any,
) -> Reproduction:
    """Train what the figures need, draw them and judge the claims.

    Runs that fail do not stop the others: they are listed at the end. Figures are drawn as soon as
    their recipe is trained.

    Args:
        names: figures, or "all". With `source`, no names mean all figures that it has records of.
        out: folder of the results.
        scale: scale of the recipes, by default "desk". With `source`, refuse records of another
            scale.
        train: if False, draw only what is there.
        source: file of records to draw from, without training.
        known: file of records of runs that are finished already. They are drawn with the others
            and not trained again.
        progress: show a progress bar; by default on a terminal.
        engine: further arguments of `sweep`.

    Returns:
        The files, the table of claims and the problems.

    Raises:
        FlatlensError: if a name is unknown, data are missing, or `source` is damaged.
    """
    out, every = Path(out), recipes()
    frames: Frames = {} if source is None else frames_of_file(Path(source), scale)
    scale = scale or "desk"
    if not names:
        names = [name for recipe in frames for name in every[recipe].figures]
    wanted = drawings([COVERED.get((name, scale), name) for name in names])
    there = known_frames(known, scale)
    train = train and source is None
    if train:
        require_data([every[name] for name in wanted], scale, there)
    files: list[Path] = []
    problems: list[str] = []
    with logged_call(out, scale, source, problems, (there, known)):
        for name, figures in wanted.items():
            if train:
                problems += train_recipe(every[name], scale, out, progress, there, **engine)
            if source is None:
                frames = joined(frames_of_runs(out, scale, problems), there)
            drawn, reasons = draw_recipe(name, figures, frames, out)
            files += drawn
            problems += reasons
        table = judged(frames)
        if frames:
            write_records(frames, out / RECORDS)
            files += [*write_claims(table, frames, out), write_summary(frames, out), out / RECORDS]
    return Reproduction(files, table, problems)
