"""Draw the figures of a recipe, with the paper's definitions and with those of the authors' code.

A new kind of figure is one function and one line in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from flatlens.analysis import run_table
from flatlens.errors import FlatlensError
from flatlens.figures.correlations import QUANTITIES, correlations
from flatlens.figures.style import save
from flatlens.figures.tightness import tightness
from flatlens.figures.trends import trends
from flatlens.reproduction.claims import AUTHORS
from flatlens.reproduction.recipe import Drawing

Drawn = dict[str, Figure]  # by the suffix of the file's name: "" and "_authors"


def draw(drawing: Drawing, df: pd.DataFrame) -> Drawn:
    """Draw a figure from the finished runs of its recipe.

    Returns:
        The figure under "", and under "_authors" the same with the authors' definitions.
    """
    return KINDS[drawing.draw](drawing, run_table.finished(df))


def _draw_tightness(drawing: Drawing, df: pd.DataFrame) -> Drawn:
    return {"": tightness(run_table.followed(df))}


def _draw_trends(drawing: Drawing, df: pd.DataFrame) -> Drawn:
    assert drawing.by is not None
    df, volume = run_table.followed(df), AUTHORS["log_volume"]
    return {"": trends(df, drawing.by), "_authors": trends(df, drawing.by, volume=volume)}


def _draw_correlations(drawing: Drawing, df: pd.DataFrame) -> Drawn:
    return {"": correlations(df), "_authors": correlations(df, _authors_columns(df))}


KINDS: dict[str, Callable[[Drawing, pd.DataFrame], Drawn]] = {
    "tightness": _draw_tightness,
    "trends": _draw_trends,
    "correlations": _draw_correlations,
}


def _authors_columns(df: pd.DataFrame) -> list[str]:
    """Return the paper's nine quantities by the authors' definitions, as far as they are finite."""
    last = run_table.ends(run_table.prepared(df))
    return run_table.finite_columns(last, [AUTHORS.get(name, name) for name in QUANTITIES])


def draw_recipe(
    recipe: str, drawings: Sequence[Drawing], frames: Mapping[str, pd.DataFrame], out: Path
) -> tuple[list[Path], list[str]]:
    """Draw and save the figures of one recipe.

    Returns:
        The files, and one sentence for each figure that could not be drawn.
    """
    files: list[Path] = []
    problems = []
    for drawing in drawings:
        try:
            if recipe not in frames:
                raise FlatlensError(f"there are no records of the recipe {recipe}.")
            for suffix, figure in draw(drawing, frames[recipe]).items():
                files += save(figure, out / f"{drawing.name}{suffix}").values()
        except FlatlensError as error:
            problems.append(f"{drawing.name} is not drawn: {error}")
    return files, problems
