"""Linear layers, on vectors or on tokens: z = x W^T + b, or x W + b with a transposed weight."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.operator_norms import Norm, matrix_norm
from flatlens.capture.kinds.broadcast import broadcast
from flatlens.capture.layer import Memory
from flatlens.capture.layout import Layout, split
from flatlens.capture.recording import Recording
from flatlens.capture.row_formats import BY_POSITION, RowFormat


@dataclass(frozen=True)
class Linear:
    """A linear layer. ``turned`` says that its weight is stored as [d_in, d_out]."""

    weight: Tensor
    bias: Tensor | None
    in_shape: torch.Size
    out_shape: torch.Size
    turned: bool = False
    kind: str = "linear"

    @property
    def matrix(self) -> Float[Tensor, "1 o i"]:
        return self.as_matrix(self.weight.detach())

    @property
    def way(self) -> Hashable:
        return (self.kind, self.turned)

    @property
    def joins(self) -> Hashable:
        return self.way

    @property
    def is_linear(self) -> bool:
        return True

    @property
    def bias_per_position(self) -> bool:
        return self.bias is not None

    def can_hold_samples(self, dim: int) -> bool:
        return dim < len(self.in_shape) - 1

    @property
    def unrolled_entries(self) -> int:
        return 0

    def as_matrix(self, weight: Tensor) -> Float[Tensor, "1 o i"]:
        return (weight.mT if self.turned else weight).unsqueeze(0)

    def patches(
        self, x: Tensor, layout: Layout | None, batch: int, into: Memory | None = None
    ) -> Float[Tensor, "b 1 i T"]:
        x = split(x, layout, batch)
        return x.reshape(batch, -1, x.shape[-1]).mT.unsqueeze(1)

    @property
    def row_format(self) -> RowFormat:
        return BY_POSITION

    def write_row(self, row: Tensor, grad: Tensor, layout: Layout | None, batch: int) -> None:
        row.copy_(split(grad, layout, batch).reshape(row.shape))

    def bias_row(self, grad: Tensor, layout: Layout | None, batch: int) -> Tensor | None:
        return None

    def reads(self) -> tuple[int, int]:
        return 1, 1

    def operator_norm(self, kernel: Norm) -> Norm:
        return kernel

    def untied_norms(self, scale: Float[Tensor, "b g T"]) -> Float[Tensor, " b"]:
        return block_diagonal_norms(self.matrix.double(), scale)


def block_diagonal_norms(
    matrix: Float[Tensor, "g o i"], scale: Float[Tensor, "b g T"]
) -> Float[Tensor, " b"]:
    """||D^-1 C||_2 of a map that acts on every position by itself."""
    upper = scale.new_tensor([matrix_norm(W).upper for W in matrix])
    return torch.where(upper > 0, upper / scale.amin(2), 0.0).amax(1)


def call_linear(
    recording: Recording, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute ``F.linear`` with a matrix and record it as a layer."""
    if weight.dim() != 2 or input.numel() == 0:  # a dot product, or an empty input
        return F.linear(input, weight, bias)
    if bias is not None and bias.shape != weight.shape[:1]:  # it is broadcast
        without_bias = call_linear(recording, input, weight)
        return broadcast(recording, torch.add, (without_bias, bias), {})
    alias, total = recording.alias(input)
    z = F.linear(alias, weight, bias)
    layer = Linear(weight, bias, input.shape, z.shape)
    return recording.add_call(layer, input, alias, total, z)


def addmm(recording: Recording, bias: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """Record a linear layer with a weight of shape [d_in, d_out] (the Conv1D of Transformers)."""
    alias, total = recording.alias(input)
    own = bias if bias.shape == weight.shape[1:] else None  # else it is broadcast
    z = alias @ weight if own is None else torch.addmm(own, alias, weight)
    layer = Linear(weight, own, input.shape, z.shape, turned=True)
    given = recording.add_call(layer, input, alias, total, z)
    return given if own is not None else broadcast(recording, torch.add, (given, bias), {})
