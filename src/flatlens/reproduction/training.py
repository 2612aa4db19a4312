"""Train what recipes name, one sweep for each recipe."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from flatlens.reproduction.recipe import Recipe
from flatlens.training.samples import load_data
from flatlens.training.sweep import SweepError, sweep


def runs_of(place: Path, recipe: Recipe) -> Path:
    """Return the folder of the runs of a recipe."""
    return place / "runs" / recipe.name


def train_recipes(
    recipes: Collection[Recipe], scale: str, place: Path, progress: bool | None, **engine: Any
) -> list[str]:
    """Train the networks of recipes that are missing.

    Args:
        recipes: what to train.
        scale: scale of the recipes.
        place: folder in which the folder of the runs is made.
        progress: show a progress bar; by default if a person looks at it.
        engine: further arguments of `sweep`.

    Returns:
        A sentence for each recipe of which some run failed.

    Raises:
        FlatlensError: if data are missing; nothing is trained then.
    """
    problems = []
    for recipe in recipes:
        load_data(recipe.configs(scale)[0])  # missing data is refused before any training
    for recipe in recipes:
        try:
            base, grids = recipe.sweep(scale)
            sweep(base, grids, out=runs_of(place, recipe), progress=progress, **engine)
        except SweepError as error:
            problems.append(f"{recipe.name}: {error}")
    return problems
