"""The squared norm of a tensor, to differentiate: fast where memory is the limit."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def squared_norm(g: Tensor) -> Float[Tensor, ""]:
    """Return the sum of squares of all numbers, with all its derivatives.

    The same as `g.square().sum()`, which writes several tensors of the size of g until it is
    differentiated. Here it is one.

    >>> g = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> torch.autograd.grad(squared_norm(g), g)
    (tensor([6., 8.]),)
    """
    if type(g) is not Tensor:  # a sharded tensor has rules of its own for each operation
        return g.square().sum()
    return _SquaredNorm.apply(g)


class _SquaredNorm(torch.autograd.Function):
    """One reading of g forwards, one product backwards, which can be differentiated again."""

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
