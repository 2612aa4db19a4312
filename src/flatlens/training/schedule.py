"""The measurement schedule of a training, decided step by step without a list of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

MOST_PER_DECADE = 1_000  # measurements from one power of ten to the next


@dataclass(frozen=True)
class MeasureSchedule:
    """The steps at which a training of `steps` steps is measured; the last step is one of them.

    Args:
        measure: every:STEPS, log:TIMES_A_DECADE, at:STEP,STEP or end.
        steps: number of steps of the training.

    >>> 400 in MeasureSchedule("every:200", 10**12)
    True
    >>> list(MeasureSchedule("log:2", 100))
    [0, 1, 3, 10, 32, 100]
    """

    measure: str
    steps: int

    def __contains__(self, step: int) -> bool:
        kind, _, rest = self.measure.partition(":")
        if not 0 <= step < self.steps:
            return step == self.steps
        if kind == "every":
            return step % int(rest) == 0
        if kind == "log":
            return _is_log_spaced(step, int(rest))
        return kind == "at" and step in self._listed

    def __iter__(self) -> Iterator[int]:
        kind, _, rest = self.measure.partition(":")
        if kind == "every":
            yield from range(0, self.steps, int(rest))
        elif kind == "log":
            yield from _log_spaced(self.steps, int(rest))
        elif kind == "at":
            yield from sorted(step for step in self._listed if step < self.steps)
        yield self.steps

    @cached_property
    def _listed(self) -> set[int]:
        return {int(word) for word in self.measure.partition(":")[2].split(",")}


def due_steps(measure: str, steps: int) -> list[int]:
    """Return all steps of a schedule as a list.

    >>> due_steps("every:200", 500)
    [0, 200, 400, 500]
    >>> due_steps("at:0,7,900", 100), due_steps("end", 100)
    ([0, 7, 100], [100])
    """
    return list(MeasureSchedule(measure, steps))


def _is_log_spaced(step: int, per_decade: int) -> bool:
    """Whether a step is 0 or a rounded power 10^(k / per_decade)."""
    if step == 0:
        return True
    nearest = round(per_decade * math.log10(step))
    return any(round(10 ** (k / per_decade)) == step for k in range(nearest - 1, nearest + 2))


def _log_spaced(steps: int, per_decade: int) -> Iterator[int]:
    yield 0
    last, exponent = 0, 0
    while (step := round(10 ** (exponent / per_decade))) < steps:
        if step > last:
            yield step
        last, exponent = step, exponent + 1
