"""Choose an engine by its name, and the number of its workers."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from flatlens.errors import FlatlensError
from flatlens.workers.dask import dask_engine
from flatlens.workers.engine import Engine
from flatlens.workers.local import local_engine

WORKER_MEMORY = 200e6  # bytes of an idle worker that has imported torch


@contextlib.contextmanager
def open_engine(
    name: str,
    *,
    tasks: int,
    threads: int = 1,
    workers: int | None = None,
    address: str | None = None,
    resources: Mapping[str, int | float] | None = None,
) -> Iterator[Engine]:
    """Start the workers for some tasks, and stop them if the block raises.

    Args:
        name: "local" or "dask".
        tasks: number of tasks; more workers than tasks are not started.
        threads: CPU threads of each task.
        workers: number of worker processes. By default as many as the cores allow.
        address: address of a running Dask scheduler. By default one is started.
        resources: resources that each task takes of a Dask worker, such as ``{"GPU": 1}``.

    Raises:
        FlatlensError: if an argument is wrong or the engine is not installed.
    """
    if workers is not None and workers < 1:
        raise FlatlensError(f"A sweep needs at least one worker, not {workers}.")
    if name not in ("local", "dask"):
        raise FlatlensError(f"Unknown engine {name!r}; use local or dask.")
    if name == "local" and (address or resources):
        raise FlatlensError("An address and resources belong to the engine dask.")
    count = min(workers or max(1, cores() // threads), tasks)
    if address is None:
        _check_memory(count)
    engine = local_engine(count) if name == "local" else dask_engine(count, address, resources)
    with engine as opened:
        yield opened


def cores() -> int:
    """Return the number of CPU cores that this process may use.

    A container may be limited to fewer cores than it lists.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        share = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup, or no limit ("max")
        return count or 1
    return max(1, min(count or 1, share))


def _check_memory(workers: int) -> None:
    """Raise if the workers need more memory than this machine has."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows, or an unknown system
        return
    if workers > max(1, memory // WORKER_MEMORY):
        raise FlatlensError(
            f"{workers:,} workers need about {workers * WORKER_MEMORY / 1e9:,.0f} GB of memory, "
            f"but this machine has {memory / 1e9:,.0f} GB; use fewer workers."
        )
