"""Estimate how long a sweep takes on this machine, from a few steps of its first network."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatlens.errors import FlatlensError
from flatlens.reproduction.recipe import recipes
from flatlens.training.config import Config, due_steps
from flatlens.training.train import train
from flatlens.workers.engines import cores

STEPS = 50  # Number of training steps that are timed.


def listing(scale: str, workers: int | None = None) -> list[list[str]]:
    """Return a table of the recipes at a scale, with the time that each takes."""
    workers = workers or cores()
    lines = [["recipe", "figures", "networks", "steps", "records", f"time, {workers} workers"]]
    for recipe in recipes().values():
        if scale not in recipe.scales:
            continue
        configs = recipe.configs(scale)
        due = sum(len(due_steps(c.measure, c.steps)) for c in configs)
        try:
            needed = duration(estimate(configs, workers))
        except FlatlensError:  # no data here
            needed = f"no {configs[0].data}"
        figures = ", ".join(recipe.figures)
        lines.append(
            [recipe.name, figures, f"{len(configs)}", f"{configs[0].steps:,}", f"{due:,}", needed]
        )
    return lines


def estimate(configs: Sequence[Config], workers: int) -> float:
    """Return the seconds that all runs take, from the cost of a start, a step and a record.

    The first config is timed for all of them, because differences in batch size even out.
    """
    config = replace(configs[0], measure="end")
    _seconds(replace(config, steps=1))  # warms up
    short = _seconds(replace(config, steps=1))
    record = max(_seconds(replace(config, steps=1, measure="every:1")) - short, 0.0)  # one more
    step = max(_seconds(replace(config, steps=1 + STEPS)) - short, 0.0) / STEPS
    start = max(short - record - step, 0.0)
    total = sum(
        start + c.steps * step + len(due_steps(c.measure, c.steps)) * record for c in configs
    )
    return total / min(workers, len(configs))


def _seconds(config: Config) -> float:
    """Return how long one training takes."""
    with tempfile.TemporaryDirectory() as folder:
        before = time.perf_counter()
        train(config, Path(folder) / "run", progress=False)
        return time.perf_counter() - before


def duration(seconds: int | float) -> str:
    """Write a time with a readable unit.

    >>> duration(42), duration(3_000), duration(11_000), duration(500_000)
    ('42 s', '50 min', '3.1 h', '5.8 days')
    """
    for size, unit in ((86_400, "days"), (3_600, "h")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
