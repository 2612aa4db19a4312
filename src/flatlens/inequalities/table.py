"""Probe -> inequalities: both sides, the slack, and a verdict that is earned.

Each row of ``docs/theory.md`` is one :class:`Inequality`. Its verdict is "theorem" where every
condition of the proof was seen to hold in the pass (positions, uses of a parameter in the autograd
graph, ||A - B||), "observation" where the paper states it for such a network but it can fail, and
"not applicable" where the network has no such layer. A theorem that fails is a bug of ours.

Notation: W_il is the weight that sample i uses in layer l, x_il the layer's input, w_il =
||grad_{W_il} f(x_i)||_F^2, S the sharpness. A sample that does not use a layer adds 0 to both
sides.
Volumes are compared in logarithms. A norm that took an iteration enters as its upper end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from flatlens.algebra.scaling import minimise
from flatlens.errors import FlatlensError
from flatlens.inequalities.first_layers import find_first_layers
from flatlens.metrics import (
    adaptive_sharpness,
    calls,
    input_invariant_mls,
    layer_log_volumes,
    log_products,
    matrix_normalized_sharpness,
    mls,
    nmls,
    nmls_through,
    sharpness,
    sharpness_untied,
    weighted_nmls,
)
from flatlens.per_sample import (
    mean_over_users,
    most_uses,
    upper_norm_per_sample,
    used_by,
    where_used,
)
from flatlens.probes import Array, LayerProbe, Probe, Sketch

Verdict = Literal["theorem", "observation", "not applicable"]


@dataclass(frozen=True)
class Inequality:
    """lhs <= rhs, and whether that is proven for this network.

    ``slack`` is rhs / lhs. For volumes ``log_lhs`` and ``log_rhs`` are what was compared; the plain
    sides may be 0 or inf. For ``log_volume`` both sides are logarithms, the slack exp(rhs - lhs).
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
    """All inequalities of one network, in the order of ``docs/theory.md``; by name or by place."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        for row in self:
            if row.name == key:
                return row
        raise KeyError(f"no inequality {key!r}; there are {', '.join(row.name for row in self)}")


def bounds(p: Probe, *, exact: bool = False) -> Bounds:
    """Every inequality between compression and sharpness, for this network.

    ``exact=True`` takes ||D^-1 C||_2 itself in ``eq12_untied`` in place of its cheap bound; the
    probe must have been made with ``exact_untied=True``.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(3, 2, bias=False).double()
        >>> row = fl.bounds(fl.probe(net, torch.ones(1, 3).double()))["eq11"]
        >>> row.verdict, row.holds
        ('theorem', True)
    """
    return Bounds(Rows(p, exact).all())


# -- conditions, each decided from what the pass saw ---------------------------------------------


def why_not_dense(p: Probe, layer: LayerProbe) -> str | None:
    """Why z = W x + b is not all there is to a layer, or None."""
    if layer.positions > 1:
        return f"{layer.name} shares its weights over {layer.positions} positions"
    if layer.groups > 1:
        return f"{layer.name} has {layer.groups} groups that each read a part of its input"
    if layer.fewest == 0:
        return f"{layer.name} does not read all of its input"
    if layer.kappa > 1:
        return f"{layer.name} reads an entry of its input {layer.kappa} times"
    return None


def why_not_counted(p: Probe, layer: LayerProbe) -> str | None:
    """Why the gradient of a layer's weight is no part of S, or None."""
    if layer.weight is None:
        return f"the weight of {layer.name} is computed, not a parameter itself"
    if _path(p, layer.weight) == "frozen":
        return f"{layer.weight} is frozen"
    return None


def why_not_leaf(p: Probe, layer: LayerProbe) -> str | None:
    """Why a layer's weight is not a trainable parameter used exactly once, or None."""
    if why := why_not_counted(p, layer):
        return why
    count = most_uses(p.layers, layer.weight)  # by one sample
    if count > 1:
        return f"{layer.weight} is used {count} times"
    if _path(p, layer.weight) != "layer":
        return f"{layer.weight} is also used outside of {layer.name}"
    return None


def why_bypassed(p: Probe, layer: LayerProbe) -> str | None:
    """Why A is not B: something beside the layer reads its input, or None."""
    if layer.bypass.max() > certificate(p):
        return f"{layer.name}: its input is also read elsewhere (a skip or another branch)"
    return None


