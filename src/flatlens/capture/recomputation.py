"""Gradient checkpointing is switched off while a network is measured.

A checkpointed function runs without a graph, and once more in each backward pass. The second run
happens outside of the recorder, and a reentrant checkpoint has no graph to look at before it. A
plain call of the function has the same values and derivatives.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.utils.checkpoint

# Where torch decides how a checkpointed function runs. ``torch.utils.checkpoint.checkpoint`` reads
# the two names when it is called, so a copy of it under another name is served as well.
REENTRANT = "CheckpointFunction"
NOT_REENTRANT = "_checkpoint_without_reentrant_generator"
COMPOSABLE = "torch.distributed._composable.checkpoint_activation"  # has a name of its own


class _PlainCall:
    """Stands in for ``CheckpointFunction``: call the function at once."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run a function that would have been recomputed."""
        return function(*args)


def _plain_generator(
    function: Callable[..., Any], preserve_rng_state: bool, context_fn: Any, *_: Any, **__: Any
) -> Iterator[None]:
    """Stand in for torch's generator around a checkpointed function: keep its first context."""
    forward_context, _recompute_context = context_fn()
    with forward_context:
        yield


class _Switch:
    """Counts the measurements in progress, of all threads, and switches with the first and last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.measurements = 0
        self.replaced: list[tuple[ModuleType, str, Any]] = []

    def enter(self) -> None:
        """Switch recomputation off."""
        with self.lock:
            self.measurements += 1
            if self.measurements > 1:
                return
            self._replace(torch.utils.checkpoint, REENTRANT, _PlainCall)
            self._replace(torch.utils.checkpoint, NOT_REENTRANT, _plain_generator)
            if COMPOSABLE in sys.modules:
                self._replace(sys.modules[COMPOSABLE], NOT_REENTRANT, _plain_generator)

    def leave(self) -> None:
        """Switch recomputation on again with the end of the last measurement."""
        with self.lock:
            self.measurements -= 1
            if self.measurements == 0:
                for module, name, value in self.replaced:
                    setattr(module, name, value)
                self.replaced.clear()

    def _replace(self, module: ModuleType, name: str, stand_in: Any) -> None:
        if hasattr(module, name):
            self.replaced.append((module, name, getattr(module, name)))
            setattr(module, name, stand_in)


_SWITCH = _Switch()


@contextlib.contextmanager
def without_recomputation() -> Iterator[None]:
    """Call checkpointed functions as if they were not checkpointed."""
    _SWITCH.enter()
    try:
        yield
    finally:
        _SWITCH.leave()
