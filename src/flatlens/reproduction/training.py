"""Train what recipes name, one sweep for each recipe."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from flatlens.reproduction.recipe import Recipe
from flatlens.reproduction.recipe_records import Frames, runs_folder
from flatlens.training.config import Config
from flatlens.training.samples import load_data
from flatlens.training.sweep import SweepError, sweep


def train_configs(
    configs: Sequence[Config], folder: Path, progress: bool | None, **engine: Any
) -> list[str]:
    """Train the networks of some configs that are not finished, one run folder for each.

    Args:
        configs: what to train.
        folder: folder of the runs.
        progress: show a progress bar; by default on a terminal only.
        engine: further arguments of `sweep`.

    Returns:
        A sentence that names the runs that failed; empty if none did.
    """
    grids = [{key: [value] for key, value in config.to_dict().items()} for config in configs]
    try:
        if grids:
            sweep({}, grids, out=folder, progress=progress, **engine)
    except SweepError as error:
        return [str(error)]
    return []


def train_recipes(
    recipes: Collection[Recipe],
    scale: str,
    place: Path,
    progress: bool | None,
    known: Frames | None = None,
    **engine: Any,
) -> list[str]:
    """Train the networks of recipes that are missing.

    Args:
        recipes: what to train.
        scale: scale of the recipes.
        place: folder in which the folder of the runs is made.
        progress: show a progress bar; by default on a terminal only.
        known: records of finished runs, which are not trained again.
        engine: further arguments of `sweep`.

    Returns:
        A sentence for each recipe of which some run failed.

    Raises:
        FlatlensError: if data are missing; nothing is trained then.
    """
    require_data(recipes, scale, known or {})
    problems = []
    for recipe in recipes:
        problems += train_recipe(recipe, scale, place, progress, known or {}, **engine)
    return problems


def require_data(recipes: Collection[Recipe], scale: str, known: Frames) -> None:
    """Load the data that the missing runs of recipes need, so that training never begins without.

    Raises:
        FlatlensError: if data are missing.
    """
    for recipe in recipes:
        for config in missing_configs(recipe, scale, known)[:1]:
            load_data(config)


def train_recipe(
    recipe: Recipe, scale: str, place: Path, progress: bool | None, known: Frames, **engine: Any
) -> list[str]:
    """Train the networks of one recipe that are missing.

    The arguments are those of `train_recipes`.

    Returns:
        A sentence that begins with the name of the recipe if some run failed; empty otherwise.
    """
    configs = missing_configs(recipe, scale, known)
    failures = train_configs(configs, runs_folder(recipe, place), progress, **engine)
    return [f"{recipe.name}: {failure}" for failure in failures]


def missing_configs(recipe: Recipe, scale: str, known: Frames) -> list[Config]:
    """Return the configs of a recipe whose runs are not among known records."""
    there = set(known[recipe.name]["run"]) if recipe.name in known else set()
    return [config for config in recipe.configs(scale) if config.name not in there]
