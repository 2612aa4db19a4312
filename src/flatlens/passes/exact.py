"""The one pass: forward once, one vector-Jacobian product per output, everything else is algebra.

Samples go through in chunks, so memory does not grow with n. Autograd is asked only for the
gradients at the captured edges (``capture``); weight gradients are never formed by it. Two small
trial runs, on one sample and on two, tell where each tensor keeps its samples and whether a sample
measured alone equals itself in a batch. Where that cannot be told, or a parameter is used in a way
that no rule covers, samples are measured one at a time: slower, and exact for any network.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn.parameter import is_lazy

from flatlens.algebra.operator_norms import weight_norms
from flatlens.capture.inputs import COUPLED, Inputs, batches, check_alone, check_finite, outputs
from flatlens.capture.no_trace import in_float, original, untouched
from flatlens.capture.positions import Buffers, Layout, close, find_layout, occurrences
from flatlens.capture.recorder import Call, Graph, LinearMap, Plan, Recorder
from flatlens.errors import FlatlensError
from flatlens.passes.head import products
from flatlens.passes.products import (
    Chunk,
    Forward,
    Key,
    LayerChunk,
    NeedsEachOutputError,
    NeedsSinglesError,
    Products,
    gradients,
)
from flatlens.passes.sharpness_only import AT_ONCE, ShortProducts
from flatlens.probes import FirstLayerProbe, InputProbe, LayerProbe, ParameterProbe, Probe

WORKING_SET = 128 << 20  # bytes that a chunk may take by default: more is slower, not faster
SHORT_SET = 48 << 20  # the same for sharpness alone, which keeps less
FEWEST, SHORT_FEWEST = 8, 5  # samples of a default chunk if they take less than MOST
MOST = 1 << 28
ENOUGH = 8  # where memory allows fewer samples, fewer of their rows are kept at a time
LARGEST, SHORT_LARGEST = 100, 256  # dense products of 200 to 400 rows are the fastest
Root = Callable[[Tensor, slice], Tensor]  # outputs and which samples -> R^T of the loss, [b, k, N]
NORMS = ("operator", "kernel", "frobenius")
PATHS = ("unused", "frozen", "layer", "rule", "slow")  # in the order in which one overrides another


def probe(
    model: nn.Module,
    x: Any,
    *,
    chunk: int | None = None,
    memory: int | None = None,
    output: Any = None,
    weight_norm: str = "operator",
    exact_untied: bool = False,
) -> Probe:
    """Measure a network exactly: one forward and N vector-Jacobian products per sample.

    Args:
        model: any module; it is measured in evaluation mode and left exactly as found.
        x: a tensor with samples first, a tuple (positional) or dict (by name) of tensors, or an
            iterable of batches; a pair from an iterable is read as (inputs, targets).
        chunk: samples at a time, at most. By default chosen from the model. With 1 each is fed by
            itself, also to a network in which those of a batch change one another.
        memory: bytes that the pass may use beyond the model and its inputs, instead of ``chunk``.
        output: key, index, attribute or function that selects f(x) from what the model returns.
        weight_norm: which norm is ``LayerProbe.norm``: "operator", "kernel" or "frobenius".
        exact_untied: also find ||D^-1 C||_2 of each convolution and sample (an iteration each) for
            the tightest form of the untied bound, ``bounds(p, exact=True)``.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(3, 2, bias=False).double()
        >>> _ = torch.nn.init.ones_(net.weight)
        >>> p = fl.probe(net, torch.ones(1, 3).double())
        >>> round(float(p.layers[0].grad_weight[0]), 9)  # N ||x||^2
        6.0
    """
    return probe_batches(
        model,
        (batch for batch, _ in batches(x)),
        chunk=chunk,
        memory=memory,
        output=output,
        weight_norm=weight_norm,
        run=partial(Pass, exact=exact_untied),
    )


def probe_batches(
    model: nn.Module,
    inputs: Iterable[Inputs],
    *,
    chunk: int | None,
    memory: int | None,
    output: Any,
    weight_norm: str,
    root: Root | None = None,
    run: Callable[..., Pass] | None = None,
) -> Probe:
    """``probe`` over batches of inputs, taken as they come, with ``run`` (default: Pass)."""
    if weight_norm not in NORMS:
        raise FlatlensError(
            f"weight_norm={weight_norm!r} is unknown; use one of {', '.join(NORMS)}"
        )
    if chunk is not None and chunk < 1:
        raise FlatlensError(f"chunk={chunk} is not a number of samples; give 1 or more")
    model, dtype, notes = in_float(original(model))
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise FlatlensError(
            f"{', '.join(lazy)} have no values yet; run the model once on a sample before measuring"
        )
    with untouched(model):
        taking = (run or Pass)(model, dtype, output, chunk, memory, root)
        for batch in inputs:
            taking.take(batch.floats(dtype) if notes else batch)
        return taking.finish(weight_norm).with_notes(*notes)


class Pass:
    """Takes batches of inputs, chunk by chunk, and puts the Probe together."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        output: Any,
        chunk: int | None,
        memory: int | None,
        root: Root | None = None,
        exact: bool = False,
        short: bool = False,
        adaptive: bool = True,
    ) -> None:
        self.model, self.dtype, self.output, self.exact = model, dtype, output, exact
        self.short, self.adaptive = short, adaptive  # sharpness alone; adaptive sharpness, too
        self.root, self.heads = root, True
        self.chunk, self.memory, self.at_once = chunk, memory, AT_ONCE
        self.named = list(model.named_parameters())
        self.known = {id(p) for _, p in self.named}
        self.plan: Plan | None = None
        self.solo: Tensor | None = None  # f of the first sample, where each is measured alone
        self.layouts: list[Layout | None] = []
        self.chunks: list[Chunk] = []
        self.notes: list[str] = []
        self.sums: dict[str, Tensor] = {}
        self.shapes: dict[Key, torch.Size] = {}
        self.signature: list[Any] = []
        self.buffers = Buffers()
        self.tables: list[Tensor] = []  # one a batch: samples x all columns
        self.batch, self.filled = 0, 0
        self.n, self.M = 0, 0

    def take(self, inputs: Inputs) -> None:
        """Measure one batch of inputs."""
        if inputs.n == 0:
            raise FlatlensError("there are no samples (n = 0); give at least one")
        for t in inputs.floating:
            check_finite(t, self.n, "input")
        self.batch, self.filled = inputs.n, 0
        if self.plan is None:
            self._trial(inputs)
        for rows in _progress(inputs.n, self.chunk or inputs.n):
            part = inputs.take(rows)
            if self.chunk != 1:
                try:
                    self._absorb(self._measure(part))
                    continue
                except NeedsSinglesError as why:
                    self._one_at_a_time(str(why))
            for i in range(part.n):
                self._absorb(self._measure(part.take(slice(i, i + 1))))

    def _absorb(self, chunk: Chunk) -> None:
        """Keep a chunk's per-sample numbers; what is a sum over samples is added up at once.

        The numbers go into one table for the batch: hundreds of small ones, made while the large
        tensors of a chunk were there, would scatter over the heap and keep it from being reused.
        """
        for name, part in chunk.sums.items():
            if name in self.sums:
                self.sums[name] += part
            else:
                self.sums[name] = part.double()
        shapes = {key: column.shape[1:] for key, column in chunk.columns.items()}
        signature = [shapes, *(_signature(layer) for layer in chunk.layers)]
        if not self.chunks:
            self.shapes, self.signature = shapes, signature
        elif signature != self.signature:
            raise FlatlensError(
                "the network calls other layers for other samples; measure samples that take the "
                "same path together"
            )
        for layer, before in zip(
            chunk.layers, self.chunks[0].layers if self.chunks else chunk.layers, strict=True
        ):
            self._check_same_weight(layer.map, before.map)
        grads = [chunk.columns["parameter", name, "grad"] for name, _ in self.named]
        if grads:
            check_finite(torch.stack(grads, 1), self.n, "gradient")
        columns = [column.reshape(len(column), -1).double() for column in chunk.columns.values()]
        block = torch.cat(columns, 1)
        if self.filled == 0:
            self.tables.append(block.new_empty(self.batch, block.shape[1]))
        self.tables[-1][self.filled : self.filled + len(block)] = block
        self.filled += len(block)
        self.n += len(block)
        chunk.columns, chunk.sums = {}, {}
        self.chunks.append(chunk)

    def _check_same_weight(self, layer: LinearMap, before: LinearMap) -> None:
        """Refuse samples that use different weights: one norm would not bound all of them."""
        weight, other = layer.weight, before.weight
        if weight is other or (
            weight.requires_grad == other.requires_grad
            and {id(weight), id(other)}.isdisjoint(self.known)
            and torch.equal(weight, other)
        ):
            return
        raise FlatlensError(
            f"some samples use the weight of {self._name(layer)} where others use "
            f"{self._name(before)} or other values of it (routing, experts, or weights computed "
            "from the sample); measure samples that use the same weights together"
        )

    # -- trial runs ------------------------------------------------------------------------------

    def _trial(self, inputs: Inputs) -> None:
        """Learn the layouts from one sample and two, and choose the chunk."""
        one = inputs.take(slice(0, 1))
        solo = self._forward(one, Plan())
        calls = solo.recorder.calls
        if not calls:
            raise FlatlensError("the network calls no linear or convolutional layer to measure")
        clone, alone = solo.recorder.overwritten(), self.chunk == 1
        self._choose_chunk(inputs.n, solo)
        if not any(edge.node in solo.graph.nodes for edge in solo.edges):
            self.notes.append("no derivative by the input (detached, or under no_grad): it is 0")
        self.layouts = [None] * len(calls)
        self.plan = Plan(None, clone)
        if inputs.n == 1 or alone:
            self.chunk, self.solo = 1, solo.f.detach()
            return
        two = inputs.take(slice(0, 2))
        if self.chunk == 1:  # no room for the graph of both
            check_alone(self._plain(two)[:1], solo.f, partial(self._plain, one))
            return
        pair = self._forward(two, Plan())
        check_alone(pair.f[:1], solo.f, partial(self._plain, one))
        if len(calls) != len(pair.recorder.calls):
            self._one_at_a_time("the number of layer calls depends on the batch")
            return
        dims = _batch_dims(solo.recorder.events, pair.recorder.events)
        self.plan = Plan(dims, clone | pair.recorder.overwritten())
        self.layouts = [_call_layout(a, b) for a, b in zip(calls, pair.recorder.calls, strict=True)]
        for call, layout in zip(calls, self.layouts, strict=True):
            if layout is None:
                self._one_at_a_time(f"which rows of {self._name(call.map)} are whose is unclear")
                return
        try:
            if pair.recorder.events:  # with one copy of a parameter per sample
                pair = self._forward(two, self.plan)
            for i in range(2):
                self._check_owners(pair, slice(i, i + 1))
        except NeedsSinglesError as why:
            self._one_at_a_time(str(why))

    def _plain(self, inputs: Inputs) -> Tensor:
        """f alone; nothing is kept for derivatives, though as if they followed: without them torch
        takes other ways."""
        with saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
            return outputs(inputs.map(_fed), self.model, self.output).detach()

    def _rows_needed(self, solo: Forward) -> int:
        """How many products the network takes."""
        call = solo.recorder.calls[-1]
        return products(solo.graph, solo.f, call) or solo.f.shape[1]

    def _choose_chunk(self, n: int, solo: Forward) -> None:
        rows = self._rows_needed(solo)
        if self.short:
            rows = min(rows, AT_ONCE)
        size = self._bytes_per_sample(solo.recorder, rows)
        most = MOST if self.memory is None else self.memory // min(n, ENOUGH)
        while self.short and rows > 1 and size > most:
            rows //= 2
            size = self._bytes_per_sample(solo.recorder, rows)
        if self.memory is not None:
            if size > self.memory:
                raise FlatlensError(
                    f"one sample needs about {size:,} bytes, more than memory={self.memory:,}; "
                    "raise it, or measure fewer outputs with output="
                )
            self.chunk = min(self.memory // size, self.chunk or n)
        elif self.chunk is None:
            limits = (SHORT_FEWEST, SHORT_SET, SHORT_LARGEST)
            fewest, room, largest = limits if self.short else (FEWEST, WORKING_SET, LARGEST)
            self.chunk = max(1, min(fewest, MOST // size), min(room // size, largest))
        self.at_once = rows

    def _one_at_a_time(self, why: str) -> None:
        assert self.plan is not None
        self.notes.append(f"samples measured one at a time ({why})")
        self.chunk, self.plan = 1, replace(self.plan, batch_dims=None)
        self.layouts = [None] * len(self.layouts)

    def _bytes_per_sample(self, recorder: Recorder, N: int) -> int:
        """An estimate of what one sample needs while its chunk runs."""
        entries = 0
        for c in recorder.calls:
            outputs, weight = prod(c.map.out_shape), c.map.weight
            unrolled = 0 if c.map.geometry is None else outputs // len(weight) * weight[0].numel()
            dense = c.map.geometry is None and c.x.numel() == c.map.matrix.shape[2]
            rows = 0 if self.short and dense else N
            entries += (3 + rows) * (c.x.numel() + outputs) + unrolled
        seen = {id(t) for c in recorder.calls for t in (c.map.weight, c.map.bias)}
        seen |= {id(t.parameter) for t in recorder.lookups}
        others = (p.numel() for _, p in self.named if p.requires_grad and id(p) not in seen)
        entries += (3 + N) * sum(others)
        entries += sum((3 + N) * t.indices.numel() * t.parameter.shape[1] for t in recorder.lookups)
        return entries * torch.finfo(self.dtype).bits // 8 + N * N * 8

    # -- one chunk -------------------------------------------------------------------------------

    def _forward(self, inputs: Inputs, plan: Plan) -> Forward:
        fed = inputs.map(_fed)
        edges = [get_gradient_edge(t) for t in fed.floating]
        values = [t.detach() for t in inputs.floating]
        recorder = Recorder(self.model, inputs.n, plan, () if values else inputs.tensors)
        with recorder:
            f = outputs(fed, self.model, self.output)
        if not values:
            values, edges = self._embedded(recorder, inputs.n)
        self.M = sum(t[0].numel() for t in values)
        if made := [name for name, p in self.model.named_parameters() if id(p) not in self.known]:
            raise FlatlensError(
                f"{', '.join(made)} did not exist before the model was run; now they do: measure "
                "it again"
            )
        if not f.requires_grad:
            raise FlatlensError(
                "the output does not depend differentiably on the input; it may be detached, "
                "rounded or an argmax: select the raw output with output="
            )
        check_finite(f.detach(), self.n, "output")
        return Forward(values, edges, recorder, f)

    def _embedded(self, recorder: Recorder, n: int) -> tuple[list[Tensor], list[GradientEdge]]:
        """What stands for an input of integers: the output of its embedding."""
        if not recorder.embedded or any(len(t) != n for t, _ in recorder.embedded):
            raise FlatlensError(
                "the input is of integers, by which nothing can be differentiated, and no "
                "nn.Embedding reads it; feed the network the floating-point tensor behind them"
            )
        return [t for t, _ in recorder.embedded], [edge for _, edge in recorder.embedded]

    def _measure(self, inputs: Inputs) -> Chunk:
        try:
            return self._products(inputs).run()
        except NeedsEachOutputError:
            self.heads = False
            return self._products(inputs).run()

    def _products(self, inputs: Inputs) -> Products:
        """Forward once, see that samples are independent, and plan the products."""
        assert self.plan is not None
        forward = self._forward(inputs, self.plan)
        if self.plan.clone is not None and forward.recorder.overwritten() - self.plan.clone:
            self.plan = replace(self.plan, clone=None)
            forward = self._forward(inputs, self.plan)
        self._check_alone(inputs, forward)
        if self.n == 0 and self.solo is not None:  # no other sample was compared with it
            check_alone(forward.f, self.solo, partial(self._plain, inputs))
        layouts = self.layouts if inputs.n > 1 else [None] * len(forward.recorder.calls)
        forward.plain, forward.first = self.root is None, self.n
        forward.directions = self._directions(forward.f, inputs.n)
        full = partial(Products, adaptive=self.adaptive)
        kind = partial(ShortProducts, at_once=self.at_once) if self.short else full
        return kind(forward, layouts, self.named, self.exact, self.buffers, self.heads)

    def _directions(self, f: Tensor, n: int) -> Tensor | None:
        """What is measured of the outputs: [b, k, N], or None for each of them."""
        return None if self.root is None else self.root(f.detach(), slice(self.n, self.n + n))

    def _check_alone(self, inputs: Inputs, forward: Forward) -> None:
        """Some samples without the others: they and their rows must be the same as here."""
        if inputs.n == 1:
            return
        assert self.plan is not None
        calls, batch = forward.recorder.calls, inputs.n
        some = slice(1, None, max(2, batch // 4 | 1))  # an odd step: even and odd places
        few = self._forward(inputs.take(some), self.plan)
        check_alone(forward.f[some], few.f, partial(self._plain, inputs.take(some)))
        if not len(calls) == len(few.recorder.calls) == len(self.layouts):
            raise NeedsSinglesError("the number of layer calls depends on the samples")
        for call, other, layout in zip(calls, few.recorder.calls, self.layouts, strict=True):
            if not (
                layout is not None
                and layout.fits(call.x, batch)
                and layout.fits(other.x, len(few.f))
                and close(layout.split(call.x, batch)[some], layout.split(other.x, len(few.f)))
            ):
                name = self._name(call.map)
                raise NeedsSinglesError(f"which rows of {name} are whose depends on the samples")
        if len(few.f) > 1 and self._could_be_anyones(few.recorder):
            self._check_owners(few, slice(0, len(few.f) // 2))

    def _could_be_anyones(self, recorder: Recorder) -> bool:
        """Whether there are rows that do not tell by their values whose they are."""
        if recorder.copies or recorder.lookups:
            return True
        for call, layout in zip(recorder.calls, self.layouts, strict=True):
            assert layout is not None
            first, second, *_ = layout.split(call.x, recorder.batch)
            if torch.equal(first, second):
                return True
        return False

    def _check_owners(self, forward: Forward, some: slice) -> None:
        """The outputs of some samples must reach no row that is another's."""
        recorder, batch = forward.recorder, len(forward.f)
        places = [(edge, Layout()) for edge in forward.edges]
        if len(recorder.calls) != len(self.layouts):
            raise NeedsSinglesError("the number of layer calls depends on the batch")
        for call, layout in zip(recorder.calls, self.layouts, strict=True):
            if layout is None or not layout.fits(call.x, batch):
                raise NeedsSinglesError(f"which rows of {self._name(call.map)} are whose varies")
            places += [(e, layout) for e in (call.out, call.through, call.total) if e is not None]
        places += [(copies.edge, Layout(copies.dim)) for copies in recorder.copies]
        places += [(lookup.edge, Layout()) for lookup in recorder.lookups]
        mixed = (forward.f[some] * forward.f[some].detach().cos()).sum()
        grads = gradients(mixed, [edge for edge, _ in places], True)
        others = torch.ones(batch, dtype=torch.bool)
        others[some] = False
        reached = []
        for grad, (_, layout) in zip(grads, places, strict=True):
            rows = forward.f.new_zeros(batch) if grad is None else layout.split(grad, batch).abs()
            reached.append(rows[others].max() > 1e-6 * rows.max())
        found = torch.stack(reached).tolist()
        if any(found[: len(forward.edges)]):
            raise FlatlensError(COUPLED)
        if any(found):
            raise NeedsSinglesError("rows of one sample reach the outputs of another")

    # -- putting it together ---------------------------------------------------------------------

    def finish(self, weight_norm: str) -> Probe:
        """One Probe from all chunks."""
        if not self.chunks:
            raise FlatlensError("there are no samples (n = 0); give at least one")
        self.buffers.leave()
        first, arrays = self.chunks[0], self._unpacked()
        if self.short:
            unknown = np.full(self.n, np.nan)
            arrays["input",] = dict.fromkeys(("x_norm", "invariant"), unknown)
            arrays["input",] |= {"singular": unknown[:, None], "rank": np.full(self.n, -1)}
            for name, _ in self.named:
                arrays["parameter", name]["adaptive"] = unknown
        names = self._names([layer.map for layer in first.layers])
        extra = None
        if first.first is not None:
            extra = FirstLayerProbe(
                weight=first.first.double().cpu().numpy(),
                **arrays["first",],
                **{name: total.div_(self.n).cpu().numpy() for name, total in self.sums.items()},
            )
        f = arrays["output",][""]
        return Probe(
            n=self.n,
            N=f.shape[1],
            M=self.M,
            dtype=self.dtype,
            output=f,
            input=InputProbe(**arrays["input",]),
            layers=[
                self._layer(i, name, arrays["layer", i], weight_norm)
                for i, name in enumerate(names)
            ],
            parameters=[
                ParameterProbe(name, p.numel(), self._path(name), **arrays["parameter", name])
                for name, p in self.named
            ],
            first=extra,
            chunk=self.chunk or self.n,
            notes=self.notes,
        )

    def _unpacked(self) -> dict[Any, dict[str, np.ndarray]]:
        """The columns of all chunks: {what: {quantity: array over samples}}."""
        tables, start = self.tables, 0
        table = (tables[0] if len(tables) == 1 else torch.cat(tables)).cpu().numpy()
        arrays: dict[Any, dict[str, np.ndarray]] = {}
        for key, shape in self.shapes.items():
            column = table[:, start : start + shape.numel()].reshape(self.n, *shape)
            start += shape.numel()
            *what, quantity = key if len(key) > 1 else (*key, "")
            whole = str(quantity).startswith("rank")
            found = column.astype(np.int64) if whole else column
            arrays.setdefault(tuple(what), {})[str(quantity)] = found
        return arrays

    def _layer(
        self, i: int, name: str, arrays: dict[str, np.ndarray], weight_norm: str
    ) -> LayerProbe:
        parts = [chunk.layers[i] for chunk in self.chunks]
        first, layer = parts[0], parts[0].map
        owned = {id(p): n for n, p in self.named}
        norms = weight_norms(layer)
        groups, d_out, d_in = layer.matrix.shape
        fewest, most = occurrences(layer)
        if "bypass" not in arrays:  # A is B
            zeros = np.zeros(self.n)
            arrays |= {"bypass": zeros, "gap_norm": zeros, "chain": zeros + np.inf}
            arrays["singular_through"] = arrays["singular"]
            arrays["rank_through"] = arrays["rank"]
        arrays.setdefault("beside", np.zeros(self.n))
        return LayerProbe(
            name=name,
            kind=layer.kind,
            weight=owned.get(id(layer.weight)),
            bias=owned.get(id(layer.bias)),
            has_bias=layer.bias is not None,
            bias_counts=all(p.bias_counts for p in parts),
            positions=first.positions,
            groups=groups,
            in_features=d_in,
            out_features=d_out,
            M=first.M,
            reads_input=all(p.reads_input for p in parts),
            norms=norms,
            norm=getattr(norms, weight_norm),
            kappa=most,
            fewest=fewest,
            is_output=all(p.is_output for p in parts),
            **arrays,
        )

    def _path(self, name: str) -> str:
        return max((chunk.paths[name] for chunk in self.chunks), key=PATHS.index)

    def _names(self, maps: list[LinearMap]) -> list[str]:
        seen: dict[str, int] = {}
        names = []
        for layer in maps:
            name = self._name(layer)
            seen[name] = seen.get(name, 0) + 1
            names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
        return names

    def _name(self, layer: LinearMap) -> str:
        """Layers are named after the parameters behind their weight."""
        owned = {id(t): n for n, t in [*self.named, *self.model.named_buffers()]}
        if id(layer.weight) in owned:
            found = [owned[id(layer.weight)]]
        elif layer.weight.requires_grad:
            found = [name for i, name in owned.items() if i in Graph(layer.weight).leaves]
        else:
            found = []
        if not found:
            return layer.kind
        parts = [name.split(".") for name in found]
        prefix = [p[0] for p in zip(*parts, strict=False) if len(set(p)) == 1]
        if "parametrizations" in prefix:
            return ".".join(prefix[: prefix.index("parametrizations")]) or layer.kind
        name = ".".join(prefix)
        if len(found) > 1:
            return name or layer.kind
        return name.removesuffix("weight").rstrip("._") or name


def _fed(t: Tensor) -> Tensor:
    """A copy of an input that the model may overwrite and that gradients arrive at."""
    if not t.is_floating_point():
        return t
    leaf = (t.clone() if t.is_inference() else t.detach()).requires_grad_()
    return leaf.clone()


def _batch_dims(one: list[torch.Size], two: list[torch.Size]) -> tuple[int | None, ...] | None:
    """Where a result's size went from 1 to 2 with the batch, and nowhere else."""
    if len(one) != len(two):
        return None
    dims: list[int | None] = []
    for a, b in zip(one, two, strict=True):
        grown = [d for d in range(len(a)) if a[d] != b[d]] if len(a) == len(b) else []
        dims.append(grown[0] if len(grown) == 1 and (a[grown[0]], b[grown[0]]) == (1, 2) else None)
    return tuple(dims)


def _call_layout(one: Call, two: Call) -> Layout | None:
    """The layout of a call's input; features and pixels cannot hold the samples."""
    layout = find_layout(one.x, two.x)
    last = one.x.dim() - 2 if one.map.geometry is None else 0
    return layout if layout is not None and layout.dim <= last else None


def _signature(layer: LayerChunk) -> tuple[Any, ...]:
    return layer.map.kind, layer.map.weight.shape, layer.map.geometry, layer.positions, layer.M


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A progress bar on a terminal, for work of more than a few chunks."""
    if total < 4 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("probing", total=total)
        yield lambda: progress.advance(task)


def _progress(n: int, chunk: int) -> Iterator[slice]:
    """Chunks of at most so many samples, all about as large: a small last one costs as much."""
    starts = range(0, n, -(-n // -(-n // chunk)))
    with _bar(len(starts)) as advance:
        for s in starts:
            yield slice(s, min(s + starts.step, n))
            advance()