def certificate(p: Probe) -> float:
    """What may pass for zero, well below the tolerance of a comparison: no theorem fails by it."""
    return 1e-12 if p.dtype == torch.float64 else 1e-7


def _path(p: Probe, name: str | None) -> str:
    return next(q.path for q in p.parameters if q.name == name)


Condition = Callable[[Probe, LayerProbe], str | None]
PAPER: tuple[Condition, ...] = (why_not_dense, why_not_leaf, why_bypassed)


# -- the rows ------------------------------------------------------------------------------------


class Rows:
    """Both sides of every inequality."""

    def __init__(self, p: Probe, exact: bool) -> None:
        self.p, self.exact = p, exact
        self.tolerance = 1e-9 if p.dtype == torch.float64 else 1e-4
        self.S = sharpness(p)
        if p.sketch is not None:
            room = student(p.sketch.directions - 1) * relative_error(p, p.sketch)
            self.tolerance += (1 + room) ** 2 - 1  # a side may be the square of what is known
        self.first = find_first_layers(p)

    def all(self) -> Iterator[Inequality]:
        """In the order of the table."""
        yield self.eq6()
        yield self.eq8()
        yield self.eq9()
        yield self.eq10()
        yield self.eq11("eq11", "Eq. 11", bias=False)
        yield self.eq11("eq11_bias", "Eq. 11 with biases", bias=True)
        yield from self.eq48()
        yield self.eq12("eq12", "Eq. 12", bias=False)
        yield self.eq12("eq12_bias", "Eq. 12 with biases", bias=True)
        yield self.eq12_untied()
        yield self.eq12_tied_rank()
        yield self.eq17()
        yield self.eq17_telescoped()
        yield self.eq35()
        yield self.eq37()
        yield self.eq44()
        yield self.eq44_shared()
        yield self.log_volume()

    # verdicts

    def first_reason(self, *conditions: Condition) -> str | None:
        """The first condition that the first layer of some sample breaks."""
        assert self.first is not None
        p = self.p
        if why := self.without_first():
            return why
        for layer in self.first.layers:
            if layer.beside.max() > certificate(p):
                return f"the network's input is also read beside {layer.name}"
            for condition in conditions:
                if why := condition(p, layer):
                    return why
        return None

    def without_first(self) -> str | None:
        """Say how many samples have no first layer, or None if all have one."""
        assert self.first is not None
        if not self.first.without:
            return None
        return (
            f"{self.first.without} of {self.p.n} samples have no measured layer that reads the "
            "network's input itself"
        )

    def all_reason(self, *conditions: Condition) -> str | None:
        """The first layer and condition that is broken, in the order of the layers."""
        return next((why for q in self.p.layers for c in conditions if (why := c(self.p, q))), None)

    def row(
        self,
        name: str,
        equation: str,
        lhs: float,
        rhs: float,
        reason: str | None,
        proven: str,
        scale: float = 0.0,
    ) -> Inequality:
        """lhs <= rhs in plain numbers; a lhs that is a difference has rounding of its ``scale``."""
        if np.isnan(lhs) or np.isnan(rhs):
            why = NOT_ADAPTIVE if self.p.sketch is None else UNKNOWN
            return self.missing(name, equation, why)
        slack = rhs / lhs if lhs > 0 else (1.0 if rhs == lhs else np.inf)
        holds = bool(lhs <= rhs * (1 + self.tolerance) + self.tolerance * scale + 1e-300)
        return Inequality(
            name, equation, lhs, rhs, float(slack), holds, *self.verdict(reason, proven)
        )

    def verdict(self, reason: str | None, proven: str) -> tuple[Verdict, str]:
        """A theorem, unless there is a reason against it; and why."""
        told = "; the sides are estimates" if self.p.sketch is not None else ""
        return ("theorem", proven + told) if reason is None else ("observation", reason + told)

    def log_row(
        self,
        name: str,
        equation: str,
        lhs: float,
        rhs: float,
        reason: str | None,
        proven: str,
        plain: bool = True,
    ) -> Inequality:
        """lhs <= rhs given by logarithms; ``plain``: show the sides themselves."""
        if np.isnan(lhs) or np.isnan(rhs):
            return self.missing(name, equation, UNKNOWN)
        with np.errstate(over="ignore"):
            sides = (float(np.exp(lhs)), float(np.exp(rhs))) if plain else (lhs, rhs)
            slack = np.inf if lhs == -np.inf else float(np.exp(rhs - lhs))
        # Rounding enters a logarithm in proportion to its number of terms.
        room = self.tolerance * max(1.0, abs(rhs)) if np.isfinite(rhs) else 0.0
        holds = bool(lhs <= rhs + room)
        told = self.verdict(reason, proven)
        return Inequality(name, equation, *sides, slack, holds, *told, lhs, rhs)

    def missing(self, name: str, equation: str, why: str) -> Inequality:
        """There is no such layer, or a side is not known."""
        nan = float("nan")
        return Inequality(name, equation, nan, nan, nan, True, "not applicable", why)

    def no_first(self, name: str, equation: str) -> Inequality:
        """No measured layer reads the network's input."""
        return self.missing(name, equation, "no measured layer reads the network's input itself")

    # both sides

    def ratio(self, layer: LayerProbe, bias: bool) -> Array:
        """(||W_il|| / x_il)^2 per sample, with x_il^2 + 1 where a bias counts."""
        size2 = layer.x_norm**2 + (bias and layer.bias_counts)
        return where_used(layer, _divided(upper_norm_per_sample(layer) ** 2, size2))

    def first_ratio(self, bias: bool) -> Array:
        """The same of each sample's first layer."""
        assert self.first is not None
        return self.first.gather(lambda layer: self.ratio(layer, bias))

    def zeros(self, layers: Sequence[LayerProbe], bias: bool, why: str) -> str:
        """Say what made a right-hand side infinite."""
        for q in layers:
            count = int(np.sum(np.isinf(self.ratio(q, bias))))
            if count:
                return f"{why}; rhs is inf: {q.name} gets a zero input in {count} sample(s)"
        return why

    def eq6(self) -> Inequality:
        name, equation = "eq6", "Eq. 6, k = 2"
        if self.first is None:
            return self.no_first(name, equation)
        rhs = _product(self.first_ratio(False).max(), self.S)
        why = self.zeros(self.first.layers, False, DENSE_FIRST)
        return self.row(
            name, equation, float((self.p.input.singular[:, 0] ** 2).mean()), rhs,
            self.first_reason(*PAPER), why,
        )  # fmt: skip

    def eq8(self) -> Inequality:
        s = self.p.input.singular
        r = s.shape[1]
        rhs = log_mean_exp(r / 2 * _log((s**2).sum(1) / r))
        return self.log_row("eq8", "Eq. 8", log_mean_exp(log_products(s)), rhs, None, "AM-GM")

    def _log_eq9(self, ratios: Array, r: int) -> float:
        """log of (1/n) sqrt(sum ratios^r) (nS/r)^(r/2), ratios = (||W||/x)^2 over all terms."""
        n = self.p.n
        total = log_mean_exp(r * _log(ratios)) + np.log(len(ratios))
        with np.errstate(invalid="ignore"):
            return _no_nan(float(-np.log(n) + total / 2 + r / 2 * _log(n * self.S / r)))

    def eq9(self) -> Inequality:
        name, equation = "eq9", "Eq. 9"
        if self.first is None:
            return self.no_first(name, equation)
        s = self.p.input.singular
        rhs = self._log_eq9(self.first_ratio(False), s.shape[1])
        why = self.zeros(self.first.layers, False, DENSE_FIRST)
        lhs = log_mean_exp(log_products(s))
        return self.log_row(name, equation, lhs, rhs, self.first_reason(*PAPER), why)

    def eq10(self) -> Inequality:
        layers = self.p.layers
        ranks = {q.singular.shape[1] for q in layers}
        lhs = log_sum_exp([log_mean_exp(layer_log_volumes(q)) for q in layers])
        ratios = [self.ratio(q, False) for q in layers]
        if len(ranks) == 1:
            rhs = self._log_eq9(np.concatenate(ratios), ranks.pop())
        else:
            each = zip(ratios, layers, strict=True)
            rhs = log_sum_exp([self._log_eq9(a, q.singular.shape[1]) for a, q in each])
        why = self.zeros(layers, False, DENSE_ALL)
        return self.log_row("eq10", "Eq. 10", lhs, rhs, self.all_reason(*PAPER), why)

    def eq11(self, name: str, equation: str, bias: bool) -> Inequality:
        if self.first is None:
            return self.no_first(name, equation)
        rhs = _product(np.sqrt(self.first_ratio(bias).mean()), np.sqrt(self.S))
        why = self.zeros(self.first.layers, bias, DENSE_FIRST)
        return self.row(name, equation, mls(self.p), rhs, self.first_reason(*PAPER), why)

    def eq48(self) -> Iterator[Inequality]:
        names = (("eq48_ab", "Eq. 48, A <= B"), ("eq48_bc", "Eq. 48, B <= C"))
        last = ("eq48_cd", "Eq. 48, C <= D")
        if self.first is None:
            for name, equation in (*names, last):
                yield self.no_first(name, equation)
            return
        ratio = self.first_ratio(False)
        w = self.first.gather(lambda layer: layer.grad_weight)
        B = float(
            np.mean([_product(np.sqrt(a), np.sqrt(b)) for a, b in zip(ratio, w, strict=True)])
        )
        C = _product(np.sqrt(ratio.mean()), np.sqrt(w.mean()))
        D = _product(np.sqrt(ratio.mean()), np.sqrt(self.S))
        why = self.zeros(self.first.layers, False, DENSE_FIRST)
        yield self.row(*names[0], mls(self.p), B, self.first_reason(*PAPER), why)
        yield self.row(*names[1], B, C, None, "Cauchy-Schwarz")
        reasons = [self.without_first(), *(why_not_counted(self.p, q) for q in self.first.layers)]
        counted = next((why for why in reasons if why), None)
        yield self.row(*last, C, D, counted, "the first layer's weight is part of S")

    def _rhs12(self, layers: list[LayerProbe], bias: bool) -> float:
        total = np.sum([self.ratio(q, bias) for q in layers], axis=0)
        return _product(np.sqrt(np.mean(total)), np.sqrt(self.S))

    def eq12(self, name: str, equation: str, bias: bool) -> Inequality:
        why = self.zeros(self.p.layers, bias, DENSE_ALL)
        rhs = self._rhs12(self.p.layers, bias)
        return self.row(name, equation, nmls(self.p), rhs, self.all_reason(*PAPER), why)

    def eq12_untied(self) -> Inequality:
        k2 = []
        for q in self.p.layers:
            if self.exact and q.untied_norm is None:
                raise FlatlensError(
                    "exact=True needs ||D^-1 C||_2: probe the network with exact_untied=True"
                )
            size = q.patch_min + (q.has_bias and "transpose" not in q.kind)
            if self.exact and q.untied_norm is not None:
                k2.append(where_used(q, q.untied_norm**2))
                continue
            kernel = upper_norm_per_sample(q, "kernel")
            k2.append(where_used(q, _divided(q.kappa * kernel**2, size)))
        rhs = _product(np.sqrt(np.mean(np.sum(k2, axis=0))), np.sqrt(sharpness_untied(self.p)))
        why = "weights counted once per position"
        if np.isinf(rhs):
            empty = next(
                q.name for q, k in zip(self.p.layers, k2, strict=True) if np.isinf(k).any()
            )
            why += f"; rhs is inf: {empty} has an all-zero patch and no bias"
        lhs = nmls_through(self.p)
        return self.row("eq12_untied", "theory 4.1", lhs, rhs, None, why)

    def eq12_tied_rank(self) -> Inequality:
        terms = []
        for q in self.p.layers:
            # J stands before the overlapping sum of a transposed convolution: its C is the kernel.
            norm = upper_norm_per_sample(q, "kernel" if "transpose" in q.kind else "operator")
            terms.append(where_used(q, _divided(norm**2, q.patch_rank**2)))
        rhs = _product(np.sqrt(np.mean(np.sum(terms, axis=0))), np.sqrt(self.S))
        why = "every weight is a parameter used once; patches determine the positions"
        for q in self.p.layers:
            if (q.patch_rank == 0).any():
                why = f"rhs is inf: the patches of {q.name} do not have full rank over positions"
                break
        lhs = nmls_through(self.p)
        reason = self.all_reason(why_not_leaf)
        return self.row("eq12_tied_rank", "theory 4.2", lhs, rhs, reason, why)

    def eq17(self) -> Inequality:
        each = [q.singular[:, 0] - q.gap_norm for q in self.p.layers]
        lhs = float(np.mean(np.sum(each, axis=0)))
        why = self.zeros(self.p.layers, False, "all layers: one position, trainable, used once")
        reason = self.all_reason(why_not_dense, why_not_leaf)
        rhs = self._rhs12(self.p.layers, False)
        return self.row("eq17", "Eq. 17", lhs, rhs, reason, why, scale=nmls(self.p))

    def eq17_telescoped(self) -> Inequality:
        name, equation = "eq17_telescoped", "Eq. 17, telescoped"
        *inner, last = self.p.layers
        limit = certificate(self.p)
        if not inner or self.first is None or self.first.layers[0] is not inner[0]:
            return self.missing(name, equation, "the network is no chain that starts at its input")
        partly = [q.name for q in self.p.layers if not used_by(q).all()]
        if partly:
            return self.missing(name, equation, f"some samples do not use {partly[0]}")
        for q in inner:
            if not (q.chain <= limit).all():
                return self.missing(
                    name, equation, f"{q.name} has no identity skip to the next layer"
                )
        if not last.is_output or last.positions > 1:
            return self.missing(name, equation, f"{last.name} is no linear last layer")
        reason = self.first_reason() or next(
            (w for q in inner for c in (why_not_dense, why_not_leaf) if (w := c(self.p, q))), None
        )
        why = self.zeros(inner, False, "a chain of identity skips with a linear last layer")
        lhs = mls(self.p) - float(upper_norm_per_sample(last, "operator").mean())
        rhs = self._rhs12(inner, False)
        return self.row(name, equation, lhs, rhs, reason, why, scale=mls(self.p))

    def eq35(self) -> Inequality:
        slack = max(1 + q.norms.slack for q in self.p.layers)
        rhs = matrix_normalized_sharpness(self.p) * slack  # sum_l sqrt(mean_i ||W_il||^2 w_il)
        lhs = weighted_nmls(self.p)
        return self.row("eq35", "Eq. 35", lhs, rhs, self.all_reason(*PAPER), DENSE_ALL)

    def eq37(self) -> Inequality:
        name, equation = "eq37", "Eq. 37"
        extra = self.p.first
        if self.first is None:
            return self.no_first(name, equation)
        if extra is None or extra.weight is None:
            why = "the weight of the first layer differs from sample to sample"
            return self.missing(name, equation, why)
        if extra.curvature is None or extra.crossed is None:
            layer = self.first.layers[0]
            why = why_not_dense(self.p, layer) or (
                f"the input of {layer.name} is too wide"
                if layer.kind == "linear"
                else f"{layer.name} is a convolution: its columns are no input entries"
            )
            return self.missing(name, equation, why)
        found = minimise(extra.curvature, extra.weight[0])
        t2 = found.column  # sigma'^2; columns without weight and curvature have dropped out
        inverse = np.divide(1.0, t2, out=np.zeros_like(t2), where=t2 > 0)
        crossed = torch.from_numpy(extra.crossed) @ torch.from_numpy(t2)
        lhs = float(np.sqrt(max(float(crossed @ torch.from_numpy(inverse)), 0.0)))
        return self.row(name, equation, lhs, found.value, self.first_reason(*PAPER), DENSE_FIRST)

    def eq44(self) -> Inequality:
        name, equation = "eq44", "Eq. 44"
        if self.first is None:
            return self.no_first(name, equation)
        lhs = float((input_invariant_mls.samples(self.p) / self.first.out_features).mean())
        rhs = adaptive_sharpness(self.p)
        return self.row(name, equation, lhs, rhs, self.first_reason(*PAPER), DENSE_FIRST)

    def eq44_shared(self) -> Inequality:
        name, equation = "eq44_shared", "Eq. 44, shared weights"
        if self.first is None or self.p.first is None:
            return self.no_first(name, equation)
        lhs = float((self.p.first.invariant / self.first.out_features).mean())
        rhs = float(self.first.gather(lambda layer: layer.adaptive).mean())
        reasons = [self.without_first(), *(why_not_leaf(self.p, q) for q in self.first.layers)]
        reason = next((why for why in reasons if why), None)
        why = "the first layer's weight is a trainable parameter used once"
        return self.row(name, equation, lhs, rhs, reason, why)

    def log_volume(self) -> Inequality:
        name, equation = "log_volume", "theory 3"
        if self.first is None:
            return self.no_first(name, equation)
        s = self.p.input.singular
        r = s.shape[1]
        logs = _log(self.first_ratio(True)) / 2
        with np.errstate(invalid="ignore"):
            rhs = _no_nan(r / 2 * float(_log(self.S / r)) + r * float(logs.mean()))
        lhs = float(log_products(s).mean())
        reason = self.first_reason(*PAPER)
        why = self.zeros(self.first.layers, True, DENSE_FIRST)
        return self.log_row(name, equation, lhs, rhs, reason, why, plain=False)


