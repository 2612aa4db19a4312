"""The N vector-Jacobian products of one chunk of samples, and what each layer makes of them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from flatlens.algebra.operator_norms import untied_norms
from flatlens.algebra.spectra import singular_values, spectral_norm
from flatlens.algebra.weight_gradients import WeightSums, squared_norm, weight_gradient
from flatlens.capture.inputs import check_finite
from flatlens.capture.positions import TINY, Buffers, Layout, Positions, split, squares, summed
from flatlens.capture.recorder import Call, Graph, LinearMap, Lookup, Recorder
from flatlens.errors import FlatlensError
from flatlens.passes.head import Head, find_head

WIDEST_CROSSED = 4096  # Eq. 37 needs a matrix of (input entries)^2; beyond this it is left out
# As many products of as few samples of a dense network are asked for in batches of so many rows.
# Fewer products do not pay for what torch imports at the first batched one (0.3 s).
MANY_PRODUCTS, FEW_SAMPLES, BATCHED_ROWS = 64, 32, 256
Key = tuple[str | int, ...]  # ("layer", 2, "singular"), ("parameter", "fc.weight", "grad"), ...
Share = tuple[Tensor, Tensor]  # ||df/dp||_F^2 and sum p^2 (df/dp)^2, per sample


class NeedsSinglesError(Exception):
    """A chunk met something that only the one-at-a-time way measures."""


class NeedsEachOutputError(Exception):
    """What a head gives is lost in rounding: rows of very different size, of which few matter."""


@dataclass
class Forward:
    """One forward pass: what was fed (and the edges where its gradients arrive) and f as [b, N]."""

    fed: list[Tensor]
    edges: list[GradientEdge]
    recorder: Recorder
    f: Tensor
    directions: Tensor | None = None  # [b, k, N]: what is measured is this times f
    plain: bool = True  # what is measured is f itself, not R^T f of a loss
    first: int = 0  # the number of its first sample

    @cached_property
    def graph(self) -> Graph:
        """What leads to f."""
        return Graph(self.f)


@dataclass
class LayerChunk:
    """What one call is, as one chunk saw it."""

    map: LinearMap
    positions: int
    M: int
    reads_input: bool
    is_output: bool
    bias_counts: bool


@dataclass
class Chunk:
    """All numbers of one chunk (tensors stay on their device until the end)."""

    layers: list[LayerChunk]
    paths: dict[str, str]  # of each parameter
    columns: dict[Key, Tensor]  # per sample: [b] or [b, r]
    sums: dict[str, Tensor]  # over samples
    first: Tensor | None  # the weight of the layer that reads the input


class Products:
    """Plans which edges to ask of autograd, asks for one output after another, works it off."""

    def __init__(
        self,
        forward: Forward,
        layouts: Sequence[Layout | None],
        named: Sequence[tuple[str, Tensor]],
        exact: bool,
        buffers: Buffers,
        heads: bool = True,
        adaptive: bool = True,
    ) -> None:
        self.forward, self.f, self.named, self.exact = forward, forward.f, named, exact
        self.adaptive = adaptive
        self.buffers = buffers
        self.B = len(self.f)
        self.graph = forward.graph
        self.edges: list[GradientEdge] = []
        self.rows: dict[int, tuple[Layout | None, int]] = {}  # edge -> layout, entries per sample
        self._index: dict[tuple[Any, int], int] = {}
        calls = zip(forward.recorder.calls, layouts, strict=True)
        alive = [(c, layout) for c, layout in calls if c.out.node in self.graph.nodes]
        if not alive:
            raise FlatlensError(
                "no linear or convolutional layer reaches the output: none to measure"
            )
        self.calls = [c for c, _ in alive]
        self.directions = forward.directions
        self.outputs = self.N = (self.f if self.directions is None else self.directions).shape[1]
        self.head = find_head(self.graph, self.f, self.calls, self.directions) if heads else None
        if self.head is not None:
            self.directions = self.head.directions
            self.N = self.directions.shape[1]  # the products; the outputs stay as many as they are
        self.positions = [
            Positions(c, layout, self.B, self._rows_at(i), buffers, i)
            for i, (c, layout) in enumerate(alive)
        ]
        many = self.N >= MANY_PRODUCTS and self.B <= FEW_SAMPLES
        self.batched = many and all(p.dense for p in self.positions)
        self._plan_spectra()
        self._plan_parameters()
        # A smallest singular value over positions bounds anything only if no layer has more of
        # them than features; otherwise it is zero somewhere and none is computed.
        self.full_rank = all(
            p.u.shape[2] + self._bias_counts(n) >= p.T for n, p in enumerate(self.positions)
        )

    # -- which edges -------------------------------------------------------------------------

    def _rows_at(self, i: int) -> int:
        """How many rows of df/dz a layer gets: the head has all of them."""
        return self.outputs if self.head is not None and i == self.head.call else self.N

    def _want(self, edge: GradientEdge) -> int:
        """The place of an edge among those asked of autograd."""
        key = (edge.node, edge.output_nr)
        if key not in self._index:
            self._index[key] = len(self.edges)
            self.edges.append(edge)
        return self._index[key]

    def _collect(self, edge: GradientEdge, layout: Layout | None, entries: int) -> int:
        """Ask for an edge and keep its rows."""
        k = self._want(edge)
        self.rows.setdefault(k, (layout, entries))
        return k

    def _plan_spectra(self) -> None:
        """A (total) and B (through the layer) of each call; B apart only where it can differ."""
        self._plan_outputs(with_input=True)
        self.total: list[int] = []
        self.through: list[int] = []
        self.reads_input: list[bool] = []
        self.beside_input: list[bool] = []
        self.below: list[int] = []  # the input that x^l is a reshape of, or -1
        for call, positions in zip(self.calls, self.positions, strict=True):
            entries = call.x.numel() // self.B
            edge, alone, reads, beside, below = self._total(call)
            self.total.append(self._collect(edge, positions.layout, entries))
            self.through.append(
                self.total[-1] if alone else self._collect(call.through, positions.layout, entries)
            )
            self.reads_input.append(reads)
            self.beside_input.append(beside)
            self.below.append(below)

    def _plan_outputs(self, with_input: bool) -> None:
        """The network's input, and what each call gives."""
        fed = list(zip(self.forward.edges, self.forward.fed, strict=True)) if with_input else []
        self.inputs = [self._collect(edge, Layout(), t[0].numel()) for edge, t in fed]
        self.out = [self._want(c.out) for c in self.calls]

    def _total(self, call: Call) -> tuple[GradientEdge, bool, bool, bool, int]:
        """The edge of A, and: is A = B for nobody else reads x^l? is x^l the network's input? does
        something read the input beside the reshape that is x^l? which of the inputs is it?"""
        if call.total is None:
            return call.through, True, False, False, -1
        alone = self.graph.alone(call.total)
        edge, alone_below = self.graph.unviewed(call.total)
        below = self._index.get((edge.node, edge.output_nr), -1)
        if below not in self.inputs:
            return call.total, alone, False, False, -1
        beside = not alone_below or len(self.inputs) > 1
        if alone and alone_below:
            return edge, True, True, beside, below
        return call.total, alone, True, beside, below

    def _plan_parameters(self) -> None:
        """Each trainable parameter's path; what is not fully seen goes the slow way."""
        self.paths: dict[str, str] = {}
        self.groups: list[tuple[list[int], str | None]] = []  # calls of one weight, its parameter
        self.rules: dict[str, tuple[list[int], list[int]]] = {}  # biases of calls, edges of copies
        self.tables: dict[str, list[tuple[int, Lookup]]] = {}  # edges of what was looked up
        self.slow: dict[str, int] = {}
        self.trainable = {id(p): name for name, p in self.named if p.requires_grad}
        recorder, nodes = self.forward.recorder, self.graph.nodes
        reached = [c for c in recorder.copies if c.edge.node in nodes]
        looked_up = [t for t in recorder.lookups if t.edge.node in nodes]
        for name, p in self.named:
            uses = self.graph.uses(p)
            weights = [i for i, c in enumerate(self.calls) if c.map.weight is p]
            biases = [i for i, c in enumerate(self.calls) if c.map.bias is p]
            copies = [c for c in reached if c.parameter is p]
            lookups = [t for t in looked_up if t.parameter is p]
            seen = len(weights) + len(biases) + len(copies)
            if not p.requires_grad:
                self.paths[name] = "frozen"
                if weights and self._alike(weights):
                    self.groups.append((weights, None))
            elif uses == 0:
                self.paths[name] = "unused"
            elif uses == seen == len(weights) and self._alike(weights):
                self.paths[name] = "layer"
                self.groups.append((weights, name))
            elif uses == seen and not weights:
                self.paths[name] = "rule"
                edges = [self._collect(c.edge, Layout(c.dim), p.numel()) for c in copies]
                self.rules[name] = (biases, edges)
            elif uses == len(lookups) and all(
                t.source is None or self.graph.alone(t.source) for t in lookups
            ):
                self.paths[name] = "rule"
                layout = Layout() if self.B > 1 else None
                self.tables[name] = [
                    (self._collect(t.edge, layout, t.indices.shape[1] * p.shape[1]), t)
                    for t in lookups
                ]
            elif self.B > 1:
                raise NeedsSinglesError(f"no fast rule for {name}")
            else:
                self.paths[name] = "slow"
                self.slow[name] = self._collect(get_gradient_edge(p), None, p.numel())
        grouped = {i for group, _ in self.groups for i in group}
        for i, call in enumerate(self.calls):
            if i not in grouped and self.trainable.get(id(call.map.weight)) not in self.slow:
                self.groups.append(([i], None))

    def _alike(self, calls: list[int]) -> bool:
        """Whether some calls read one weight in the same way, so that positions can be joined."""
        found = {self.calls[i].map.geometry for i in calls}
        turned = {self.calls[i].map.turned for i in calls}
        ways = {None if g is None else (g.transposed, g.groups) for g in found}
        return len(ways) == len(turned) == 1

    # -- the products ----------------------------------------------------------------------------

    def run(self, again: bool = False) -> Chunk:
        """All N products, their rows stacked; then each layer is worked off.

        ``again``: keep the graph, for other ``directions`` will follow.
        """
        for i, positions in enumerate(self.positions):
            positions.begin(self._rows_at(i))
        rows = self._checked_rows(again)
        columns: dict[Key, Tensor] = {("output",): self.f.detach()}
        columns |= {("input", k): v for k, v in self._input(rows).items()}
        spectra = [
            self.input_spectrum if [k] == self.inputs else self._spectrum(rows[k])
            for k in self.total
        ]
        for positions, (singular, _) in zip(self.positions, spectra, strict=True):
            if self.f.dtype == torch.float32 and bool((singular[:, 0] < TINY).any()):
                positions.widen()
        bias_rows = [p.bias_rows() if p.map.bias is not None else None for p in self.positions]
        shares = self._rule_shares(rows, bias_rows)
        by_call: dict[int, Share] = {}
        first = self.reads_input.index(True) if any(self.reads_input) else None
        sums: dict[str, Tensor] = {}
        invariant: Tensor | None = None
        if first is not None and self.positions[first].dense:
            invariant, sums = self._first(first, rows)
        unknown = self.f.new_full((self.B,), torch.nan, dtype=torch.float64)
        for group, owner in self.groups:
            calls = [self.positions[i] for i in group]
            wanted = group == [first] and invariant is None
            if self.adaptive:
                found = weight_gradient(calls, wanted)
            else:
                found = WeightSums(squared_norm(calls), unknown, unknown)
            invariant = found.invariant if wanted else invariant
            by_call.update(dict.fromkeys(group, found[:2]))
            if owner is not None:
                shares[owner] = found[:2]
        if first is not None and invariant is None:  # its weight is used elsewhere, too
            alone = [self.positions[first]]
            invariant = weight_gradient(alone, True).invariant if self.adaptive else unknown
        if invariant is not None:
            columns["first", "invariant"] = invariant
        for i in range(len(self.calls)):
            layer = self._layer(i, rows, spectra[i], by_call.get(i), bias_rows[i], shares)
            columns |= {("layer", i, k): v for k, v in layer.items()}
        nothing = self.f.new_zeros(self.B, dtype=torch.float64)
        for name, _ in self.named:
            grad, adaptive = shares.get(name, (nothing, nothing))
            columns["parameter", name, "grad"] = grad
            columns["parameter", name, "adaptive"] = adaptive
        if not self.adaptive:  # of some parameters it is known, of the network it is not
            columns |= {key: unknown for key in columns if key[-1] == "adaptive"}
        return Chunk(
            layers=[self._static(i) for i in range(len(self.calls))],
            paths=self.paths,
            columns=columns,
            sums=sums,
            first=None if first is None else self.positions[first].W,
        )

    def _checked_rows(self, again: bool) -> dict[int, Tensor]:
        """The rows at each edge; those of a head are compared with one product without it."""
        if self.head is None:
            return self._rows(again)
        direct = self._direct()
        rows = self._rows(again)
        for v in range(self.outputs):
            self._take(self.head.call, v, self.head.jacobian[:, v])
        self._check_head(direct, self._mixed(self.head, rows))
        return rows

    def _direct(self) -> Tensor:
        """df/dx along one mixture of all rows, without the head's directions: [b, M]."""
        rows = self.forward.directions
        f = self.f if rows is None else (rows @ self.f.unsqueeze(2)).squeeze(2)
        edges = [self.edges[k] for k in self.inputs]
        mixed = (f * _mixture(f)).sum()
        grads = gradients(mixed, edges, True)
        pairs = zip(grads, self.forward.fed, strict=True)
        return beside([(torch.zeros_like(t) if g is None else g).flatten(1) for g, t in pairs])

    def _mixed(self, head: Head, rows: dict[int, Tensor], first: int = 0) -> Tensor:
        """The same from the head's rows: with m the mixture, m^T A = (Q^T m)^T (Q^T A)."""
        A = beside([rows[k] for k in self.inputs])
        mixed = _mixture(head.basis) @ head.basis[:, :, first : first + A.shape[1]]  # [b, d]
        return (mixed.unsqueeze(1) @ A).squeeze(1)

    def _check_head(self, direct: Tensor, found: Tensor) -> None:
        limit = 1e-3 if self.f.dtype == torch.float32 else 1e-9
        if bool((relative(found - direct, direct) > limit).any()):
            raise NeedsEachOutputError

    def _rule_shares(
        self,
        rows: dict[int, Tensor],
        bias_rows: list[Tensor | None],
        known: Container[str] = (),
    ) -> dict[str, Share]:
        """The parameters that are no weight of a layer, without those ``known``."""
        shares = {}
        for name, p in self.named:
            if name in known:
                continue
            if name in self.slow:
                shares[name] = share(p, [rows[self.slow[name]]])
            elif name in self.rules:
                users, copies = self.rules[name]
                if len(users) == 1 and not copies and self.positions[users[0]].single:
                    shares[name] = weighed(p, self.positions[users[0]].power.flatten(1))
                    continue
                uses = [*(bias_rows[i] for i in users), *(rows[k] for k in copies)]
                shares[name] = share(p, uses)
            elif name in self.tables:
                shares[name] = table_share(p, [(rows[k], t) for k, t in self.tables[name]])
        return shares

    def _rows(self, again: bool, span: range | None = None) -> dict[int, Tensor]:
        """Ask autograd for one output after another (of ``span``); {edge: [b, N, entries]}."""
        f, B, span = self.f, self.B, span or range(self.N)
        rows = {
            k: self.buffers.get(("row", k), (B, len(span), entries), f)
            for k, (_, entries) in self.rows.items()
        }
        for v, grads in self._products(again, span):
            for k, (layout, _) in self.rows.items():
                g = grads[k]
                if g is None:
                    rows[k][:, v] = 0
                else:
                    rows[k][:, v] = split(g, layout, B).flatten(1)
                del g
            for i, k in enumerate(self.out):
                if self.head is None or i != self.head.call:
                    self._take(i, v, grads[k])
            del grads  # the next ones go where these were
        return rows

    def _take(self, i: int, v: int, grad: Tensor | None) -> None:
        """Keep the row df_v/dz of a call."""
        self.positions[i].take(v, grad)

    def _products(self, again: bool, span: range) -> Iterator[tuple[int, Sequence[Tensor | None]]]:
        """The gradients at all edges, one output of ``span`` after another."""
        if self.batched:
            try:
                yield from self._batched_products(span)
                return
            except RuntimeError:
                self.batched = False  # some operation of the network cannot be batched
        for place, v in enumerate(span):
            picked = self.f[:, v] if self.directions is None else self.f * self.directions[:, v]
            yield place, gradients(picked.sum(), self.edges, again or place + 1 < len(span))

    def _batched_products(self, span: range) -> Iterator[tuple[int, Sequence[Tensor | None]]]:
        """The same, several at a time: a product of few rows waits for the weights to be read."""
        if self.directions is None:
            outputs = torch.arange(span.start, span.stop, device=self.f.device)
            directions = F.one_hot(outputs, self.N).to(self.f).unsqueeze(1)
        else:
            directions = self.directions[:, span.start : span.stop].movedim(1, 0)
        v = 0
        for part in directions.split(max(1, BATCHED_ROWS // self.B)):
            several = torch.autograd.grad(
                self.f,
                self.edges,
                part.expand(-1, *self.f.shape),
                retain_graph=True,  # it may fail midway
                allow_unused=True,
                is_grads_batched=True,
            )
            for j in range(len(part)):
                yield v + j, [None if g is None else g[j] for g in several]
            v += len(part)

    def _spectrum(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Singular values and rank; those beyond the width of the head are zero."""
        try:
            s, rank = singular_values(rows)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            check_finite(rows, self.forward.first, "gradient")
            raise
        missing = min(self.outputs, rows.shape[2]) - s.shape[1]
        return (s if missing == 0 else F.pad(s, (0, missing))), rank

    # -- what the rows say -------------------------------------------------------------------------

    def _input(self, rows: dict[int, Tensor]) -> dict[str, Tensor]:
        A = beside([rows[k] for k in self.inputs])
        self.input_power = A[:, 0].square()
        for v in range(1, A.shape[1]):
            self.input_power.addcmul_(A[:, v], A[:, v])
        x2 = beside([t.detach().flatten(1) for t in self.forward.fed]).double().square()
        self.input_spectrum = self._spectrum(A)
        return {
            "singular": self.input_spectrum[0],
            "rank": self.input_spectrum[1],
            "x_norm": x2.sum(1).sqrt(),
            "invariant": (self.input_power * x2).sum(1),
        }

    def _layer(
        self,
        i: int,
        rows: dict[int, Tensor],
        spectrum: tuple[Tensor, Tensor],
        gradient: Share | None,
        bias_rows: Tensor | None,
        shares: dict[str, Share],
    ) -> dict[str, Tensor]:
        call, positions = self.calls[i], self.positions[i]
        untied, untied_bias, patch_min = positions.energies()
        zeros = torch.zeros_like(untied)
        A, B = rows[self.total[i]], rows[self.through[i]]
        values = {"singular": spectrum[0], "rank": spectrum[1]}
        if A is not B:
            through = self._spectrum(B)
            gap = (A - B).double()
            values |= {"singular_through": through[0], "rank_through": through[1]}
            values |= {"bypass": relative(gap, A), "gap_norm": spectral_norm(gap)}
            values["chain"] = self._chain(i, rows)
        if self.beside_input[i]:
            whole = beside([rows[k] for k in self.inputs])
            mine = [A if k == self.below[i] else torch.zeros_like(rows[k]) for k in self.inputs]
            values["beside"] = relative(whole - beside(mine), whole)
        if gradient is None:
            gradient = shares[self.trainable[id(call.map.weight)]]
        bias = call.map.bias
        if bias is None or bias_rows is None:
            grad_bias = zeros
        elif (name := self.trainable.get(id(bias))) is not None:
            grad_bias = shares[name][0]
        else:
            grad_bias = share(bias, [bias_rows])[0]
        values |= {
            "grad_weight": gradient[0],
            "adaptive": gradient[1],
            "grad_bias": grad_bias,
            "x_norm": split(call.x, positions.layout, self.B).flatten(1).double().norm(dim=1),
            "patch_min": patch_min,
            "untied": untied,
            "untied_bias": untied_bias if positions.bias_per_position else zeros,
            "patch_rank": positions.patch_rank(self._bias_counts(i)) if self.full_rank else zeros,
        }
        if self.exact:
            values["untied_norm"] = untied_norms(positions)
        return values

    def _static(self, i: int) -> LayerChunk:
        call = self.calls[i]
        below, _ = self.graph.unviewed(get_gradient_edge(self.f))
        return LayerChunk(
            call.map,
            self.positions[i].T,
            call.x.numel() // self.B,
            reads_input=self.reads_input[i],
            is_output=self.forward.plain and below.node is self.graph.unviewed(call.out)[0].node,
            bias_counts=self._bias_counts(i),
        )

    def _bias_counts(self, i: int) -> bool:
        """Whether the bias is a trainable parameter with this one use, at each position."""
        name = self.trainable.get(id(self.calls[i].map.bias))
        return self.positions[i].bias_per_position and self.rules.get(name or "") == ([i], [])

    def _chain(self, i: int, rows: dict[int, Tensor]) -> Tensor:
        """How far A_i - B_i is from A_{i+1}: 0 in a chain of identity skips."""
        A, B = rows[self.total[i]], rows[self.through[i]]
        after = rows[self.total[i + 1]] if i + 1 < len(self.calls) else None
        if after is None or after.shape != A.shape:
            return A.new_full((self.B,), torch.inf, dtype=torch.float64)
        return relative(A - B - after, after)

    def _first(self, i: int, rows: dict[int, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """What Eqs. 37 and 44 ask of a dense layer that reads the input (FirstLayerProbe)."""
        positions = self.positions[i]
        sums: dict[str, Tensor] = {}
        u2 = positions.u[:, 0, :, 0].square()
        A2, B2 = (self._power(rows, k[i], u2) for k in (self.total, self.through))
        invariant = (B2 * u2).sum(1)  # J W is B, and u is x^l
        if u2.shape[1] <= WIDEST_CROSSED:
            sums["curvature"] = positions.power[:, 0].to(u2).mT @ u2
            sums["crossed"] = A2.mT @ u2
        return invariant, sums

    def _power(self, rows: dict[int, Tensor], k: int, like: Tensor) -> Tensor:
        """The squares of the rows at an edge, summed over outputs."""
        if [k] == self.inputs and self.input_power.dtype == like.dtype:
            return self.input_power
        return rows[k].to(like).square().sum(1)


def gradients(
    scalar: Tensor, edges: Sequence[GradientEdge], retain: bool
) -> Sequence[Tensor | None]:
    """The derivatives at each edge, none of them sparse."""
    try:
        found = torch.autograd.grad(scalar, edges, retain_graph=retain, allow_unused=True)
    except RuntimeError as error:
        if not isinstance(error, CheckpointError) and "use_reentrant" not in str(error):
            raise
        raise FlatlensError(
            "the model recomputes activations (gradient checkpointing), which hides its layers; "
            "switch that off while measuring"
        ) from error
    return [g if g is None or not g.is_sparse else g.to_dense() for g in found]


def beside(tensors: list[Tensor]) -> Tensor:
    """Tensors side by side in their last dimension; one alone is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


def _mixture(f: Tensor) -> Tensor:
    """Weights of the outputs that no symmetry of theirs takes to zero."""
    return torch.arange(f.shape[1], dtype=f.dtype, device=f.device).cos()


def relative(gap: Tensor, whole: Tensor) -> Float[Tensor, " b"]:
    """||gap||_F / ||whole||_F of each sample; 0 / 0 is 0, and anything else over 0 is inf."""
    off, size = (t.double().flatten(1).norm(dim=1) for t in (gap, whole))
    return torch.where(off > 0, off / size, 0.0)


def share(p: Tensor, uses: Sequence[Tensor | None]) -> Share:
    """A parameter's share of S and of the adaptive sharpness, from the rows of all its uses.

    The uses are added up before they are squared: one parameter has one gradient.
    """
    total = sum(u for u in uses if u is not None)
    assert isinstance(total, Tensor)
    return weighed(p, squares(total, 1))


def weighed(p: Tensor, power: Float[Tensor, "b numel"]) -> Share:
    """The same from the squares of its gradient, summed over outputs."""
    return summed(power), summed(power * p.detach().flatten().square())


def table_share(p: Tensor, looked_up: Sequence[tuple[Tensor, Lookup]]) -> Share:
    """The same of a table: a row's gradient is the sum over the places where a sample took it."""
    N = looked_up[0][0].shape[1]
    rows = torch.cat([g.unflatten(2, (-1, p.shape[1])) for g, _ in looked_up], 2)  # [b, N, T, d]
    indices = torch.cat([t.indices for _, t in looked_up], 1)
    kept = torch.cat([t.indices != t.padding for _, t in looked_up], 1)  # padding has no gradient
    first = (indices[:, :, None] == indices[:, None, :]).int().argmax(2)  # where it was met first
    places = first[:, None, :, None].expand(-1, N, -1, p.shape[1])
    total = torch.zeros_like(rows).scatter_add(2, places, rows * kept[:, None, :, None])
    squares = total.double().square().sum(1)  # [b, T, d]
    weights = p.detach()[indices].double().square()
    return squares.sum((1, 2)), (squares * weights).sum((1, 2))
