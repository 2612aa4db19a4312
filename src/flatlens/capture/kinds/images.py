"""Images in and out of convolutions: their samples, their norms, and the options of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.operator_norms import EXACT_SIZE, Norm, matrix_norm, norm_by_products
from flatlens.capture.layout import Layout, split


def with_batch(t: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution's tensor with a batch dimension, also where the call had none."""
    return t if t.dim() == weight.dim() else t.unsqueeze(0)


def gathered(
    t: Float[Tensor, "k g f t"], layout: Layout | None, batch: int
) -> Float[Tensor, "b g f kt"]:
    """Join the images that belong to one sample along the positions."""
    if layout is not None and layout.repeat == 1:
        return t
    t = split(t, layout, batch)
    return t.movedim(1, -2).flatten(-2)


def image_shape(in_shape: torch.Size, weight: Tensor) -> torch.Size:
    """Return the shape of one image that a layer reads."""
    return in_shape[-weight.dim() + 1 :]


def image_norm(
    apply: Callable[[Tensor], Tensor],
    image: torch.Size,
    weight: Tensor,
    gram: Callable[[Tensor], Tensor] | None = None,
) -> Norm:
    """Return ||C||_2 of a map of whole images: small maps as a matrix, large ones by products.

    Args:
        apply: the map C on a batch of images.
        image: shape of one image.
        weight: tensor of the right type and device.
        gram: rows v -> rows C^T C v on flat images. By default autograd gives the transpose.
    """

    def by_autograd(v: Float[Tensor, "r n"]) -> Float[Tensor, "r n"]:
        with torch.enable_grad():
            x = v.detach().unflatten(1, image).requires_grad_()
            z = apply(x)
        return torch.autograd.grad(z, x, z.detach())[0].flatten(1)

    with torch.no_grad():
        if image.numel() <= EXACT_SIZE:
            basis = torch.eye(image.numel(), dtype=weight.dtype, device=weight.device)
            return matrix_norm(apply(basis.unflatten(1, image)).flatten(1))
        return norm_by_products(gram or by_autograd, weight.detach().new_empty(image.numel()))


def each_dimension(value: Any, dims: int) -> tuple[int, ...]:
    """Return an option of a convolution as one integer for each spatial dimension."""
    value = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return tuple(int(v) for v in (value * dims if len(value) == 1 else value))


def pads_of(
    padding: Any, kernel: torch.Size, dilation: tuple[int, ...], dims: int
) -> tuple[tuple[int, int], ...]:
    """Return the padding of a convolution as (left, right) for each spatial dimension."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    return tuple((p, p) for p in each_dimension(padding, dims))
