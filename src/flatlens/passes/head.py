"""A linear head narrower than the outputs: as many products as it is wide tell all.

Where every path to the outputs goes through z = W h + b with h of width d < N, df/dx = (df/dz W)
dh/dx, and df/dz W has rank d at most. With an orthonormal basis Q of its range, Q^T f has the same
singular values and the same sums of squares as f for everything before the head, from d products in
place of N. What follows the head (a sigmoid, a softmax) may be anything without parameters; the
head's own gradients take df/dz itself, which is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.capture.recorder import Call, Graph


@dataclass(frozen=True)
class Head:
    """The last layer, df/dz there, and the directions in output space that are enough."""

    call: int
    jacobian: Float[Tensor, "b k o"]
    basis: Float[Tensor, "b k d"]  # Q, orthonormal columns
    directions: Float[Tensor, "b d N"]


def find_head(
    graph: Graph, f: Tensor, calls: Sequence[Call], rows: Float[Tensor, "b k N"] | None
) -> Head | None:
    """The head of f as [b, N], or of ``rows`` f, if it is narrower than that."""
    call = calls[-1]
    if products(graph, f, call, rows) is None:
        return None
    jacobian = _jacobian(graph, f, call)
    if bool((jacobian.abs().amax((1, 2)) < torch.finfo(f.dtype).eps ** 0.5).any()):
        return None  # saturated: mixtures of its outputs would be rounding, each alone is less so
    jacobian = jacobian if rows is None else rows @ jacobian
    basis = torch.linalg.qr((jacobian @ call.map.matrix[0]).double()).Q.to(f.dtype)  # [b, k, d]
    directions = basis.mT if rows is None else basis.mT @ rows
    each = (t.expand(len(f), -1, -1) for t in (jacobian, basis, directions))
    return Head(len(calls) - 1, *each)


def products(graph: Graph, f: Tensor, call: Call, rows: Tensor | None = None) -> int | None:
    """How many products are enough because ``call`` is a head, or None."""
    weight, bias = call.map.weight, call.map.bias
    width = call.map.matrix.shape[-1]
    narrow = (
        call.map.geometry is None
        and width < (f if rows is None else rows).shape[1]
        and call.x.numel() == len(f) * width
        and _once(graph, weight)
        and (bias is None or _once(graph, bias))
        and _separates(f, call)
    )
    return width if narrow else None


def _once(graph: Graph, p: Tensor) -> bool:
    """Whether p is a parameter that nothing else uses, or a constant."""
    return not p.requires_grad or (p.is_leaf and graph.uses(p) == 1)


def _separates(f: Tensor, call: Call) -> bool:
    """Whether nothing but the call's output leads from f to a leaf."""
    queue, seen = [f.grad_fn], {f.grad_fn}
    while queue:
        node = queue.pop()
        if node is call.out.node:
            continue
        if node is None or hasattr(node, "variable"):
            return False
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
    return True


def _jacobian(graph: Graph, f: Tensor, call: Call) -> Float[Tensor, "b N o"]:
    """df/dz at the head, one row after another; where z is f, one identity for all samples."""
    batch, N = f.shape
    below, _ = graph.unviewed(torch.autograd.graph.get_gradient_edge(f))
    if below.node is call.out.node:
        return torch.eye(N, dtype=f.dtype, device=f.device).unsqueeze(0)
    rows = f.new_empty(batch, N, call.map.matrix.shape[1])
    for v in range(N):
        (g,) = torch.autograd.grad(f[:, v].sum(), [call.out], retain_graph=True)
        rows[:, v] = g.reshape(batch, -1)
    return rows
