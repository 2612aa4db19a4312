"""When to measure. A schedule is a function of the step: ``lambda step: step in (10, 100)``.

One that takes three arguments is also given the scalars of this step and the records so far:
``lambda step, scalars, records: ...``. It should decide from these alone, as all of the ones here
do, and keep nothing of its own: then a training that was interrupted goes on as if it was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flatlens.errors import FlatlensError

Schedule = Callable[..., bool]


def every(k: int) -> Schedule:
    """Steps 0, k, 2k, ...

    >>> [step for step in range(500) if every(200)(step)]
    [0, 200, 400]
    """
    if not isinstance(k, int) or k < 1:
        raise FlatlensError(f"every({k}) has no steps; give a whole number, 1 or more")
    return lambda step: step % k == 0


def log_spaced(per_decade: int) -> Schedule:
    """Step 0, then ``per_decade`` steps from each power of ten to the next, evenly on a log axis.

    >>> [step for step in range(101) if log_spaced(3)(step)]
    [0, 1, 2, 5, 10, 22, 46, 100]
    """
    if not isinstance(per_decade, int) or per_decade < 1:
        raise FlatlensError(
            f"log_spaced({per_decade}) has no steps; give a whole number, 1 or more"
        )

    def due(step: int) -> bool:
        if step < 1:
            return step == 0
        k = round(per_decade * math.log10(step))
        return step in [round(10 ** (j / per_decade)) for j in (k - 1, k, k + 1)]

    return due


def at(steps: Iterable[int]) -> Schedule:
    """These steps.

    >>> [step for step in range(500) if at([3, 400])(step)]
    [3, 400]
    """
    return frozenset(steps).__contains__


def on_interpolation(threshold: float, scalar: str = "train_loss") -> Schedule:
    """Once, at the first step whose ``scalar`` is at most ``threshold``: the data are fitted.

    It reads the scalar at every step; if that is a tensor on a GPU, the CPU waits for it.

    >>> due = on_interpolation(0.1)
    >>> due(7, {"train_loss": 0.5}, []), due(8, {"train_loss": 0.05}, [])
    (False, True)
    """

    def due(step: int, scalars: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> bool:
        if scalar not in scalars:
            raise FlatlensError(
                f"on_interpolation looks at {scalar}, which the tracker is not given; call "
                f"tracker(step, {scalar}=...)"
            )
        if not bool(scalars[scalar] <= threshold):
            return False
        # a record may hold more than training gives: text, or nothing
        past = [record.get(scalar) for record in records]
        return not any(isinstance(v, (int, float)) and v <= threshold for v in past)

    return due
