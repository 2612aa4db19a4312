"""The result of testing one claim of the paper, and the rule that turns an interval into a verdict.

A claim says that a number lies above (or below) a bar, which is 0 unless stated. It is *supported*
if the whole 95 % interval does. It is *not supported* if the whole interval lies on the other side
of the bar, or within a margin of the bar that nobody would call an effect. Otherwise it is
*inconclusive*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flatlens.analysis.statistics import Interval

# Distinct from `flatlens.inequalities`, whose verdicts say whether an inequality is proven.
ClaimVerdict = Literal["supported", "not supported", "inconclusive"]


@dataclass(frozen=True)
class Result:
    """One part of a claim for one network: one row of the table of claims."""

    claim: str
    network: str  # model and data
    part: str
    scope: str
    statistic: str
    claimed: str  # where the value lies if the claim is right
    value: float
    low: float
    high: float
    effect: float
    n: int  # number of runs
    units: int  # number of independent units: seeds if configurations share them, else runs
    verdict: ClaimVerdict
    main: bool  # whether the part counts for the verdict on the claim
    note: str


def judge(
    interval: Interval, *, sign: int = 1, bar: float = 0.0, margin: float = 0.0
) -> ClaimVerdict:
    """Judge the claim that `sign * value` is above `bar`.

    Args:
        interval: the number with its 95 % interval.
        sign: 1 if the claim says "above", -1 if it says "below".
        bar: the number that `sign * value` is compared with.
        margin: an interval that ends below `bar + margin` is too near to the bar to matter.

    Returns:
        "supported", "not supported" or "inconclusive".

    >>> judge(Interval(0.5, 0.3, 0.7, 40, 0.5)), judge(Interval(0.0, -0.3, 0.3, 40, 0.0))
    ('supported', 'inconclusive')
    >>> judge(Interval(0.0, -0.05, 0.05, 4000, 0.0), margin=0.1)
    'not supported'
    """
    low, high = (interval.low, interval.high) if sign > 0 else (-interval.high, -interval.low)
    if low > bar:
        return "supported"
    if high < bar + margin or high <= bar:
        return "not supported"
    return "inconclusive"
