"""What the derivative rows of a chunk say about the network's input, its layers and parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from flatlens.algebra.spectra import singular_values, spectral_norm
from flatlens.algebra.sums import in_range, relative, side_by_side
from flatlens.algebra.weight_gradients import WeightSums, squared_norm, weight_gradient
from flatlens.capture.inputs import check_finite
from flatlens.capture.layout import split
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.derivative_rows import Rows, Setup, Share, rule_shares, share
from flatlens.passes.positions import widen_where_needed
from flatlens.passes.segments import Key
from flatlens.passes.slots import LayerFacts

WIDEST_CROSSED = 4096  # Eq. 37 needs a matrix of (input entries)^2; beyond this it is left out
Spectrum = tuple[Tensor, Tensor]  # singular values and rank


@dataclass(frozen=True)
class Asked:
    """What is asked beyond the columns that every exact pass gives."""

    adaptive: bool = True
    exact_untied: bool = False


def all_columns(setup: Setup, rows_by_edge: Rows, asked: Asked) -> ChunkColumns:
    """Work off every layer of a chunk whose rows have all arrived.

    Args:
        setup: the chunk; its positions hold df/dz.
        rows_by_edge: the rows at all other edges.
        asked: what is asked for.
    """
    view = _View(setup, rows_by_edge, asked)
    columns: dict[Key, Tensor] = {("output",): setup.f.detach()}
    columns |= {("input", name): values for name, values in view.input_columns().items()}
    spectra = [view.spectrum(q.total) for q in setup.plan.layers]
    _check_finite(setup, view.input_spectrum, spectra)
    widen_where_needed(setup.positions, [singular[:, 0] for singular, _ in spectra])
    bias_rows = [p.bias_rows() if p.layer.bias is not None else None for p in setup.positions]
    shares = rule_shares(setup, rows_by_edge, bias_rows)
    weights = _weight_columns(view, shares)
    if weights.invariant is not None:
        columns["first", "invariant"] = weights.invariant
    for i, spectrum in enumerate(spectra):
        layer = view.layer_columns(i, spectrum, weights.by_call.get(i), bias_rows[i], shares)
        columns |= {("layer", i, name): values for name, values in layer.items()}
    nothing = setup.f.new_zeros(setup.batch, dtype=torch.float64)
    for name, _ in setup.named:
        grad, adaptive = shares.get(name, (nothing, nothing))
        columns["parameter", name, "grad"] = grad
        columns["parameter", name, "adaptive"] = adaptive
    if not asked.adaptive:  # it is known of some parameters, but not of the network
        columns = {key: v for key, v in columns.items() if key[-1] != "adaptive"}
    first_call = view.first_call
    return ChunkColumns(
        layers=[view.facts(i) for i in range(len(setup.positions))],
        paths=setup.plan.parameters.paths,
        columns=columns,
        sums=weights.sums,
        first_weight=None if first_call is None else setup.positions[first_call].W,
        unmeasured=setup.unmeasured,
    )


def _check_finite(setup: Setup, at_input: Spectrum, at_layers: list[Spectrum]) -> None:
    """Refuse a sample whose derivative by the network's or a layer's input is not finite.

    Parameter gradients can be finite there: sqrt(0 x) has the derivative 0 times infinity by x.
    """
    tops = torch.stack([singular[:, 0] for singular, _ in (at_input, *at_layers)], 1)
    if bool(torch.isfinite(tops).all()):
        return
    start = setup.forward.start
    check_finite(tops[:, :1], start, "input gradient")
    for i in range(len(at_layers)):
        kind = setup.positions[i].layer.kind
        what = f"gradient at the input of layer {i} ({kind})"
        check_finite(tops[:, i + 1 : i + 2], start, what)


@dataclass(frozen=True)
class _Weights:
    """What the weights of layers contribute.

    Attributes:
        by_call: the share of each call's weight, where it is known.
        invariant: Eq. 44's sum of the first layer, if there is one.
        sums: sums over samples for Eqs. 36 and 37.
    """

    by_call: dict[int, Share]
    invariant: Tensor | None
    sums: dict[str, Tensor]


def _weight_columns(view: _View, shares: dict[str, Share]) -> _Weights:
    """Measure every weight of a layer; shares of trainable ones are added to ``shares``."""
    setup, adaptive, first_call = view.setup, view.asked.adaptive, view.first_call
    by_call: dict[int, Share] = {}
    sums: dict[str, Tensor] = {}
    invariant: Tensor | None = None
    if first_call is not None and setup.positions[first_call].dense:
        invariant, sums = view.first_layer(first_call)
    unknown = setup.f.new_full((setup.batch,), torch.nan, dtype=torch.float64)
    for group, owner in setup.plan.parameters.groups:
        calls = [setup.positions[i] for i in group]
        wanted = group == [first_call] and invariant is None
        if adaptive:
            weight = weight_gradient(calls, wanted)
        else:
            weight = WeightSums(squared_norm(calls), unknown, unknown)
        invariant = weight.invariant if wanted else invariant
        by_call.update(dict.fromkeys(group, weight[:2]))
        if owner is not None:
            shares[owner] = weight[:2]
    if first_call is not None and invariant is None:  # its weight is used elsewhere, too
        alone = [setup.positions[first_call]]
        invariant = weight_gradient(alone, True).invariant if adaptive else unknown
    return _Weights(by_call, invariant, sums)


class _View:
    """The rows of one chunk, and the few numbers that several columns share.

    Attributes:
        first_call: the call that reads the network's input, or None.
        input_rows: df/dx, [b, outputs, M].
        input_power: its squares, summed over outputs.
        input_spectrum: its singular values and rank.
        full_rank: whether every layer has at least as many features as positions. Otherwise the
            smallest singular value over positions is zero somewhere, and none is computed.
    """

    def __init__(self, setup: Setup, rows_by_edge: Rows, asked: Asked) -> None:
        self.setup, self.rows_by_edge, self.asked = setup, rows_by_edge, asked
        reads = [q.reads_input for q in setup.plan.layers]
        self.first_call = reads.index(True) if any(reads) else None
        self.input_rows = side_by_side([rows_by_edge[k] for k in setup.plan.inputs])
        self.input_power = self.input_rows[:, 0].square()
        for v in range(1, self.input_rows.shape[1]):
            self.input_power.addcmul_(self.input_rows[:, v], self.input_rows[:, v])
        self.input_spectrum = self._decomposed(self.input_rows)
        top = self.input_spectrum[0][:, 0]
        if not in_range(top):
            self.input_power = self.input_rows.double().square().sum(1)
        self.full_rank = all(
            p.u.shape[2] + self.bias_counts(i) >= p.T for i, p in enumerate(setup.positions)
        )

    def spectrum(self, number: int) -> Spectrum:
        """Singular values and rank of the rows at an edge."""
        if [number] == self.setup.plan.inputs:
            return self.input_spectrum
        return self._decomposed(self.rows_by_edge[number])

    def _decomposed(self, A: Tensor) -> Spectrum:
        """Singular values and rank; those beyond the width of a head are zero."""
        try:
            s, rank = singular_values(A)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            at_input = A is self.input_rows
            what = "input gradient" if at_input else "gradient at the input of a layer"
            check_finite(A, self.setup.forward.start, what)
            raise
        missing = min(self.setup.outputs, A.shape[2]) - s.shape[1]
        return (s if missing == 0 else F.pad(s, (0, missing))), rank

    def input_columns(self) -> dict[str, Tensor]:
        """The columns of ``InputProbe``."""
        fed = side_by_side([t.detach().flatten(1) for t in self.setup.forward.fed])
        x2 = fed.double().square()
        return {
            "singular": self.input_spectrum[0],
            "rank": self.input_spectrum[1],
            "x_norm": x2.sum(1).sqrt(),
            "invariant": (self.input_power * x2).sum(1),
        }

    def layer_columns(
        self,
        i: int,
        spectrum: Spectrum,
        gradient: Share | None,
        bias_rows: Tensor | None,
        shares: dict[str, Share],
    ) -> dict[str, Tensor]:
        """The columns of ``LayerProbe`` of call ``i``."""
        setup, positions = self.setup, self.setup.positions[i]
        call = setup.plan.calls[i]
        untied, untied_bias, patch_min = positions.energies()
        zeros = torch.zeros_like(untied)
        values = {"singular": spectrum[0], "rank": spectrum[1], **self._bypass(i)}
        if gradient is None:
            trainable = setup.plan.parameters.trainable
            gradient = shares[trainable[id(call.parameter)]]
        values |= {
            "grad_weight": gradient[0],
            "adaptive": gradient[1],
            "grad_bias": self._bias_gradient(i, bias_rows, shares, zeros),
            "x_norm": split(call.x, positions.layout, setup.batch).flatten(1).double().norm(dim=1),
            "patch_min": patch_min,
            "untied": untied,
            "untied_bias": untied_bias if positions.layer.bias_per_position else zeros,
            "patch_rank": positions.patch_rank(self.bias_counts(i)) if self.full_rank else zeros,
        }
        if self.asked.exact_untied:
            values["untied_norm"] = positions.untied_norms()
        return values

    def _bypass(self, i: int) -> dict[str, Tensor]:
        """How far A is from B, where something else reads the layer's input."""
        q = self.setup.plan.layers[i]
        A, B = self.rows_by_edge[q.total], self.rows_by_edge[q.through]
        values: dict[str, Tensor] = {}
        if A is not B:
            through = self._decomposed(B)
            gap = (A - B).double()
            values |= {"singular_through": through[0], "rank_through": through[1]}
            values |= {"bypass": relative(gap, A), "gap_norm": spectral_norm(gap)}
            values["chain"] = self._chain(i, A, B)
        if q.beside_input:
            inputs = self.setup.plan.inputs
            mine = [A if k == q.input else torch.zeros_like(self.rows_by_edge[k]) for k in inputs]
            values["beside"] = relative(self.input_rows - side_by_side(mine), self.input_rows)
        return values

    def _chain(self, i: int, A: Tensor, B: Tensor) -> Tensor:
        """How far A_i - B_i is from A_{i+1}: 0 in a chain of identity skips."""
        layers = self.setup.plan.layers
        after = self.rows_by_edge[layers[i + 1].total] if i + 1 < len(layers) else None
        if after is None or after.shape != A.shape:
            return A.new_full((self.setup.batch,), torch.inf, dtype=torch.float64)
        return relative(A - B - after, after)

    def _bias_gradient(
        self, i: int, bias_rows: Tensor | None, shares: dict[str, Share], zeros: Tensor
    ) -> Tensor:
        bias = self.setup.plan.calls[i].layer.bias
        if bias is None or bias_rows is None:
            return zeros
        name = self.setup.plan.parameters.trainable.get(id(bias))
        return share(bias, [bias_rows])[0] if name is None else shares[name][0]

    def first_layer(self, i: int) -> tuple[Tensor, dict[str, Tensor]]:
        """What Eqs. 37 and 44 ask of a dense layer that reads the input (FirstLayerProbe)."""
        positions, q = self.setup.positions[i], self.setup.plan.layers[i]
        u2 = positions.u[:, 0, :, 0].square()
        A2, B2 = (self._power(k, u2) for k in (q.total, q.through))
        sums: dict[str, Tensor] = {}
        if u2.shape[1] <= WIDEST_CROSSED:
            sums["curvature"] = positions.power[:, 0].to(u2).mT @ u2
            sums["crossed"] = A2.mT @ u2
        return (B2 * u2).sum(1), sums  # J W is B, and u is x^l

    def _power(self, number: int, like: Tensor) -> Tensor:
        """The squares of the rows at an edge, summed over outputs."""
        if [number] == self.setup.plan.inputs and self.input_power.dtype == like.dtype:
            return self.input_power
        return self.rows_by_edge[number].to(like).square().sum(1)

    def bias_counts(self, i: int) -> bool:
        """Whether the bias is a trainable parameter with this one use, at each position."""
        layer, plan = self.setup.plan.calls[i].layer, self.setup.plan.parameters
        name = plan.trainable.get(id(layer.bias))
        return layer.bias_per_position and plan.rules.get(name or "") == ([i], [])

    def facts(self, i: int) -> LayerFacts:
        """What call ``i`` is."""
        forward, call = self.setup.forward, self.setup.plan.calls[i]
        end, _, _ = forward.graph.below_views(get_gradient_edge(forward.f))
        out, _, _ = forward.graph.below_views(call.out)
        return LayerFacts(
            call.layer,
            call.parameter,
            self.setup.positions[i].T,
            call.x.numel() // self.setup.batch,
            reads_input=self.setup.plan.layers[i].reads_input,
            is_output=self.setup.plain and end.node is out.node,
            bias_counts=self.bias_counts(i),
        )
