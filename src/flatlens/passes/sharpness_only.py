"""Sharpness alone: no product reaches the input, and there are no spectra, norms or inequalities.

The gradient norm of a weight at few positions follows from two Gram matrices over positions, and
its gradient is never formed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatlens.algebra.weight_gradients import squared_norm
from flatlens.capture.positions import TINY, Positions, split
from flatlens.passes.products import BATCHED_ROWS, Chunk, Key, Products

AT_ONCE = 10  # products whose rows are kept together: more take memory and are no faster


class ShortProducts(Products):
    """As Products, of ||df/dp||_F^2 alone."""

    def __init__(self, *args: Any, at_once: int = AT_ONCE) -> None:
        self.at_once, self.first = at_once, 0  # the first of the products at hand
        super().__init__(*args)

    def _plan_spectra(self) -> None:
        self._plan_outputs(with_input=self.head is not None)  # by which a head is checked

    def _plan_parameters(self) -> None:
        super()._plan_parameters()
        joined = [group for group, owner in self.groups if owner is not None and len(group) > 1]
        joined += [users for users, copies in self.rules.values() if copies or len(users) > 1]
        together = {i for group in joined for i in group}
        # The norm of each row of df/dz where a dense layer shares no parameter: all they are for.
        self.sizes = {
            i: self.f.new_zeros(self.B, self.N, dtype=torch.float64)
            for i, positions in enumerate(self.positions)
            if positions.dense and i not in together
        }

    def _rows_at(self, i: int) -> int:
        return 0  # they come a few at a time

    def _take(self, i: int, v: int, grad: Tensor | None) -> None:
        if i not in self.sizes:
            super()._take(i, v, grad)
        elif grad is None:
            self.sizes[i][:, self.first + v] = 0
        else:
            row = split(grad, self.positions[i].layout, self.B).reshape(self.B, -1)
            self.sizes[i][:, self.first + v] = _norms(row)

    def run(self, again: bool = False) -> Chunk:
        """All N products, some at a time, and the norm of each parameter's gradient."""
        head = self.head
        direct = self.f.new_zeros(()) if head is None else self._direct()
        mixed = torch.zeros_like(direct)
        few = max(self.at_once, BATCHED_ROWS // self.B if self.batched else 0)
        found: dict[str, Tensor] = {}
        for first in range(0, self.N, few):
            self.first, span = first, range(first, min(first + few, self.N))
            for positions in self.positions:
                positions.begin(len(span))
            rows = self._rows(again or span.stop < self.N, span)
            if head is not None:
                mixed += self._mixed(head, rows, first)
            for name, part in self._kept(rows).items():
                found[name] = found[name] + part if name in found else part
        if head is not None:
            self._check_head(direct, mixed)
            self.sizes[head.call] = _norms(head.jacobian)
        found |= self._by_sizes()
        nothing = self.f.new_zeros(self.B, dtype=torch.float64)
        columns: dict[Key, Tensor] = {("output",): self.f.detach()}
        for name, _ in self.named:
            columns["parameter", name, "grad"] = found.get(name, nothing)
        return Chunk([], self.paths, columns, {}, None)

    def _by_sizes(self) -> dict[str, Tensor]:
        """Parameters of dense layers: the gradient of a bias is df/dz, of a weight df/dz x^T."""
        energies = {i: sizes.double().square().sum(1) for i, sizes in self.sizes.items()}
        found = {
            name: energies[users[0]]
            for name, (users, _) in self.rules.items()
            if users and users[0] in energies
        }
        for group, owner in self.groups:
            if owner is not None and group[0] in energies:
                size = _norms(self.positions[group[0]].u.flatten(1))
                found[owner] = energies[group[0]] * size.double().square()
        return found

    def _kept(self, rows: dict[int, Tensor]) -> dict[str, Tensor]:
        """All other parameters, from the rows of some outputs."""
        for i, positions in enumerate(self.positions):
            if i not in self.sizes:
                self._widen_tiny(positions)
        others = {n: users for n, (users, _) in self.rules.items() if not self.sizes.keys() & users}
        biases = {i for users in others.values() for i in users}
        bias_rows = [p.bias_rows() if i in biases else None for i, p in enumerate(self.positions)]
        shares = self._rule_shares(rows, bias_rows, self.rules.keys() - others)
        found = {name: grad for name, (grad, _) in shares.items()}
        for group, owner in self.groups:
            if owner is not None and group[0] not in self.sizes:
                found[owner] = squared_norm([self.positions[i] for i in group])
        return found

    def _widen_tiny(self, positions: Positions) -> None:
        """Derivatives that are tiny go on in float64."""
        rows = positions.rows.flatten(1)
        if rows.dtype == torch.float32 and bool((rows.norm(dim=1) < TINY).any()):
            positions.widen()


def _norms(rows: Tensor) -> Tensor:
    """The norm of each row; in float64 where squares of float32 may vanish.

    To look costs less than float64 does on a processor, and holds up a device beside it.
    """
    if rows.device.type == "cpu":
        found = torch.linalg.vector_norm(rows, dim=-1)
        if rows.dtype == torch.float64 or float(found.min()) >= TINY:
            return found
    return torch.linalg.vector_norm(rows.double(), dim=-1)
