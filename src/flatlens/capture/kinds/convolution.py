"""Convolutions in one to three dimensions, and the padding that a convolution layer does itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from flatlens.algebra.operator_norms import Norm
from flatlens.algebra.patches import Geometry, count_reads, flat_pads, patches
from flatlens.capture.kinds.images import (
    each_dimension,
    gathered,
    image_norm,
    image_shape,
    pads_of,
    with_batch,
)
from flatlens.capture.layer import Memory
from flatlens.capture.layout import Layout
from flatlens.capture.recording import Recording
from flatlens.capture.row_formats import BY_GROUP, RowFormat

CONVOLUTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (F.conv1d, F.conv2d, F.conv3d)
}


@dataclass(frozen=True)
class Convolution:
    """A convolution: the kernel's patch of the input at each position of the output."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    in_shape: torch.Size
    out_shape: torch.Size

    @property
    def matrix(self) -> Float[Tensor, "g o i"]:
        return self.as_matrix(self.weight.detach())

    @property
    def way(self) -> Hashable:
        return (self.kind, self.geometry)

    @property
    def joins(self) -> Hashable:
        return ("convolution", self.geometry.groups)

    @property
    def is_linear(self) -> bool:
        return False

    @property
    def bias_per_position(self) -> bool:
        return self.bias is not None

    def can_hold_samples(self, dim: int) -> bool:
        return dim == 0

    @property
    def unrolled_entries(self) -> int:
        return prod(self.out_shape) // len(self.weight) * self.weight[0].numel()

    def as_matrix(self, weight: Tensor) -> Float[Tensor, "g o i"]:
        groups = self.geometry.groups
        return weight.reshape(groups, weight.shape[0] // groups, -1)

    def patches(
        self, x: Tensor, layout: Layout | None, batch: int, into: Memory | None = None
    ) -> Float[Tensor, "b g i T"]:
        x = with_batch(x, self.weight)
        unfolded = patches(x, self._kernel, self.geometry, self._positions, into)
        return gathered(unfolded, layout, batch)

    @property
    def row_format(self) -> RowFormat:
        return BY_GROUP

    def write_row(self, row: Tensor, grad: Tensor, layout: Layout | None, batch: int) -> None:
        grad = with_batch(grad, self.weight)
        pixels = grad.reshape(grad.shape[0], self.geometry.groups, -1, prod(grad.shape[2:]))
        row.copy_(gathered(pixels, layout, batch))

    def bias_row(self, grad: Tensor, layout: Layout | None, batch: int) -> Tensor | None:
        return None

    def reads(self) -> tuple[int, int]:
        image = image_shape(self.in_shape, self.weight)
        device = self.weight.device
        return count_reads(image, self._kernel, self.geometry, self._positions, device)

    def operator_norm(self, kernel: Norm) -> Norm:
        return self._norm(None)

    def untied_norms(self, scale: Float[Tensor, "b g T"]) -> Float[Tensor, " b"]:
        if not bool(self.weight.any()) or self.reads()[1] == 0:  # C = 0
            return torch.zeros_like(scale[:, 0, 0])
        double = replace(self, weight=self.weight.detach().double())
        # D^-1 is infinite if a patch is zero.
        norms = [torch.inf if bool((d == 0).any()) else double._scaled_norm(d) for d in scale]
        return scale.new_tensor(norms)

    def _scaled_norm(self, scale: Float[Tensor, "g T"]) -> float:
        """Return the upper end of ||D^-1 C||_2 with D = diag_p scale_p."""
        # [g, T] -> [k, g, o, space]: every output channel of a group has the same scale.
        images = scale.unflatten(1, (-1, prod(self._positions)))
        scales = images.movedim(1, 0).repeat_interleave(self.matrix.shape[1], 1)
        return max(self._norm(s.to(self.weight).reciprocal()).upper for s in scales)

    @property
    def _kernel(self) -> tuple[int, ...]:
        return tuple(self.weight.shape[2:])

    @property
    def _positions(self) -> tuple[int, ...]:
        return tuple(self.out_shape[-len(self._kernel) :])

    def _apply(self, x: Tensor) -> Tensor:
        """Apply the layer to images, without its bias."""
        return CONVOLUTIONS[self.kind](
            self.geometry.padded(x), self.weight.detach(), None, self.geometry.stride,
            dilation=self.geometry.dilation, groups=self.geometry.groups,
        )  # fmt: skip

    def _norm(self, factor: Tensor | None) -> Norm:
        """Return ||D C||_2 of the map C of whole images; D is a factor per channel and position."""
        pads = [left for left, right in self.geometry.padding if left == right]
        direct = len(pads) == len(self.geometry.padding) and self.geometry.pad_mode == "constant"
        image = image_shape(self.in_shape, self.weight)

        def gram(x: Tensor) -> Tensor:
            z = _scaled(_scaled(self._apply(x), factor), factor)
            return torch.ops.aten.convolution_backward(  # half the cost of asking autograd for it
                z, x, self.weight.detach(), None, self.geometry.stride, pads,
                self.geometry.dilation, False, [0] * len(pads), self.geometry.groups,
                [True, False, False],
            )[0]  # fmt: skip

        def each(v: Float[Tensor, "r n"]) -> Float[Tensor, "r n"]:
            # With more than a few positions torch is faster on one image after the other.
            images = v.unflatten(1, image)
            together = len(v) if prod(self._positions) < 8 else 1
            return torch.cat([gram(x) for x in images.split(together)]).flatten(1)

        scaled = lambda x: _scaled(self._apply(x), factor)  # noqa: E731
        return image_norm(scaled, image, self.weight, each if direct else None)


def _scaled(z: Tensor, factor: Tensor | None) -> Tensor:
    """Multiply images by a factor for each channel and position."""
    return z if factor is None else z * factor.reshape(z[:1].shape)


# -- recording -----------------------------------------------------------------------------------


def _convolution(recording: Recording, func: Any, args: Any, kwargs: Any) -> Tensor:
    return _call_convolution(recording, func, *args, **kwargs)


def _call_convolution(
    recording: Recording,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    dims = weight.dim() - 2
    dilations = each_dimension(dilation, dims)
    pads, mode = pads_of(padding, weight.shape[2:], dilations, dims), "constant"
    own_pad = None if any(map(any, pads)) else _remembered_pads(recording).get(id(input))
    if own_pad and input._version == own_pad[1]:
        _, _, input, pads, mode = own_pad
    else:
        own_pad = None
    geometry = Geometry(each_dimension(stride, dims), pads, dilations, int(groups), mode)
    alias, total = recording.alias(input)
    read = F.pad(alias, flat_pads(pads), mode) if own_pad else alias
    z = func(read, weight, bias, stride, padding, dilation, groups)
    layer = Convolution(func.__name__, weight, bias, geometry, input.shape, z.shape)
    return recording.add_call(layer, input, alias, total, z)


def _pad(recording: Recording, func: Any, args: Any, kwargs: Any) -> Tensor:
    return _call_pad(recording, *args, **kwargs)


def _call_pad(
    recording: Recording, input: Tensor, pad: Any, mode: str = "constant", value: Any = None
) -> Tensor:
    """Remember a pad that a convolution layer does itself (padding_mode != "zeros")."""
    result = F.pad(input, pad, mode, value)
    own_pads = recording.scratch.get("pads of layers")
    if own_pads is None:
        own_pads = {hash(key): key for key in _pads_of_layers(recording.model)}
        recording.scratch["pads of layers"] = own_pads
    if (tuple(pad), mode) in own_pads.values():
        pairs = tuple((pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2))
        _remembered_pads(recording)[id(result)] = (result, result._version, input, pairs, mode)
    return result


def _remembered_pads(recording: Recording) -> dict[int, Any]:
    return recording.scratch.setdefault("padded inputs", {})


def _pads_of_layers(model: nn.Module) -> set[tuple[tuple[int, ...], str]]:
    return {
        (tuple(m._reversed_padding_repeated_twice), m.padding_mode)
        for m in model.modules()
        if isinstance(m, nn.modules.conv._ConvNd) and m.padding_mode != "zeros"
    }


HANDLERS = {**dict.fromkeys(CONVOLUTIONS.values(), _convolution), F.pad: _pad}
