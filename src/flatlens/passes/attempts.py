"""Measure chunks with one wait each, until a chunk turns out to be unusual."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from flatlens.algebra import looks

T = TypeVar("T")


class Attempts:
    """Postpones the checks of a chunk to its end, on devices for which the host has to wait.

    Where a check fails, or digits need a slower way, the chunk is measured again and every check is
    read where it stands. So the numbers and the messages are those of that way. All later chunks
    take it at once.

    Attributes:
        postpone: whether the next chunk postpones its checks.
    """

    def __init__(self) -> None:
        self.postpone = False

    def begin(self, f: Tensor) -> None:
        """Decide by the device of the outputs."""
        self.postpone = not looks.can_look(f)

    def measure(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which can be done twice."""
        if self.postpone:
            chunk = self._usual(work)
            if chunk is not None:
                return chunk
            self.postpone = False
        return work()

    def _usual(self, work: Callable[[], T]) -> T | None:
        """Do the work with its checks at the end; None where one of them fails."""
        with looks.postponed() as questions:
            try:
                chunk = work()
            except Exception:
                if questions.some_yes():  # the failed check comes first
                    return None
                raise
        return None if questions.some_yes() else chunk
