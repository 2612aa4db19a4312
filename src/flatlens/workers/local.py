"""The engine "local": long-lived processes of this machine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.workers.engine import Engine
from flatlens.workers.lifetime import prepare_worker, start_tracker, stopping_on_signals

LOSSES = 3  # restarts of a task that ran alone when its worker died; Dask allows as many
IDLE = 60  # seconds after which idle workers end


@contextlib.contextmanager
def local_engine(workers: int) -> Iterator[Engine]:
    """Start worker processes. They stay for the next sweep, because importing torch is slow."""
    try:
        from loky import get_reusable_executor  # type: ignore[import-untyped]
        from loky.backend.resource_tracker import ensure_running  # type: ignore[import-untyped]
    except ImportError as error:
        raise FlatlensError(
            "The engine local needs the package loky: pip install 'flatlens[sweep]'."
        ) from error

    def executor() -> Any:
        """Return the pool, or a new one if a worker was killed, which breaks the old pool."""
        return get_reusable_executor(
            max_workers=workers, timeout=IDLE, initializer=prepare_worker, initargs=(os.getpid(),)
        )

    def submit(*task: Any) -> Any:
        return executor().submit(*task)

    def wait(futures: list[Any]) -> list[Any]:
        return list(concurrent.futures.wait(futures, return_when="FIRST_COMPLETED").done)

    start_tracker(ensure_running)
    with stopping_on_signals():
        try:
            yield Engine(submit, wait, workers, LOSSES)
        except BaseException:  # runs may be killed at any moment
            executor().shutdown(wait=True, kill_workers=True)
            raise
