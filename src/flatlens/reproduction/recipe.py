"""Read the recipes: what is trained, drawn and tested for each figure of the paper.

A recipe is one sweep that one or more figures share. The TOML files are in `recipes/`;
`recipes/mlp.toml` explains their tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.training.config import Config
from flatlens.training.grid import cells

ORDER = ("mlp", "lenet", "vgg", "d3")  # cheapest first
SCALES = ("smoke", "desk", "night", "paper")
ALONE = ("d3",)  # not part of "all"
# Figures that another figure replaces at a scale: at night scale Fig. 1 sees all images for long.
COVERED = {("d3", "night"): "fig1"}


@dataclass(frozen=True)
class Drawing:
    """One figure of a recipe, and the claims that it is about."""

    name: str
    title: str
    draw: str  # the kind of figure, a key of `drawing.KINDS`
    claims: list[str]
    by: str | None = None  # the setting that varies in the figure, for trends


@dataclass(frozen=True)
class Recipe:
    """One sweep at several scales."""

    name: str
    base: dict[str, Any]
    grid: list[dict[str, Any]]
    scales: dict[str, dict[str, Any]]
    figures: dict[str, Drawing] = field(default_factory=dict)

    def sweep(self, scale: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return base and grids as `sweep` takes them, all configurations of a seed in a row.

        Raises:
            FlatlensError: if the recipe does not have the scale.
        """
        if scale not in self.scales:
            raise FlatlensError(
                f"The recipe {self.name} has no scale {scale}; use {', '.join(self.scales)}."
            )
        settings = dict(self.scales[scale])
        seeds = settings.pop("seeds")
        followed = settings.pop("followed", seeds)
        own = settings.pop("grid", self.grid)  # a scale may have fewer configurations
        grids = [{"seed": [seed], **grid} for seed in range(followed) for grid in own]
        rest = {"measure": ["end"]}
        grids += [{**rest, "seed": [s], **grid} for s in range(followed, seeds) for grid in own]
        return self.base | settings, grids

    def configs(self, scale: str) -> list[Config]:
        """Return the config of every network of the sweep.

        >>> len(recipes()["vgg"].configs("paper"))
        100
        """
        return cells(*self.sweep(scale))


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in the order in which they are worth running."""
    return {name: read_recipe(name) for name in ORDER}


def read_recipe(name: str) -> Recipe:
    source = resources.files("flatlens.reproduction") / "recipes" / f"{name}.toml"
    content = tomllib.loads(source.read_text(encoding="utf-8"))
    figures = {key: Drawing(key, **table) for key, table in content["figures"].items()}
    scales = {scale: content[scale] for scale in SCALES if scale in content}
    return Recipe(name, content["base"], content["grid"], scales, figures)


def drawings(names: Sequence[str]) -> dict[str, list[Drawing]]:
    """Return the figures called `names` by recipe; "all" is every figure of the paper.

    >>> {recipe: [d.name for d in chosen] for recipe, chosen in drawings(["g7", "h8"]).items()}
    {'mlp': ['h8'], 'lenet': ['g7']}
    """
    every = {recipe.name: list(recipe.figures.values()) for recipe in recipes().values()}
    known = [d.name for figures in every.values() for d in figures]
    for name in names:
        if name not in (*known, "all"):
            raise FlatlensError(
                f"There is no figure {name!r} to reproduce; use {', '.join(known)} or all."
            )
    wanted = set(names) | (set(known) - set(ALONE) if "all" in names else set())
    chosen = {name: [d for d in figures if d.name in wanted] for name, figures in every.items()}
    return {name: figures for name, figures in chosen.items() if figures}
