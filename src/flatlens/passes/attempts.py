"""Measure each chunk with a single wait for the device, until a check fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from flatlens.algebra import looks

T = TypeVar("T")


class Attempts:
    """Postpone the checks of a chunk to its end, on devices for which the host has to wait.

    If a check fails, or digits need a slower way, the chunk is measured again and each check is
    read at once. Numbers and messages are therefore the same as without postponing. All later
    chunks read their checks at once.

    Attributes:
        postpone: whether the next chunk postpones its checks.
    """

    def __init__(self) -> None:
        self.postpone = False

    def begin(self, f: Tensor) -> None:
        """Postpone checks if the outputs are on a device."""
        self.postpone = not looks.can_look(f)

    def measure(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which may run twice."""
        if self.postpone:
            chunk = self._usual(work)
            if chunk is not None:
                return chunk
            self.postpone = False
        return work()

    def _usual(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` with its checks at the end; return None if one of them fails."""
        with looks.postponed() as questions:
            try:
                chunk = work()
            except Exception:
                if questions.some_yes():  # a failed check may have caused the error
                    return None
                raise
        return None if questions.some_yes() else chunk
