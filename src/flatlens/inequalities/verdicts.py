"""Compare both sides of an inequality and say what is proven.

| verdict            | meaning                                                                 |
| ------------------ | ----------------------------------------------------------------------- |
| ``theorem``        | every condition of the proof holds in this pass                         |
| ``observation``    | the paper states the inequality for such a network, but it can fail     |
| ``not applicable`` | a side is not defined                                                   |

A theorem that fails is a bug of flatlens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flatlens.inequalities.conditions import (
    Condition,
    first_reason,
    why_bypassed,
    why_read_beside,
    why_rounded,
)
from flatlens.inequalities.network import Network
from flatlens.passes.needs import (
    ADAPTIVE,
    BYPASS,
    missing,
    not_asked_for,
    with_implied,
)
from flatlens.per_sample import SMALLEST
from flatlens.probes import LayerProbe

Verdict = Literal["theorem", "observation", "not applicable"]

UNKNOWN = "it needs singular values that the sketched pass does not find"
NOT_ADAPTIVE = not_asked_for([ADAPTIVE])
NO_LAYER = "the network has no measured layer"
NO_FIRST_LAYER = "no measured layer reads the network's input itself"


@dataclass(frozen=True)
class Inequality:
    """An inequality lhs <= rhs for one network, and whether it is proven for this network.

    Attributes:
        name: its name in the table of docs/theory.md, such as "eq12".
        equation: its equation in the paper.
        lhs: the side about compression. For ``log_volume`` both sides are logarithms.
        rhs: the side about flatness.
        slack: rhs / lhs, or exp(rhs - lhs) for logarithms.
        holds: whether lhs <= rhs up to rounding and, in a sketch, up to standard errors.
        verdict: "theorem", "observation" or "not applicable".
        why: the reason of the verdict in one sentence.
        log_lhs: logarithm of the left side. Volumes are compared as logarithms, because their plain
            sides may be 0 or inf.
        log_rhs: logarithm of the right side.
    """

    name: str
    equation: str
    lhs: float
    rhs: float
    slack: float
    holds: bool
    verdict: Verdict
    why: str
    log_lhs: float | None = None
    log_rhs: float | None = None


class Bounds(tuple[Inequality, ...]):
    """All inequalities of one network by name or by index, in the order of ``docs/theory.md``."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        for inequality in self:
            if inequality.name == key:
                return inequality
        names = ", ".join(inequality.name for inequality in self)
        raise KeyError(f"no inequality {key!r}; there are {names}")


def all_layers(network: Network) -> Sequence[LayerProbe]:
    """Return all measured layers."""
    return network.p.layers


@dataclass(frozen=True)
class Row:
    """One row of the table: how to compute both sides, and the conditions of its proof.

    Both sides are functions of a :class:`Network`. If ``first_layer`` or ``about_first`` is set,
    the row is about the layer that reads the network's input. It does not apply if there is no such
    layer.
    """

    name: str
    equation: str
    lhs: Callable[[Network], float]
    rhs: Callable[[Network], float]
    proven: str  # the reason to give if all conditions are met
    first_layer: tuple[Condition, ...] = ()  # conditions on each sample's first layer
    each: tuple[Condition, ...] = ()  # conditions on each of ``layers``
    layers: Callable[[Network], Sequence[LayerProbe]] = all_layers
    about_first: bool = False  # the sides use the first layer, without conditions on it
    needs_layers: bool = True
    not_applicable: Callable[[Network], str | None] = lambda network: None
    infinite: Callable[[Network], str | None] = lambda network: None  # why the rhs is infinite
    logs: bool = False  # both sides are given as logarithms
    show_logs: bool = False  # and both sides are shown as logarithms
    scale: Callable[[Network], float] = lambda network: 0.0  # size of the terms of a difference
    sides: tuple[str, ...] = ()  # names of passes.needs that the two sides need
    of_any_numbers: bool = False  # it holds for any numbers, also for rounded ones

    @property
    def needs(self) -> frozenset[str]:
        """Names of ``passes.needs`` that the sides and the conditions need."""
        conditions = {*self.first_layer, *self.each}
        asked = {BYPASS} if conditions & {why_bypassed, why_read_beside} else set()
        return with_implied({*self.sides, *asked})

    @property
    def sums_over_layers(self) -> bool:
        """Whether a side is a sum over all layers, so that each layer must be measured."""
        about_first = bool(self.first_layer) or self.about_first
        return self.needs_layers and not about_first and self.layers is all_layers


