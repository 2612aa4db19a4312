"""Transposed convolutions in one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.operator_norms import Norm
from flatlens.algebra.patches import Geometry, patches
from flatlens.capture.kinds.images import (
    each_dimension,
    gathered,
    image_norm,
    image_shape,
    pads_of,
    with_batch,
)
from flatlens.capture.kinds.linear import block_diagonal_norms
from flatlens.capture.layer import Memory
from flatlens.capture.layout import Layout
from flatlens.capture.recording import Recording
from flatlens.capture.row_formats import BY_GROUP, RowFormat

TRANSPOSED: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
}


@dataclass(frozen=True)
class TransposedConvolution:
    """A transposed convolution: a per-pixel linear map, then a fixed overlapping sum."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    in_shape: torch.Size
    out_shape: torch.Size
    output_padding: tuple[int, ...]

    @property
    def matrix(self) -> Float[Tensor, "g o i"]:
        return self.as_matrix(self.weight.detach())

    @property
    def way(self) -> Hashable:
        return (self.kind, self.geometry, self.output_padding)

    @property
    def joins(self) -> Hashable:
        return ("transposed convolution", self.geometry.groups)

    @property
    def is_linear(self) -> bool:
        return False

    @property
    def bias_per_position(self) -> bool:
        return False  # it is added after the overlapping sum

    def can_hold_samples(self, dim: int) -> bool:
        return dim == 0

    @property
    def unrolled_entries(self) -> int:
        return prod(self.out_shape) // len(self.weight) * self.weight[0].numel()

    def as_matrix(self, weight: Tensor) -> Float[Tensor, "g o i"]:
        groups = self.geometry.groups
        return weight.reshape(groups, weight.shape[0] // groups, -1).mT

    def patches(
        self, x: Tensor, layout: Layout | None, batch: int, into: Memory | None = None
    ) -> Float[Tensor, "b g i T"]:
        x = with_batch(x, self.weight)
        pixels = x.reshape(x.shape[0], self.geometry.groups, -1, prod(x.shape[2:]))
        return gathered(pixels, layout, batch)

    @property
    def row_format(self) -> RowFormat:
        return BY_GROUP

    def write_row(self, row: Tensor, grad: Tensor, layout: Layout | None, batch: int) -> None:
        grad = with_batch(grad, self.weight)
        kernel = tuple(self.weight.shape[2:])
        positions = tuple(self.in_shape[-len(kernel) :])
        row.copy_(gathered(patches(grad, kernel, self.geometry, positions), layout, batch))

    def bias_row(self, grad: Tensor, layout: Layout | None, batch: int) -> Tensor | None:
        pixels = with_batch(grad, self.weight).flatten(2).unsqueeze(1)
        return gathered(pixels, layout, batch).sum(-1).squeeze(1)

    def reads(self) -> tuple[int, int]:
        return 1, 1

    def operator_norm(self, kernel: Norm) -> Norm:
        return image_norm(self._apply, image_shape(self.in_shape, self.weight), self.weight)

    def untied_norms(self, scale: Float[Tensor, "b g T"]) -> Float[Tensor, " b"]:
        return block_diagonal_norms(self.matrix.double(), scale)

    def _apply(self, x: Tensor) -> Tensor:
        """Apply the layer to images, without its bias."""
        return TRANSPOSED[self.kind](
            x, self.weight.detach(), None, self.geometry.stride,
            padding=tuple(left for left, _ in self.geometry.padding),
            output_padding=self.output_padding,
            dilation=self.geometry.dilation, groups=self.geometry.groups,
        )  # fmt: skip


def _transposed(recording: Recording, func: Any, args: Any, kwargs: Any) -> Tensor:
    return _call_transposed(recording, func, *args, **kwargs)


def _call_transposed(
    recording: Recording,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    dims = weight.dim() - 2
    dilations = each_dimension(dilation, dims)
    pads = pads_of(padding, weight.shape[2:], dilations, dims)
    geometry = Geometry(each_dimension(stride, dims), pads, dilations, int(groups))
    alias, total = recording.alias(input)
    z = func(alias, weight, bias, stride, padding, output_padding, groups, dilation)
    layer = TransposedConvolution(
        func.__name__,
        weight,
        bias,
        geometry,
        input.shape,
        z.shape,
        each_dimension(output_padding, dims),
    )
    return recording.add_call(layer, input, alias, total, z)


HANDLERS = dict.fromkeys(TRANSPOSED.values(), _transposed)
