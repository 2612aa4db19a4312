"""Questions about the values of tensors, postponed where reading them would make the host wait.

On a device every read of a value makes the host wait. Most reads ask whether something unusual
happened: a value that is not finite, squares that leave float32, digits that cancel. Inside
:func:`postponed` such a question is not read. It is noted, and the code goes on as if the answer
were no. At the end all questions are read at once. If the answer to one of them is yes, the work is
done again without postponing, so that each question is read where it is asked.

>>> with postponed() as questions:
...     answer = unusual(torch.tensor(True))
>>> answer, questions.some_yes()
(False, True)
>>> unusual(torch.tensor(True))
True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool
from torch import Tensor


class Questions:
    """Questions whose answers are not read yet.

    Attributes:
        flags: one truth value for each question, on the device where it was computed.
    """

    def __init__(self) -> None:
        self.flags: list[Tensor] = []

    def some_yes(self) -> bool:
        """Whether the answer to some question is yes. The host waits once for all of them."""
        if not self.flags:
            return False
        device = self.flags[-1].device
        return bool(torch.stack([flag.to(device) for flag in self.flags]).any())


_postponed: ContextVar[Questions | None] = ContextVar("postponed", default=None)


@contextmanager
def postponed() -> Iterator[Questions]:
    """Note the questions of the block instead of reading them."""
    questions = Questions()
    token = _postponed.set(questions)
    try:
        yield questions
    finally:
        _postponed.reset(token)


def unusual(flag: Bool[Tensor, ""]) -> bool:
    """Return whether something unusual happened, or False while questions are postponed."""
    questions = _postponed.get()
    if questions is None:
        return bool(flag)
    questions.flags.append(flag)
    return False


def can_look(t: Tensor) -> bool:
    """Whether the host can read numbers of a tensor without waiting for a device."""
    return t.device.type == "cpu"
