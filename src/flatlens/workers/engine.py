"""Engine: how the loop starts tasks and waits for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Engine:
    """A place where tasks run.

    Attributes:
        submit: starts ``function(*arguments)`` and returns a future.
        wait: blocks until at least one of the given futures is done and returns those that are.
        window: number of tasks to submit at a time; None if the scheduler has its own queue.
        losses: how often a task that ran alone is started again after its worker died; 0 if the
            scheduler does that itself.
    """

    submit: Callable[..., Any]
    wait: Callable[[list[Any]], list[Any]]
    window: int | None
    losses: int
