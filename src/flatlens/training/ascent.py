"""The worst point near the weights, where a sharpness-aware step takes its gradient.

The ascent of ASAM takes nine operations over every weight. On a CPU these are bound by memory, so
they run on one piece of a tensor after another, each small enough to stay in the cache. For the
same reason the weights are not copied and restored. The network reads other tensors instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

ETA = 0.01  # of ASAM: weights near zero can still move (Kwon et al., 2021)
PIECE = 1 << 16  # numbers in a piece on a CPU: a quarter of a megabyte in float32


@torch.no_grad()
def ascend(parameters: list[nn.Parameter], worst: list[Tensor], rho: float, adaptive: bool) -> None:
    """Find the worst point of a ball around the parameters, to first order.

    SAM: w + rho g / ||g|| (Foret et al., 2021). ASAM: w + rho T^2 g / ||T g|| with the elementwise
    T = |w| + eta (Kwon et al., 2021).

    Args:
        parameters: parameters w with gradients g; those without a gradient do not move.
        worst: tensors like the parameters, to which the point is written.
        rho: radius of the ball.
        adaptive: ASAM instead of SAM.
    """
    moves: list[tuple[Tensor, Tensor, Tensor]] = []
    for p, to in zip(parameters, worst, strict=True):
        if p.grad is None:
            to.copy_(p)
        else:
            moves += _pieces(p, p.grad, to) if adaptive else [(p, p.grad, to)]
    norms = [torch.linalg.vector_norm(_scale(w).mul_(g) if adaptive else g) for w, g, _ in moves]
    # a tensor, not a number: the host does not wait for the device
    length = rho / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-12)
    for w, g, to in moves:
        torch.addcmul(w, _scale(w).square_().mul_(g) if adaptive else g, length, out=to)


@contextlib.contextmanager
def placed(parameters: list[nn.Parameter], values: list[Tensor]) -> Iterator[None]:
    """Give the parameters other values inside a block; their own values are always restored."""
    own_values = [p.data for p in parameters]
    try:
        for p, value in zip(parameters, values, strict=True):
            p.data = value
        yield
    finally:
        for p, value in zip(parameters, own_values, strict=True):
            p.data = value


def _scale(weight: Tensor) -> Tensor:
    return weight.abs().add_(ETA)


def _pieces(w: Tensor, g: Tensor, to: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Cut three tensors of one shape along the first axis, whatever their memory format."""
    if w.device.type != "cpu" or w.numel() <= PIECE:
        return [(w, g, to)]
    length = max(1, PIECE * len(w) // w.numel())  # of a piece, along the first axis
    return list(zip(w.split(length), g.split(length), to.split(length), strict=True))
