"""A linear head narrower than the outputs: as many products as it is wide are enough.

Where every path to the outputs goes through z = W h + b with h of width d < N, df/dx = (df/dz W)
dh/dx, and df/dz W has rank d at most. With an orthonormal basis Q of its range, Q^T f has the same
singular values and the same sums of squares as f for everything before the head, from d products in
place of N. What follows the head (a sigmoid, a softmax) may be anything without parameters. The
head's own gradients take df/dz itself, which is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from flatlens.algebra.looks import unusual
from flatlens.capture.graph import Graph
from flatlens.capture.layer import with_wide_weight
from flatlens.capture.recording import Call


@dataclass(frozen=True)
class Head:
    """The last layer, df/dz there, and the directions in output space that are enough."""

    call: int
    jacobian: Float[Tensor, "b k o"]
    basis: Float[Tensor, "b k d"]  # Q, orthonormal columns
    directions: Float[Tensor, "b d N"]


def find_head(
    graph: Graph, f: Tensor, calls: Sequence[Call], target: Float[Tensor, "b k N"] | None
) -> Head | None:
    """Return the head of f as [b, N], or of ``target`` f, if it is narrower than that."""
    if not calls or head_width(graph, f, calls[-1], target) is None:
        return None
    call = calls[-1]
    jacobian = _jacobian(graph, f, call)
    if unusual((jacobian.abs().amax((1, 2)) < torch.finfo(f.dtype).eps ** 0.5).any()):
        return None  # saturated: mixtures of its outputs would be rounding, each alone is less so
    jacobian = jacobian if target is None else target @ jacobian
    weight = with_wide_weight(call.layer).matrix[0]
    basis = torch.linalg.qr((jacobian @ weight).double()).Q.to(f.dtype)  # [b, k, d]
    directions = basis.mT if target is None else basis.mT @ target
    expanded = (t.expand(len(f), -1, -1) for t in (jacobian, basis, directions))
    return Head(len(calls) - 1, *expanded)


def head_width(graph: Graph, f: Tensor, call: Call, target: Tensor | None = None) -> int | None:
    """Return how many products are enough because ``call`` is a head, or None."""
    weight, bias = call.layer.weight, call.layer.bias
    width = call.layer.matrix.shape[-1]
    narrow = (
        call.layer.is_linear
        and width < (f if target is None else target).shape[1]
        and call.x.numel() == len(f) * width
        and _used_once(graph, weight)
        and (bias is None or _used_once(graph, bias))
        and graph.separates(f, call.out)
    )
    return width if narrow else None


def mixture(f: Tensor) -> Tensor:
    """Weights of the outputs that no symmetry of theirs takes to zero."""
    return torch.arange(f.shape[1], dtype=f.dtype, device=f.device).cos()


def mixed_rows(head: Head, A: Float[Tensor, "b d M"], start: int = 0) -> Float[Tensor, "b M"]:
    """The mixture of all rows of df/dx from the head's rows: m^T A = (Q^T m)^T (Q^T A).

    ``start`` is the number of the first of the head's rows in ``A``.
    """
    weights = mixture(head.basis) @ head.basis[:, :, start : start + A.shape[1]]  # [b, d]
    return (weights.unsqueeze(1) @ A).squeeze(1)


def _used_once(graph: Graph, p: Tensor) -> bool:
    """Whether p is a parameter that nothing else uses, or a constant."""
    return not p.requires_grad or (p.is_leaf and graph.uses(p) == 1)


def _jacobian(graph: Graph, f: Tensor, call: Call) -> Float[Tensor, "b N o"]:
    """df/dz at the head, one row after another; where z is f, one identity for all samples."""
    batch, N = f.shape
    below, _ = graph.below_reshapes(get_gradient_edge(f))
    if below.node is call.out.node:
        return torch.eye(N, dtype=f.dtype, device=f.device).unsqueeze(0)
    jacobian = f.new_empty(batch, N, call.layer.matrix.shape[1])
    for v in range(N):
        (g,) = torch.autograd.grad(f[:, v].sum(), [call.out], retain_graph=True)
        jacobian[:, v] = g.reshape(batch, -1)
    return jacobian
