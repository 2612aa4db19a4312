"""The interface of every kind of layer, and the format that all layers share.

A *layer* computes z = W u + b at T positions. Its tensors are in the **weight-sharing format**:

| tensor                    | shape          | dimensions                                   |
| ------------------------- | -------------- | -------------------------------------------- |
| u, the input              | [b, g, i, T]   | sample, group, entry of a patch, position    |
| W, the weight             | [g, o, i]      | group, output, entry of a patch              |
| J, df/dz of all N outputs | [b, g, N o, T] | sample, group, rows of all outputs, position |

A dense layer has one group and one position. A transposed convolution is a per-pixel linear map
onto o = channels x kernel products, followed by a fixed overlapping sum. Its u is the unchanged
input, and its J holds the patches of df/dz.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.operator_norms import Norm
from flatlens.algebra.wide_tensor import HALF, shown_wide
from flatlens.capture.layout import Layout
from flatlens.capture.row_formats import RowFormat

Memory = Callable[[tuple[int, ...]], Tensor]  # shape -> where to write


@runtime_checkable
class Layer(Protocol):
    """The linear map of one call, without the call's data."""

    @property
    def kind(self) -> str:
        """The name of the torch function, such as "conv2d"."""

    @property
    def weight(self) -> Tensor:
        """The weight as the call had it."""

    @property
    def bias(self) -> Tensor | None:
        """The bias of the call."""

    @property
    def in_shape(self) -> torch.Size:
        """The shape of the input."""

    @property
    def out_shape(self) -> torch.Size:
        """The shape of the output."""

    @property
    def matrix(self) -> Float[Tensor, "g o i"]:
        """The weight in the weight-sharing format."""

    @property
    def way(self) -> Hashable:
        """How the weight is used; calls of one weight with equal ``way`` share an operator norm."""

    @property
    def joins(self) -> Hashable:
        """Calls of one weight can join their positions if this value is equal."""

    @property
    def is_linear(self) -> bool:
        """Whether the last dimension of the input holds the features (no image)."""

    @property
    def bias_per_position(self) -> bool:
        """Whether there is a bias and it is added at each position."""

    @property
    def unrolled_entries(self) -> int:
        """Extra entries that the patches of one call have compared with its input."""

    def can_hold_samples(self, dim: int) -> bool:
        """Whether a dimension of the input may hold samples (features and pixels may not)."""

    def as_matrix(self, weight: Tensor) -> Float[Tensor, "g o i"]:
        """Bring a tensor shaped like the weight into the weight-sharing format."""

    def patches(
        self, x: Tensor, layout: Layout | None, batch: int, into: Memory | None = None
    ) -> Float[Tensor, "b g i T"]:
        """Bring the input into the weight-sharing format."""

    @property
    def row_format(self) -> RowFormat:
        """The format in which the rows df_v/dz of all outputs are stored."""

    def write_row(self, row: Tensor, grad: Tensor, layout: Layout | None, batch: int) -> None:
        """Write df_v/dz of one output v into ``row``, a view of the store."""

    def bias_row(self, grad: Tensor, layout: Layout | None, batch: int) -> Tensor | None:
        """Return df/db if it cannot be read off the stored rows; else None."""

    def reads(self) -> tuple[int, int]:
        """Return how often an input entry occurs in all patches: minimum and maximum."""

    def operator_norm(self, kernel: Norm) -> Norm:
        """Return ||C||_2 of the whole map without bias; ``kernel`` is the norm of the matrix."""

    def untied_norms(self, scale: Float[Tensor, "b g T"]) -> Float[Tensor, " b"]:
        """Return the upper end of ||D^-1 C||_2 of each sample, D = diag_p scale_p (theory 4.1)."""


def with_wide_weight(layer: Layer) -> Layer:
    """Return the layer with its weight as float32, because norms need more than half precision.

    A layer with a weight of float32 or float64 is returned as it is.
    """
    if layer.weight.dtype not in HALF:
        return layer
    return replace(layer, weight=shown_wide(layer.weight))  # type: ignore[type-var]
