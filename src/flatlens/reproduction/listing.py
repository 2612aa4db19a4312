"""List what `flatlens reproduce` can train at a scale, and how long each part takes here."""

from __future__ import annotations

from collections.abc import Sequence

from flatlens.errors import FlatlensError
from flatlens.reproduction import interventions, panel
from flatlens.reproduction.figure3_recipe import figure3_recipe, figure3_scales
from flatlens.reproduction.recipe import read_recipe, recipes
from flatlens.reproduction.timing import duration, estimate
from flatlens.training.config import Config, due_steps
from flatlens.workers.engines import cores


def listing(scale: str, workers: int | None = None) -> list[list[str]]:
    """Return a table of what can be trained at a scale, with the time that each part takes."""
    workers = workers or cores()
    lines = [["recipe", "for", "networks", "steps", "records", f"time, {workers} workers"]]
    for recipe in [
        *recipes().values(),
        *map(read_recipe, (*interventions.RECIPES, *panel.RECIPES)),
    ]:
        if scale in recipe.scales:
            drawn = ", ".join(recipe.figures) or recipe.name.split("_")[0]
            lines.append(_line(recipe.name, drawn, recipe.configs(scale), workers))
    if scale in figure3_scales():
        lines.append(_line("fig3", "fig3", figure3_recipe(scale).configs, workers))
    return lines


def _line(name: str, drawn: str, configs: Sequence[Config], workers: int) -> list[str]:
    due = sum(len(due_steps(c.measure, c.steps)) for c in configs)
    try:
        needed = duration(estimate(configs, workers))
    except FlatlensError:  # no data here
        needed = f"no {configs[0].data}"
    steps = sorted({c.steps for c in configs})
    between = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    return [name, drawn, f"{len(configs)}", between, f"{due:,}", needed]
