"""Collect the gradients of every parameter in small pieces, and sum their Gram matrix.

The strategy uses the same forward pass, plan and positions as the three strategies of ``passes``.
It stores factors of gradients (``factors``) instead of numbers per sample. A parameter whose
factors do not fit the memory waits for the next round over all samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.buffers import Buffers
from flatlens.capture.inputs import Inputs, check_finite
from flatlens.capture.recording import CapturePlan
from flatlens.gauss_newton.factors import (
    Factor,
    Lookups,
    Products,
    Vectors,
    gram_of,
    in_range,
    smaller,
)
from flatlens.passes.choice import Choice
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.derivative_rows import Rows, Setup, set_up
from flatlens.passes.exact import exact_rows
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.head_fallback import loss_directions
from flatlens.passes.independence import Layouts
from flatlens.passes.needs import GRADIENTS
from flatlens.passes.request import Request
from flatlens.passes.run import MakeStrategy
from flatlens.passes.tied_tables import tied_gradient

Gram = Float[Tensor, "r r"]
Key = tuple[str | int, ...]  # of a column


class TooLargeError(Exception):
    """Raised if the Gram matrix, or the factors of a single parameter, are larger than allowed."""


class Ledger:
    """The factors of some parameters for all samples so far.

    Attributes:
        memory: bytes that all factors may take.
        samples: number of all samples.
        largest: largest number of gradients of the Gram matrix.
        done: names of parameters of earlier rounds.
        waiting: names of parameters for later rounds.
        factors: by parameter, each factor with the index of its first gradient.
        gradients: number of gradients so far.
    """

    def __init__(
        self, memory: int, samples: int, largest: int, done: frozenset[str] = frozenset()
    ) -> None:
        self.memory, self.samples, self.largest, self.done = memory, samples, largest, done
        self.waiting: set[str] = set()
        self.factors: dict[str, list[tuple[int, Factor]]] = {}
        self.gradients = 0

    def check_size(self, outputs: int) -> None:
        """Raise if the Gram matrix is too large.

        Raises:
            TooLargeError: if all samples have more than ``largest`` gradients.
        """
        gradients = self.samples * outputs
        if gradients > self.largest:
            raise TooLargeError(
                f"{self.samples} samples of {outputs} outputs have {gradients} gradients, "
                f"more than max_size={self.largest}"
            )

    def add(self, factors: Iterator[tuple[str, Factor]], batch: int, gradients: int) -> None:
        """Add the factors of one chunk.

        Args:
            factors: the factor of each parameter.
            batch: samples of the chunk.
            gradients: gradients of the chunk.

        Raises:
            TooLargeError: if one parameter alone does not fit the memory.
        """
        used = sum(f.nbytes for entries in self.factors.values() for _, f in entries)
        for name, factor in factors:
            if name in self.done or name in self.waiting:
                continue
            samples_left = max(1, self.samples - self.gradients * batch // gradients)
            needed = factor.nbytes * samples_left // batch
            new = name not in self.factors
            if new and needed > self.memory:
                raise TooLargeError(
                    f"the gradients of {name} for all samples take {needed / 2**30:.1f} GiB"
                )
            if new and used + needed > self.memory and self.gradients == 0:
                self.waiting.add(name)
                continue
            used += needed if new else 0
            self.factors.setdefault(name, []).append((self.gradients, factor))
        self.gradients += gradients

    def names(self) -> list[str]:
        """Names of the parameters of this round."""
        return list(self.factors)

    def pending(self) -> set[str]:
        """Names of parameters whose Gram matrix is not computed yet."""
        return self.factors.keys() | self.waiting

    def gram_of(self, name: str, like: Gram) -> Gram:
        """Return the Gram matrix of one parameter's gradients; 0 for samples without it."""
        entries = self.factors.pop(name)
        small = gram_of([factor for _, factor in entries])
        if len(small) == len(like):
            return small
        places = torch.cat([torch.arange(start, start + f.count) for start, f in entries])
        K = torch.zeros_like(like)
        K[places[:, None].to(K.device), places.to(K.device)] = small
        return K


