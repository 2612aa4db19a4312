"""Sharpness alone: no product reaches the input, and there are no spectra, norms or inequalities.

The gradient norm of a weight at few positions follows from two Gram matrices over positions, and
its gradient is never formed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatlens.layers import BLOCK_ENTRIES, CANCELLED, Patches, Positions, Rows, blocks, summed
from flatlens.products import TINY, Chunk, Key, Products


class ShortProducts(Products):
    """As Products, of ||df/dp||_F^2 alone."""

    def _plan_spectra(self) -> None:
        self._plan_outputs(with_input=self.head is not None)  # by which a head is checked

    def run(self, again: bool = False) -> Chunk:
        """All N products, and the norm of each parameter's gradient."""
        rows = self._checked_rows(again)
        energies = [self._energy(positions) for positions in self.positions]
        dense = {i for i, positions in enumerate(self.positions) if positions.dense}
        alone = {  # biases whose gradient is df/dz itself
            name: energies[users[0]]
            for name, (users, copies) in self.rules.items()
            if len(users) == 1 and users[0] in dense and not copies
        }
        biases = {i for n, (users, _) in self.rules.items() if n not in alone for i in users}
        bias_rows = [p.bias_rows() if i in biases else None for i, p in enumerate(self.positions)]
        shares = self._rule_shares(rows, bias_rows, alone)
        found = alone | {name: grad for name, (grad, _) in shares.items()}
        for group, owner in self.groups:
            if owner is None:
                continue
            if len(group) == 1 and group[0] in dense:
                u = self.positions[group[0]].u
                found[owner] = energies[group[0]] * u.square().sum((1, 2, 3), dtype=torch.float64)
            else:
                found[owner] = squared_norm([self.positions[i] for i in group])
        nothing = self.f.new_zeros(self.B, dtype=torch.float64)
        columns: dict[Key, Tensor] = {("output",): self.f.detach()}
        for name, _ in self.named:
            columns["parameter", name, "grad"] = found.get(name, nothing)
        return Chunk([], self.paths, columns, {}, None)

    def _energy(self, positions: Positions) -> Tensor:
        """||df/dz||_F^2 of each sample, float64; tiny derivatives go on in that."""
        size = torch.linalg.vector_norm(positions.rows.flatten(1), dim=1)
        if size.dtype == torch.float32 and bool((size < TINY).any()):
            positions.widen()
            size = torch.linalg.vector_norm(positions.rows.flatten(1), dim=1)
        return size.double().square()


def squared_norm(calls: list[Positions]) -> Tensor:
    """||grad_W f||_F^2 of the weight that all calls share, all outputs together; [b], float64.

    With J [N o, T] and u [i, T] the gradients are J u^T, and their squared norm is the sum of
    (J^T J) * (u^T u) over pairs of positions. It is formed where that is cheaper, or where signed
    terms cancel too far.
    """
    T = sum(c.T for c in calls)
    rows, i = calls[0].J.shape[2], calls[0].u.shape[2]
    route: Callable[[Rows, Patches], Tensor]
    if T == 1:
        route, entries = _outer, rows + i
    elif T * (rows + i) < rows * i:
        route, entries = _by_gram, T * (rows + i)
    else:
        route, entries = _by_forming, rows * i
    block = max(1, BLOCK_ENTRIES // (calls[0].u.shape[1] * entries))
    return torch.cat([route(*part) for part in blocks(calls, block)])


def _outer(J: Rows, u: Patches) -> Tensor:
    each = (t.square().sum((2, 3), dtype=torch.float64) for t in (J, u))
    return torch.mul(*each).sum(1)


def _by_gram(J: Rows, u: Patches) -> Tensor:
    pairs = (J.mT @ J) * (u.mT @ u)
    found = summed(pairs)
    if bool((found < CANCELLED[u.dtype] * summed(pairs.diagonal(dim1=2, dim2=3))).any()):
        return _by_forming(J, u)
    return found


def _by_forming(J: Rows, u: Patches) -> Tensor:
    return summed((u @ J.mT).square_())
