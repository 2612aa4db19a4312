"""The loop that submits tasks, waits for them and retries them."""

from __future__ import annotations

import re
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from flatlens.workers.engine import Engine
from flatlens.workers.outcome import Outcome

# (name of a task, number of its workers that died) -> (function, *arguments)
Call = Callable[[str, int], tuple[Any, ...]]


def run_tasks(
    names: Sequence[str], call: Call, engine: Engine, *, retries: int = 0, losses: int | None = None
) -> Iterator[tuple[str, Outcome]]:
    """Run every task and yield its name and outcome, in the order in which the tasks end.

    When a local worker dies, all running tasks are lost, and it is unknown which of them killed the
    worker. All of them therefore run again at the end, one at a time. Only the loss of a task that
    ran alone counts against it.

    Args:
        names: the tasks, in the order in which to start them.
        call: returns the function and its arguments for a task, given how many of its workers died.
        engine: where the tasks run.
        retries: how often a task with status "failed" is run again.
        losses: how often a task that runs alone may lose its worker. By default the engine's
            number.
    """
    allowed = engine.losses if losses is None else min(losses, engine.losses)
    failures, lost, lost_alone = Counter[str](), Counter[str](), Counter[str]()
    waiting, suspects = deque(names), deque[str]()
    running, together = dict[Any, str](), set[Any]()

    def start(name: str) -> None:
        running[engine.submit(*call(name, lost[name]))] = name
        if len(running) > 1:
            together.update(running)

    while waiting or suspects or running:
        while waiting and (engine.window is None or len(running) < engine.window):
            start(waiting.popleft())
        if not running:
            start(suspects.popleft())
        for future in engine.wait(list(running)):
            name, outcome = running.pop(future), _outcome(future)
            alone = future not in together
            together.discard(future)
            if outcome.status == "lost":
                lost[name] += 1
                lost_alone[name] += alone
                if engine.losses and lost_alone[name] <= allowed:
                    suspects.append(name)
                    continue
            if outcome.status == "failed" and failures[name] < retries:
                failures[name] += 1
                waiting.appendleft(name)
                continue
            yield name, outcome


def _outcome(future: Any) -> Outcome:
    """Return the outcome of a future; tasks catch exceptions, so an exception is a lost worker."""
    try:
        outcome: Outcome = future.result()
    except Exception as error:
        return Outcome("lost", traceback.format_exc() + _death(error))
    return outcome


def _death(error: Exception) -> str:
    """Describe why a worker died, or return "" if the error is about something else."""
    if isinstance(error, BrokenProcessPool):
        code = re.search(r"exit codes of the workers are {(.+)}", str(error))
        return f"\nIts worker process died{f', {code[1]}' if code else ''}."
    return "\nIts worker processes died." if type(error).__name__ == "KilledWorker" else ""