class GramStrategy:
    """The strategy that stores factors of all gradients.

    Args:
        subject: the network.
        request: the request of the caller.
        buffers: memory for the rows of one chunk.
        ledger: stores the factors.
    """

    def __init__(
        self, subject: Subject, request: Request, buffers: Buffers, ledger: Ledger
    ) -> None:
        self.subject, self.request, self.buffers, self.ledger = subject, request, buffers, ledger

    def run(self, inputs: Inputs, plan: CapturePlan, start: int = 0) -> Forward:
        """Run the network once."""
        return self.subject.run(inputs, plan, start)

    def measure(self, inputs: Inputs, forward: Forward, layouts: Layouts) -> ChunkColumns:
        """Store the factors of one chunk; the columns have the outputs, and zeros for gradients."""
        setup = set_up(
            forward, layouts, self.subject.named, self.buffers,
            target=loss_directions(self.request, forward), plain=self.request.root is None,
            use_head=False, needs=frozenset({GRADIENTS}),
        )  # fmt: skip
        self.ledger.check_size(setup.outputs)
        rows_by_edge = exact_rows(setup)
        factors = _factors(setup, rows_by_edge)
        self.ledger.add(factors, setup.batch, setup.batch * setup.outputs)
        zeros = setup.f.new_zeros(setup.batch, dtype=torch.float64)
        columns: dict[Key, Tensor] = {("output",): setup.f.detach()}
        columns |= {("parameter", name, "grad"): zeros for name, _ in setup.named}
        return ChunkColumns([], setup.plan.parameters.paths, columns)


def strategy_for(ledger: Ledger) -> MakeStrategy:
    """Return what ``passes.run.look`` calls to make its strategy."""

    def make(subject: Subject, request: Request, buffers: Buffers, _: Choice) -> GramStrategy:
        return GramStrategy(subject, request, buffers, ledger)

    return make


def _factors(setup: Setup, rows_by_edge: Rows) -> Iterator[tuple[str, Factor]]:
    """Yield the factor of every trainable parameter that the outputs of a chunk depend on."""
    plan, start = setup.plan.parameters, setup.forward.start
    for positions in setup.positions:
        check_finite(positions.store.flatten(1), start, "gradient")
    for group, owner in plan.groups:
        if owner is not None:
            yield owner, _weight(setup, group)
    for name, p in setup.named:
        if name in plan.slow:
            yield name, _vectors(rows_by_edge[plan.slow[name]], start)
        elif name in plan.rules:
            users, copies = plan.rules[name]
            uses = [setup.positions[i].bias_rows() for i in users]
            uses += [rows_by_edge[k] for k in copies]
            yield name, _vectors(torch.stack(uses).sum(0) if len(uses) > 1 else uses[0], start)
        elif name in plan.tied:
            yield name, _vectors(_tied(setup, rows_by_edge, name, p), start)
        elif name in plan.tables:
            yield name, _table(setup, rows_by_edge, name, p)


def _weight(setup: Setup, group: list[int]) -> Factor:
    """Return the factor of a weight that some calls share; their positions are joined."""
    calls = [setup.positions[i] for i in group]
    u = torch.cat([c.u for c in calls], -1) if len(calls) > 1 else calls[0].u.clone()
    J = torch.cat([c.J for c in calls], -1) if len(calls) > 1 else calls[0].J.clone()
    u, J = in_range(u), in_range(J)
    wide = torch.promote_types(u.dtype, J.dtype)
    layer = calls[0].layer
    entries = torch.arange(layer.weight.numel(), dtype=torch.float64, device=u.device)
    order = layer.as_matrix(entries.view(layer.weight.shape)).flatten().long()
    J = J.to(wide).unflatten(2, (setup.outputs, -1))
    return smaller(Products(u.to(wide), J, order))


def _vectors(gradients: Float[Tensor, "b N numel"], start: int) -> Vectors:
    check_finite(gradients.flatten(1), start, "gradient")
    return Vectors(in_range(gradients.clone()).flatten(0, 1))


def _tied(setup: Setup, rows_by_edge: Rows, name: str, p: Tensor) -> Float[Tensor, "b N numel"]:
    """Return the gradients of a table that is also the weight of layers."""
    plan = setup.plan.parameters
    calls = [setup.positions[i] for i in plan.tied[name]]
    looked_up = [(rows_by_edge[k], t) for k, t in plan.tables[name]]
    gradients = setup.f.new_empty(setup.batch, setup.outputs, p.numel())
    for sample in range(setup.batch):
        for output in range(setup.outputs):
            gradient = tied_gradient(p, calls, looked_up, sample, output)
            gradients[sample, output] = gradient.flatten()
    return gradients


def _table(setup: Setup, rows_by_edge: Rows, name: str, p: Tensor) -> Lookups:
    """Return the factor of a table from all its lookups; a padding row has no gradient."""
    looked_up = [(rows_by_edge[k], t) for k, t in setup.plan.parameters.tables[name]]
    values = torch.cat([g.unflatten(2, (-1, p.shape[1])) for g, _ in looked_up], 2)
    indices = torch.cat([t.indices for _, t in looked_up], 1)
    counts = torch.cat([t.indices != t.padding for _, t in looked_up], 1)
    check_finite(values.flatten(1), setup.forward.start, "gradient")
    return Lookups(in_range(values) * counts[:, None, :, None], indices.long(), len(p))