UNKNOWN = "it needs singular values that the sketched pass does not find"
NOT_ADAPTIVE = "adaptive sharpness was not asked for"
DENSE_FIRST = "the first layer has one position, a trainable weight used once, and no bypass"
DENSE_ALL = "every layer has one position, a trainable weight used once, and no bypass"


def layer_bounds(p: Probe, layer: LayerProbe) -> dict[str, Any]:
    """One layer's own inequality, Eq. 5 averaged over the samples that use it.

    lhs = mean_i ||A_il||_F, rhs = mean_i ||W_il|| sqrt(w_il) / x_il; ``multiplicative`` bounds the
    response through the layer to u_p -> (1 + H) u_p, ||H||_F = 1, at all its positions (theory
    4.3). That takes the gradient of this call alone: NaN where the weight has other uses.
    """
    root = np.sqrt(layer.grad_weight)
    energy = (layer.singular**2).sum(1) if layer.energy is None else layer.energy
    lhs = mean_over_users(layer, np.sqrt(energy))
    with np.errstate(divide="ignore"):
        inverse = 1 / layer.x_norm
    norms = upper_norm_per_sample(layer)
    each = [_product(a * c, b) for a, b, c in zip(root, inverse, norms, strict=True)]
    rhs = mean_over_users(layer, np.array(each))
    reason = next((why for c in PAPER if (why := c(p, layer))), None)
    alone = 1.0 if most_uses(calls(p, layer), layer.weight) == 1 else np.nan
    kernel = upper_norm_per_sample(layer, "kernel")
    return {
        "eq5_lhs": lhs,
        "eq5_rhs": rhs,
        "eq5_slack": rhs / lhs if lhs > 0 else np.inf,
        "eq5_verdict": "theorem" if reason is None else "observation",
        "eq5_why": reason or "one position, a trainable weight used once, no bypass",
        "multiplicative": alone * mean_over_users(layer, kernel * root),
    }


