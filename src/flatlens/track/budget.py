"""The time that measuring may take, and what to leave out when it takes more."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from flatlens.measurement.quantities import Request
from flatlens.track.quantities import one_pass
from flatlens.track.samples import PART

FEWEST = 10  # samples that are enough for a standard error


@dataclass(frozen=True)
class Level:
    """One way to measure: its quantities, its samples, and what it leaves out."""

    request: Request
    is_part: bool = False
    gives_up: str = ""


def levels(request: Request, samples: int | None) -> list[Level]:
    """List the ways to measure, from expensive to cheap.

    A sketch is not among them, because for ten outputs it costs more than the exact pass.

    Args:
        request: what the user asked for.
        samples: number of samples, or None where no time limit is set.

    Returns:
        The full measurement, then one without the quantities that need passes of their own, then
        one on a part of the samples where there are enough.

    Example:
        >>> from flatlens.measurement.quantities import read_request
        >>> [level.gives_up for level in levels(read_request("all"), 40)]
        ['', 'fewer quantities', 'fewer samples']
    """
    reduced = one_pass(request)
    choices = [Level(request)]
    if reduced != request:
        choices.append(Level(reduced, gives_up="fewer quantities"))
    if samples is not None and samples >= PART * FEWEST:
        choices.append(Level(reduced, is_part=True, gives_up="fewer samples"))
    return choices


class TimeBudget:
    """Choose the most complete measurement that fits a share of the elapsed time.

    Args:
        share: share of the time since the last measurement that the next one may take, or None.
        choices: the ways to measure, from expensive to cheap.

    Example:
        >>> from flatlens.measurement.quantities import read_request
        >>> budget = TimeBudget(0.1, levels(read_request("nmls"), None))
        >>> budget.record(0, start=0.0, end=1.0)
        >>> budget.choose(now=2.0), budget.choose(now=12.0)
        (None, 0)
    """

    def __init__(self, share: float | None, choices: list[Level]) -> None:
        self.share, self.levels = share, choices
        self.ended = 0.0  # when the last measurement ended
        self.spent: dict[int, float] = {}  # seconds of the last measurement of each level

    def choose(self, now: float) -> int | None:
        """Return the index of the first level that the time allows, or None."""
        if self.share is None or not self.spent:
            return 0
        allowed = self.share * (now - self.ended)
        return next((k for k in range(len(self.levels)) if self._expected(k) <= allowed), None)

    def record(self, level: int, start: float, end: float) -> None:
        """Record how long a measurement took."""
        self.ended = end
        self.spent[level] = end - start

    def _expected(self, level: int) -> float:
        """Estimate the seconds of a level: its last time, or four times that of a part.

        The time of the first measurement includes warm-up, so a later part corrects it.
        """
        seconds = self.spent.get(level, 0.0)
        last = len(self.levels) - 1
        if self.levels[level].request == self.levels[last].request and last in self.spent:
            return min(seconds, PART * self.spent[last])
        return seconds


def now(device: torch.device) -> float:
    """Read the clock after the device has done all queued work.

    >>> now(torch.device("cpu")) <= now(torch.device("cpu"))
    True
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
