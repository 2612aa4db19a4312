"""A differentiable squared norm of a tensor, which saves memory traffic."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def squared_norm(g: Tensor) -> Float[Tensor, ""]:
    """Return the sum of squares of all numbers, with all its derivatives.

    `g.square().sum()` and its derivative write several tensors of the size of g. This function
    writes one.

    >>> g = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> torch.autograd.grad(squared_norm(g), g)
    (tensor([6., 8.]),)
    """
    if type(g) is not Tensor:  # a sharded tensor needs its own operations
        return g.square().sum()
    return _SquaredNorm.apply(g)


class _SquaredNorm(torch.autograd.Function):
    """A sum of squares that reads g once forwards, and takes one product backwards."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor) -> Tensor:
        flat = g.reshape(-1)
        return torch.dot(flat, flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        (g,) = ctx.saved_tensors
        return g * (2 * outer)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (g,) = ctx.saved_tensors
        return 2 * (g * tangent).sum()
