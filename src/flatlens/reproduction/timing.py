"""Estimate how long experiments take on this machine, from a few steps of each kind of network."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatlens.training.config import Config, due_steps
from flatlens.training.train import train

STEPS = 50  # Number of training steps that are timed, shared by all kinds of networks.
FEWEST_STEPS = 10  # Number of steps that are timed of each kind at least.


def estimate(configs: Sequence[Config], workers: int) -> float:
    """Return the seconds that all runs take.

    Networks of one model whose steps do the same are timed once.
    """
    kinds: dict[str, list[Config]] = {}
    for config in configs:
        penalty = (config.penalty or "").split(":")[0]
        kind = f"{config.model} {config.model_options} {config.optimizer} {penalty}"
        kinds.setdefault(kind, []).append(config)
    steps = max(STEPS // len(kinds), FEWEST_STEPS)
    total = sum(_time_of_kind(alike, steps) for alike in kinds.values())
    return total / min(workers, len(configs))


def _time_of_kind(configs: Sequence[Config], steps: int) -> float:
    """Return the seconds of runs that are alike, from the cost of a start, a step and a record.

    The first config is timed for all of them, because differences in batch size even out.
    """
    config = replace(configs[0], measure="end")
    _seconds(replace(config, steps=1))  # warms up
    short = _seconds(replace(config, steps=1))
    record = max(_seconds(replace(config, steps=1, measure="every:1")) - short, 0.0)  # one more
    step = max(_seconds(replace(config, steps=1 + steps)) - short, 0.0) / steps
    start = max(short - record - step, 0.0)
    return sum(
        start + c.steps * step + len(due_steps(c.measure, c.steps)) * record for c in configs
    )


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
