"""Gradient checkpointing is switched off while a network is measured.

A checkpointed function runs without a graph, and again in each backward pass. The recorder cannot
see the second run, and a reentrant checkpoint has no graph before it. A plain call of the function
gives the same values and derivatives.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.utils.checkpoint

# The names in torch that decide how a checkpointed function runs.
# ``torch.utils.checkpoint.checkpoint`` looks them up when it is called, so replacing them also
# works for a copy of it under another name.
REENTRANT = "CheckpointFunction"
NOT_REENTRANT = "_checkpoint_without_reentrant_generator"
# This module imports the generator by name.
COMPOSABLE = "torch.distributed._composable.checkpoint_activation"


class _PlainCall:
    """A stand-in for ``CheckpointFunction`` that calls the function directly."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Call the function without checkpointing."""
        return function(*args)


def _plain_generator(
    function: Callable[..., Any], preserve_rng_state: bool, context_fn: Any, *_: Any, **__: Any
) -> Iterator[None]:
    """Stand in for torch's generator around a checkpointed function: keep its first context."""
    forward_context, _recompute_context = context_fn()
    with forward_context:
        yield


class _Switch:
    """Count the measurements in progress in all threads; switch at the first start and last end."""

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
        """Switch recomputation on again when the last measurement ends."""
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
