"""The two storage formats of a layer's rows df_v/dz, one row for each output v."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class RowFormat(Protocol):
    """The layout of the stored rows; dimension 2 holds the outputs v."""

    def shape(
        self, matrix: torch.Size, batch: int, outputs: int, positions: int
    ) -> tuple[int, ...]:
        """Return the shape of the store; ``matrix`` is the weight's shape [g, o, i]."""

    def jacobian(self, store: Tensor) -> Float[Tensor, "b g No T"]:
        """Return all stored rows as one matrix per sample and group."""

    def at_one_position(self, store: Tensor) -> Float[Tensor, "b g N o"]:
        """Return the stored rows of a layer with one position."""

    def bias_rows(self, store: Tensor) -> Float[Tensor, "b N o"]:
        """Return the derivative with respect to a bias that is added at each position."""


class RowsByGroup:
    """[b, g, N, o, T]: the positions come last, as in the weight-sharing format."""

    def shape(
        self, matrix: torch.Size, batch: int, outputs: int, positions: int
    ) -> tuple[int, ...]:
        return (batch, matrix[0], outputs, matrix[1], positions)

    def jacobian(self, store: Tensor) -> Float[Tensor, "b g No T"]:
        return store.flatten(2, 3)

    def at_one_position(self, store: Tensor) -> Float[Tensor, "b g N o"]:
        return store.squeeze(-1)

    def bias_rows(self, store: Tensor) -> Float[Tensor, "b N o"]:
        return store.sum(-1).movedim(2, 1).flatten(2)


class RowsByPosition:
    """[b, T, N, o]: the order of a linear layer, whose rows are then stored without reordering.

    [N o, T] is one matrix per sample without a further copy.
    """

    def shape(
        self, matrix: torch.Size, batch: int, outputs: int, positions: int
    ) -> tuple[int, ...]:
        return (batch, positions, outputs, matrix[1])

    def jacobian(self, store: Tensor) -> Float[Tensor, "b 1 No T"]:
        return store.flatten(2).mT.unsqueeze(1)

    def at_one_position(self, store: Tensor) -> Float[Tensor, "b 1 N o"]:
        return store

    def bias_rows(self, store: Tensor) -> Float[Tensor, "b N o"]:
        return store[:, 0] if store.shape[1] == 1 else store.sum(1)


BY_GROUP = RowsByGroup()
BY_POSITION = RowsByPosition()
