"""The grid of a sweep: its configs, and how to read it from a TOML file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.training.config import Config, read_toml

Grid = Mapping[str, Any]
MOST_RUNS = 100_000  # runs of one sweep
FOLDER = 50e3  # bytes that even a tiny run writes: config, records, checkpoint


def cells(base: Config | Mapping[str, Any], grid: Grid | Sequence[Grid]) -> list[Config]:
    """List every config of a grid once; the last key changes fastest.

    Args:
        base: the settings that all runs share.
        grid: lists of values by field, all combined with each other; or several such grids.

    Returns:
        The configs in order, without repeats.

    Raises:
        FlatlensError: if a value is not a list, a setting is wrong, or there are too many runs.

    >>> [c.lr for c in cells(Config(), [{"lr": [0.1, 0.2]}, {"lr": [0.2, 0.3]}])]
    [0.1, 0.2, 0.3]
    >>> cells(Config(), {"model_options.activation": ["tanh"]})[0].model_options
    {'activation': 'tanh'}
    """
    start = base.to_dict() if isinstance(base, Config) else dict(base)
    grids = [dict(_axes(g)) for g in ([grid] if isinstance(grid, Mapping) else grid)]
    _check_size(sum(math.prod(len(values) for values in axes.values()) for axes in grids))
    configs: dict[str, Config] = {}
    for axes in grids:
        for values in itertools.product(*axes.values()):
            settings = dict(start)
            for key, value in zip(axes, values, strict=True):
                name, _, option = key.partition(".")
                inside = settings.get(name, {})
                if option and not isinstance(inside, Mapping):
                    raise FlatlensError(
                        f"The grid's {key} is an option of {name}, but {name} is {inside!r}."
                    )
                settings[name] = {**inside, option: value} if option else value
            config = Config.from_dict(settings, "the grid")
            configs.setdefault(config.name, config)
    return list(configs.values())


def _axes(grid: Grid, prefix: str = "") -> Iterator[tuple[str, Collection[Any]]]:
    """Yield the field and the values of each axis; a TOML table inside a grid has dotted names."""
    for key, values in grid.items():
        if isinstance(values, Mapping):
            yield from _axes(values, f"{prefix}{key}.")
        elif isinstance(values, str) or not isinstance(values, Collection) or not len(values):
            raise FlatlensError(f"The grid's {prefix}{key} is {values!r}, but it must be a list.")
        else:
            yield prefix + key, values


def _check_size(runs: int) -> None:
    """Raise for a grid with so many runs that even tiny ones would fill a disk."""
    if runs > MOST_RUNS:
        raise FlatlensError(
            f"The grid has {runs:,} runs, which would write at least {runs * FOLDER / 1e9:,.0f} "
            f"GB; a sweep takes at most {MOST_RUNS:,} runs."
        )


def read_sweep(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the tables [base] and [grid] (or several [[grid]]) of a TOML file."""
    content = read_toml(path)
    if unknown := sorted(content.keys() - {"base", "grid"}):
        raise FlatlensError(f"{path} has {unknown[0]!r} beside its tables [base] and [grid].")
    base, grid = content.get("base", {}), content.get("grid", {})
    grids = grid if isinstance(grid, list) else [grid]
    if not isinstance(base, dict) or not all(isinstance(table, dict) for table in grids):
        raise FlatlensError(f"In {path} base and grid must be tables: [base], [grid] or [[grid]].")
    return base, grids
