"""Products with a weight outside of ``F.linear``: ``x @ W``, ``W @ x``, ``bmm``, ``einsum``.

A product is a layer where one operand is a weight (a parameter, a view of one, or computed from
parameters alone) and the other one is not. ``x @ W`` with a matrix W is a :class:`Linear` layer;
every other product is a :class:`Product`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.operator_norms import Norm
from flatlens.capture.kinds.linear import Linear, block_diagonal_norms
from flatlens.capture.labels import Dimensions, Labels
from flatlens.capture.layer import Memory
from flatlens.capture.layout import Layout, split
from flatlens.capture.recording import Recording
from flatlens.capture.row_formats import BY_GROUP, RowFormat

View = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


@dataclass(frozen=True)
class Product:
    """A linear map z = W x by an einsum of x and the weight.

    Attributes:
        weight: the weight, or the parameter that it is a view of.
        dimensions: the labels of input, weight and output.
        view: shape and strides of the weight as a view of the parameter; None for the parameter.
        beside: a further operand that depends on the sample, and its labels. The output is then
            the einsum of W x with it (``F.bilinear``).
    """

    weight: Tensor
    in_shape: torch.Size
    out_shape: torch.Size
    dimensions: Dimensions
    view: View | None = None
    beside: tuple[Tensor, Labels, Labels] | None = None
    bias: Tensor | None = None

    @property
    def kind(self) -> str:
        if self.beside is not None:
            return "bilinear"
        return "linear" if self._matrix_shape[0] == 1 else "grouped linear"

    @property
    def matrix(self) -> Float[Tensor, "g o i"]:
        return self.as_matrix(self.weight.detach())

    @property
    def way(self) -> Hashable:
        return ("product", self.dimensions, self.view)

    @property
    def joins(self) -> Hashable:
        return ("product", self._weight_order, self.view)

    @property
    def is_linear(self) -> bool:
        return False  # the features need not be the last dimension

    @property
    def bias_per_position(self) -> bool:
        return False

    @property
    def unrolled_entries(self) -> int:
        return 0

    def can_hold_samples(self, dim: int) -> bool:
        label = self.dimensions.x[dim]
        return label in self.dimensions.free and label in self.dimensions.z

    def as_matrix(self, weight: Tensor) -> Float[Tensor, "g o i"]:
        if self.view is not None:
            weight = weight.contiguous().as_strided(*self.view)
        return weight.permute(self._weight_order).reshape(self._matrix_shape)

    def patches(
        self, x: Tensor, layout: Layout | None, batch: int, into: Memory | None = None
    ) -> Float[Tensor, "b g i T"]:
        d = self.dimensions
        return self._arranged(x, d.x, d.inner, layout, batch)

    @property
    def row_format(self) -> RowFormat:
        return BY_GROUP

    def write_row(self, row: Tensor, grad: Tensor, layout: Layout | None, batch: int) -> None:
        d = self.dimensions
        if self.beside is not None:  # z = einsum(W x, other): df/d(W x) is their product
            other, labels, result = self.beside
            grad = torch.einsum(grad, _small(result), other, _small(labels), _small(d.z))
        if layout is not None:
            dim = d.z.index(d.x[layout.dim])
            layout = Layout(dim, layout.repeat, layout.inner)
        row.copy_(self._arranged(grad, d.z, d.outer, layout, batch))

    def bias_row(self, grad: Tensor, layout: Layout | None, batch: int) -> Tensor | None:
        return None

    def reads(self) -> tuple[int, int]:
        return 1, 1

    def operator_norm(self, kernel: Norm) -> Norm:
        return kernel

    def untied_norms(self, scale: Float[Tensor, "b g T"]) -> Float[Tensor, " b"]:
        return block_diagonal_norms(self.matrix.double(), scale)

    @cached_property
    def _weight_order(self) -> tuple[int, ...]:
        d = self.dimensions
        order = [d.w.index(label) for label in (*d.groups, *d.outer, *d.inner)]
        return (*order, *(k for k in range(len(d.w)) if k not in order))  # the rest has size 1

    @cached_property
    def _matrix_shape(self) -> tuple[int, int, int]:
        d = self.dimensions
        shape = self.weight.shape if self.view is None else self.view[0]
        sizes = dict(zip(d.w, shape, strict=True))
        g, o, i = (prod(sizes[k] for k in labels) for labels in (d.groups, d.outer, d.inner))
        return g, o, i

    def _arranged(
        self, t: Tensor, labels: Labels, features: Labels, layout: Layout | None, batch: int
    ) -> Float[Tensor, "b g f T"]:
        """Reorder x or df/dz to the dimensions sample, group, feature, position."""
        left = list(labels)
        if layout is not None and layout.repeat == 1:
            del left[layout.dim]
        t = split(t, layout, batch)
        d = self.dimensions
        order = [left.index(k) + 1 for k in (*d.groups, *features)]
        positions = [left.index(k) + 1 for k in d.free if k in left]
        rest = [k for k in range(1, t.dim()) if k not in order and k not in positions]
        t = t.permute(0, *order, *positions, *rest)  # the rest has size 1
        sizes = t.shape[1 : 1 + len(order)]
        groups = prod(sizes[: len(d.groups)])
        return t.reshape(batch, groups, prod(sizes[len(d.groups) :]), -1)


def _small(labels: Labels) -> list[int]:
    """Return labels below 52, as the sublist format of torch.einsum needs them."""
    assert all(label < 52 for label in labels)
    return list(labels)


def note_product(
    recording: Recording,
    x: Tensor,
    weight: Tensor,
    dimensions: Dimensions,
    compute: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Compute a product and record it as a layer; return None if it is not a layer.

    Args:
        recording: the forward pass.
        x: the operand that is no weight.
        weight: the operand that is a weight.
        dimensions: the labels of both and of the result.
        compute: the product as a function of x.
    """
    fitted = dimensions.fitting(tuple(x.shape), tuple(weight.shape))
    if fitted is None or x.numel() == 0 or weight.numel() == 0 or not x.is_floating_point():
        return None
    alias, total = recording.alias(x)
    z = compute(alias)
    parameter, view = behind(recording, weight)
    layer: Product | Linear = Product(parameter, x.shape, z.shape, fitted, view)
    if fitted.plain:
        turned = fitted.w == fitted.inner + fitted.outer
        if view is None:
            layer = Linear(parameter, None, x.shape, z.shape, turned)
        elif parameter.dim() == 2 and view == _turned_view(parameter):
            layer = Linear(parameter, None, x.shape, z.shape, not turned)
    return recording.add_call(layer, x, alias, total, z)


