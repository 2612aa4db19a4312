"""Schedules say when to measure. A schedule is a function of the step, such as ``every(200)``.

Any function works: ``lambda step: step in (10, 100)``. A function of three arguments also gets the
scalars of this step and the records so far: ``lambda step, scalars, records: ...``. It should
decide from these alone, as all schedules here do, and store nothing itself: then an interrupted
training goes on as if it had not been interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flatlens.arguments import no_type_check, real_number, short_repr
from flatlens.errors import FlatlensError

Schedule = Callable[..., bool]


@no_type_check
def every(k: int) -> Schedule:
    """Measure at steps 0, k, 2k, ...

    Args:
        k: steps between two measurements.

    Returns:
        The schedule.

    Raises:
        FlatlensError: if k is not a whole number of at least 1.

    Example:
        >>> [step for step in range(500) if every(200)(step)]
        [0, 200, 400]
    """
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise FlatlensError(f"every({k!r}) has no steps; give k as a whole number, 1 or more")
    return lambda step: step % k == 0


@no_type_check
def log_spaced(per_decade: int) -> Schedule:
    """Measure at step 0, then evenly on a logarithmic axis.

    Args:
        per_decade: number of measurements from each power of ten to the next.

    Returns:
        The schedule.

    Raises:
        FlatlensError: if ``per_decade`` is not a whole number of at least 1.

    Example:
        >>> [step for step in range(101) if log_spaced(3)(step)]
        [0, 1, 2, 5, 10, 22, 46, 100]
    """
    if not isinstance(per_decade, int) or isinstance(per_decade, bool) or per_decade < 1:
        raise FlatlensError(
            f"log_spaced({per_decade!r}) has no steps; give per_decade as a whole number, 1 or more"
        )

    def due(step: int) -> bool:
        if step < 1:
            return step == 0
        k = round(per_decade * math.log10(step))
        return step in [round(10 ** (j / per_decade)) for j in (k - 1, k, k + 1)]

    return due


@no_type_check
def at(steps: Iterable[int]) -> Schedule:
    """Measure at the given steps.

    Args:
        steps: whole numbers. A ``range`` is not expanded, so it may be long.

    Returns:
        The schedule.

    Raises:
        FlatlensError: if ``steps`` is not an iterable of whole numbers.

    Example:
        >>> [step for step in range(500) if at([3, 400])(step)]
        [3, 400]
    """
    if isinstance(steps, range):
        return steps.__contains__
    try:
        chosen = frozenset(steps)
        valid = all(isinstance(step, int) and not isinstance(step, bool) for step in chosen)
    except TypeError:
        valid = False
    if not valid:
        raise FlatlensError(f"steps={short_repr(steps)} is not a list of steps; give at([10, 100])")
    return chosen.__contains__


@no_type_check
def on_interpolation(threshold: float, scalar: str = "train_loss") -> Schedule:
    """Measure once, at the first step whose ``scalar`` is at most ``threshold``.

    The schedule reads the scalar at every step; if that is a tensor on a GPU, the CPU waits for it.

    Args:
        threshold: the data count as fitted from this value on.
        scalar: name of a scalar that the tracker is called with.

    Returns:
        The schedule.

    Raises:
        FlatlensError: if an argument has the wrong type, or at a step without the scalar.

    Example:
        >>> due = on_interpolation(0.1)
        >>> due(7, {"train_loss": 0.5}, []), due(8, {"train_loss": 0.05}, [])
        (False, True)
    """
    limit = real_number("threshold", threshold)
    if not isinstance(scalar, str):
        raise FlatlensError(f"scalar={scalar!r} is not the name of a scalar")

    def due(step: int, scalars: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> bool:
        if scalar not in scalars:
            raise FlatlensError(
                f"on_interpolation looks at {scalar}, which the tracker is not given; call "
                f"tracker(step, {scalar}=...)"
            )
        if not bool(scalars[scalar] <= limit):
            return False
        # A record may hold more than training gives: text, or nothing.
        past = [record.get(scalar) for record in records]
        return not any(isinstance(v, (int, float)) and v <= limit for v in past)

    return due