def student(freedom: int) -> float:
    """The quantile of Student's t that is 4 for the normal distribution (Wallace, from above)."""
    z = 4 * (8 * freedom + 3) / (8 * freedom + 1)
    return float(np.sqrt(freedom * np.expm1(z**2 / freedom)))


def relative_error(p: Probe, sketch: Sketch) -> float:
    """The largest relative standard error of what stands in an inequality."""
    whole = {
        "sharpness": sharpness(p),
        "sharpness_untied": sharpness_untied(p),
        "adaptive_sharpness": adaptive_sharpness(p),
        "input_invariant_mls": input_invariant_mls(p),
    }
    found = [(sketch.errors[name], value) for name, value in whole.items()]
    for q, errors in zip(p.layers, sketch.layer_errors, strict=True):
        found.append((errors["sharpness"], mean_over_users(q, q.grad_weight + q.grad_bias)))
        found.append((errors["adaptive_sharpness"], mean_over_users(q, q.adaptive)))
    return max((error / value for error, value in found if value > 0), default=0.0)


def _divided(norm2: Array, size2: Array) -> Array:
    """Squared norms over squared sizes: inf where only the size is 0, 0 where the norm is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(norm2 > 0, norm2 / size2, 0.0)


def _product(a: float, b: float) -> float:
    """a b, where 0 times inf says nothing of a right-hand side and is therefore inf."""
    return float("inf") if np.isinf(a) or np.isinf(b) else float(a * b)


def _no_nan(log: float) -> float:
    """The same for logarithms: inf - inf is inf."""
    return float("inf") if np.isnan(log) else log


def _log(values: Any) -> Any:
    with np.errstate(divide="ignore"):
        return np.log(values)


def log_sum_exp(values: Any) -> float:
    """log of the sum of exp, safe for any size."""
    values = np.asarray(values, dtype=float)
    top = values.max()
    if not np.isfinite(top):
        return float(top)
    return float(top + np.log(np.exp(values - top).sum()))


def log_mean_exp(values: Array) -> float:
    """log of the mean of exp."""
    return log_sum_exp(values) - float(np.log(len(values)))