def judge(row: Row, network: Network) -> Inequality:
    """Compute both sides of one row, compare them and decide the verdict.

    Args:
        row: a row of the table.
        network: the network, from which the sides are computed.

    Returns:
        The inequality. If it does not apply, its sides are NaN and ``holds`` is True.
    """
    if names := missing(row.needs, network.p.asked):
        return _missing(row, not_asked_for(names))
    if reason := _why_it_does_not_apply(row, network):
        return _missing(row, reason)
    lhs, rhs = row.lhs(network), row.rhs(network)
    if np.isnan(lhs) or np.isnan(rhs):
        return _missing(row, UNKNOWN)
    compare = _compare_logs if row.logs else _compare_numbers
    return compare(row, network, lhs, rhs)


def _why_it_does_not_apply(row: Row, network: Network) -> str | None:
    if row.needs_layers and not network.p.layers:
        missing = network.p.why_not_every_layer
        return NO_LAYER if missing is None else f"{NO_LAYER}: {missing}"
    if network.without_squares:
        return network.without_squares
    if reason := row.not_applicable(network):
        return reason
    about_first = row.first_layer or row.about_first
    return NO_FIRST_LAYER if about_first and network.first_layers is None else None


def _missing(row: Row, reason: str) -> Inequality:
    nan = float("nan")
    return Inequality(row.name, row.equation, nan, nan, nan, True, "not applicable", reason)


def _compare_numbers(row: Row, network: Network, lhs: float, rhs: float) -> Inequality:
    room = network.tolerance
    slack = rhs / lhs if lhs > 0 else (1.0 if rhs == lhs else np.inf)
    # A difference on the left has the rounding of its terms. Below SMALLEST a sample's lhs may be
    # positive although the square of its gradient underflows.
    holds = bool(lhs <= rhs * (1 + room) + room * row.scale(network) + SMALLEST)
    return Inequality(
        row.name, row.equation, lhs, rhs, float(slack), holds, *_verdict(row, network)
    )


def _compare_logs(row: Row, network: Network, lhs: float, rhs: float) -> Inequality:
    with np.errstate(over="ignore"):
        sides = (lhs, rhs) if row.show_logs else (float(np.exp(lhs)), float(np.exp(rhs)))
        slack = np.inf if lhs == -np.inf else float(np.exp(rhs - lhs))
    # Rounding enters a logarithm in proportion to its number of terms.
    room = network.tolerance * max(1.0, abs(rhs)) if np.isfinite(rhs) else 0.0
    verdict, why = _verdict(row, network)
    return Inequality(
        row.name, row.equation, *sides, slack, bool(lhs <= rhs + room), verdict, why, lhs, rhs
    )


def _verdict(row: Row, network: Network) -> tuple[Verdict, str]:
    """Return "theorem", or "observation" if a condition is broken, and the reason."""
    estimated = "; the sides are estimates" if network.p.sketch is not None else ""
    if reason := _broken_condition(row, network):
        return "observation", reason + estimated
    infinite = row.infinite(network)
    ending = f"; rhs is inf: {infinite}" if infinite else ""
    return "theorem", row.proven + ending + estimated


def _broken_condition(row: Row, network: Network) -> str | None:
    """Return what breaks the proof, with the unmeasured layers of a sum over all layers."""
    missing = network.p.why_not_every_layer if row.sums_over_layers else None
    rounded = None if row.of_any_numbers else why_rounded(network.p)
    reasons = [reason for reason in (_broken_proof(row, network), missing, rounded) if reason]
    return "; ".join(reasons) or None


def _broken_proof(row: Row, network: Network) -> str | None:
    if row.first_layer and network.first_layers is not None:
        if network.first_layers.without:
            return (
                f"{network.first_layers.without} of {network.p.n} samples have no measured layer "
                "that reads the network's input itself"
            )
        if reason := first_reason(network.p, network.first_layers.layers, row.first_layer):
            return reason
    return first_reason(network.p, row.layers(network), row.each) if row.each else None
