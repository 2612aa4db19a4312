"""A linear head narrower than the outputs needs only as many products as it is wide.

Suppose that every path to the outputs goes through z = W h + b, and h has width d < N. Then df/dx =
(df/dz W) dh/dx, and df/dz W has at most rank d. Let Q be an orthonormal basis of its range. For
everything before the head, Q^T f has the same singular values and the same sums of squares as f,
from d products instead of N. The functions after the head (a sigmoid, a softmax) may be anything
without parameters. The head's own gradients need df/dz itself, which is cheap.
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
    """The last layer, df/dz at its output, and the output directions that are sufficient."""

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
        return None  # saturated outputs: their mixtures would be mostly rounding
    jacobian = jacobian if target is None else target @ jacobian
    weight = with_wide_weight(call.layer).matrix[0]
    basis = torch.linalg.qr((jacobian @ weight).double()).Q.to(f.dtype)  # [b, k, d]
    directions = basis.mT if target is None else basis.mT @ target
    expanded = (t.expand(len(f), -1, -1) for t in (jacobian, basis, directions))
    return Head(len(calls) - 1, *expanded)


def head_width(graph: Graph, f: Tensor, call: Call, target: Tensor | None = None) -> int | None:
    """Return the number of products that are enough if ``call`` is a head; else None."""
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
    """Return weights of a sum over the outputs that no symmetry makes zero."""
    return torch.arange(f.shape[1], dtype=f.dtype, device=f.device).cos()


def mixed_rows(head: Head, A: Float[Tensor, "b d M"], start: int = 0) -> Float[Tensor, "b M"]:
    """Mix all rows of df/dx from the head's rows: m^T A = (Q^T m)^T (Q^T A).

    ``start`` is the index of the first head row in ``A``.
    """
    weights = mixture(head.basis) @ head.basis[:, :, start : start + A.shape[1]]  # [b, d]
    return (weights.unsqueeze(1) @ A).squeeze(1)


def _used_once(graph: Graph, p: Tensor) -> bool:
    """Whether p is a parameter that nothing else uses, or a constant."""
    return not p.requires_grad or (p.is_leaf and graph.uses(p) == 1)


def _jacobian(graph: Graph, f: Tensor, call: Call) -> Float[Tensor, "b N o"]:
    """Return df/dz at the head; if z is f, it is one identity for all samples."""
    batch, N = f.shape
    below, _ = graph.below_reshapes(get_gradient_edge(f))
    if below.node is call.out.node:
        return torch.eye(N, dtype=f.dtype, device=f.device).unsqueeze(0)
    jacobian = f.new_empty(batch, N, call.layer.matrix.shape[1])
    for v in range(N):
        (g,) = torch.autograd.grad(f[:, v].sum(), [call.out], retain_graph=True)
        jacobian[:, v] = g.reshape(batch, -1)
    return jacobian