def behind(recording: Recording, weight: Tensor) -> tuple[Tensor, View | None]:
    """Return the parameter of which a weight is a view of all entries once, and the view."""
    base = weight._base
    if recording.parameters.is_parameter(weight) or base is None:
        return weight, None
    whole = base.is_contiguous() and base.numel() == weight.numel() == _span(weight)
    if not (whole and recording.parameters.is_parameter(base)):
        return weight, None
    return base, (tuple(weight.shape), tuple(weight.stride()))


def _span(t: Tensor) -> int:
    """Count the entries from the first to the last entry of a view, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _turned_view(p: Tensor) -> View:
    return tuple(p.mT.shape), tuple(p.mT.stride())


def is_product(recording: Recording, *operands: Any) -> int | None:
    """Return the index of the one operand that is a weight; None if none or several are weights."""
    if not are_plain(operands):
        return None
    weights = [recording.parameters.make_weight(t, recording.data) for t in operands]
    return weights.index(True) if weights.count(True) == 1 else None


def are_plain(operands: Sequence[Any]) -> bool:
    """Whether all operands are real, dense tensors that show all their dimensions.

    Inside ``torch.vmap`` a tensor hides its dimension of samples, and a sparse or nested tensor has
    no storage of its own.
    """
    return all(
        isinstance(t, Tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        and not t.is_nested
        and t.layout == torch.strided
        and not t.is_complex()
        for t in operands
    )
