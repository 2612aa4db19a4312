"""The contribution of one weight's gradient to S and to adaptive sharpness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens import tuning
from flatlens.algebra.looks import unusual
from flatlens.algebra.sums import summed

# Signed sums smaller than this share of their terms have lost too many digits.
CANCELLED = {torch.float32: 0.03, torch.float64: 1e-4}


# One call in the weight-sharing format, with its weight W, patches u, derivative rows J, number of
# positions T, outputs and batch (``passes.positions.Positions``).
SharedWeight = Any


class WeightSums(NamedTuple):
    """The sums over one weight's gradient for each sample, in float64."""

    plain: Float[Tensor, " b"]  # ||grad_W f||_F^2
    adaptive: Float[Tensor, " b"]  # sum W^2 (df/dW)^2
    invariant: Float[Tensor, " b"] | None = None  # sum_j (sum_k W_kj df/dW_kj)^2, Eq. 44 shared


def weight_gradient(calls: Sequence[SharedWeight], invariant: bool = False) -> WeightSums:
    """Return the sums over one weight's gradient, all outputs together.

    Calls that share the weight have their positions put side by side first: one parameter has one
    gradient, and adding the norms of its parts would be wrong. Three routes exist; the cheapest is
    taken:

    - one position: grad = J u^T, so all follows from J^2 summed over directions;
    - few positions: ||sum_p J_p u_p^T||^2 = sum_pq <J_p, J_q> <u_p, u_q>, and the same with W^2
      between; pairs are summed over directions before W is touched, so the work does not grow
      with N. Where signed terms cancel too far, the gradient is formed after all;
    - many positions: form the gradient itself, a block of samples at a time.

    Args:
        calls: all calls of the weight, in the weight-sharing format.
        invariant: whether the sum of Eq. 44 is computed as well.
    """
    N, T = calls[0].outputs, sum(c.T for c in calls)
    double = any(c.u.dtype == torch.float64 for c in calls)  # one call may have switched to float64
    W = calls[0].W.double() if double else calls[0].W
    g, o, i = W.shape
    if T == 1 and not invariant:
        return _by_outer(calls[0], W)
    # In multiply-adds per weight, as measured: 24 stands for writing, squaring and summing an entry
    # of a gradient, 18 and 35 for the product of a pair of rows or of patches.
    pairs = T * (T + 1) // 2
    route: Callable[..., tuple[Tensor, ...]]
    if pairs * (1 + 18 * N / i + 35 / o) < N * (T + 24) and not invariant:
        route, entries = _by_pairs, max(pairs * max(i, o), N * T * o)
    else:
        route, entries = _by_forming, N * i * o
    block = max(1, tuning.BLOCK_ENTRIES // (g * entries))
    W2 = W.square()
    sums_by_block = [route(*joined, W, W2, invariant) for joined in blocks(calls, block)]
    return WeightSums(*(torch.cat(column) for column in zip(*sums_by_block, strict=True)))


Rows = Float[Tensor, "b g No T"]
Patches = Float[Tensor, "b g i T"]
Weight = Float[Tensor, "g o i"]


def blocks(calls: Sequence[SharedWeight], block: int) -> Iterator[tuple[Rows, Patches]]:
    """Yield J and u of some samples at a time, with the positions of all calls side by side."""
    for s in range(0, calls[0].batch, block):
        J = [c.J[s : s + block] for c in calls]
        u = [c.u[s : s + block] for c in calls]
        yield (J[0], u[0]) if len(calls) == 1 else (torch.cat(J, -1), torch.cat(u, -1))


def _by_outer(call: SharedWeight, W: Weight) -> WeightSums:
    u2 = call.u.squeeze(-1).square()
    adaptive = call.power * torch.einsum("goi,bgi->bgo", W.square(), u2)
    return WeightSums(squared_norm([call]), summed(adaptive))


def _by_forming(J: Rows, u: Patches, W: Weight, W2: Weight, invariant: bool) -> tuple[Tensor, ...]:
    """Form the gradients in blocks of inputs and of directions, so that a block fits the cache.

    A block of few inputs would read all rows of J again, so directions are split first.
    """
    b, g, i, _ = u.shape
    o, N = W.shape[1], J.shape[2] // W.shape[1]
    sums = [torch.zeros(b, dtype=torch.float64, device=u.device) for _ in range(2 + invariant)]
    inputs = min(i, max(tuning.FEWEST_BLOCK_INPUTS, tuning.BLOCK_ENTRIES // (b * g * N * o)))
    directions = max(1, tuning.BLOCK_ENTRIES // (b * g * inputs * o))
    for block in J.split(directions * o, 2):
        pieces = (t.split(inputs, dim) for t, dim in ((u, 2), (W.mT, 1), (W2.mT, 1)))
        for part, w, w2 in zip(*pieces, strict=True):
            grad = (part @ block.mT).unflatten(3, (-1, o))  # [b, g, inputs, directions, o]
            if invariant:
                sums[2] += summed((grad * w.unsqueeze(2)).sum(4).square())
            squares = grad.square_().sum(3)
            sums[0] += summed(squares)
            sums[1] += summed(squares * w2)
    return tuple(sums)


def _by_pairs(J: Rows, u: Patches, W: Weight, W2: Weight, _: bool) -> tuple[Tensor, ...]:
    b, g, i, T = u.shape
    o = W.shape[1]
    pairs_in_all = T * (T + 1) // 2
    JJ, uu = u.new_zeros(g, pairs_in_all, b, o), u.new_empty(g, pairs_in_all, b, i)
    patch = u.permute(1, 3, 0, 2).contiguous()  # [g, T, b, i]
    by_output = J.unflatten(2, (-1, o)).permute(1, 4, 0, 2, 3)  # [g, T, b, N, o]
    by_output = by_output if by_output.stride(-1) == 1 else by_output.contiguous()
    several = by_output.split(max(1, tuning.BLOCK_ENTRIES // (g * T * b * o)), 3)
    end, with_itself = 0, []
    for t in range(T):  # a position with itself and all later ones
        with_itself.append(end)
        pairs = slice(end, end := end + T - t)
        torch.mul(patch[:, t : t + 1], patch[:, t:], out=uu[:, pairs])
        for some in several:
            JJ[:, pairs] += (some[:, t : t + 1] * some[:, t:]).sum(3)
    weighted = (uu.flatten(1, 2) @ W2.mT).view_as(JJ)  # one product for all samples reads W once
    totals = []
    for terms in (JJ.sum(3) * uu.sum(3), (JJ * weighted).sum(3)):  # [g, pairs, b]
        each = terms.double()
        untied = each[:, with_itself].sum((0, 1))
        total = 2 * each.sum((0, 1)) - untied  # pq and qp, the diagonal once
        if unusual((total < CANCELLED[u.dtype] * untied).any()):  # the digits are gone
            return _by_forming(J, u, W, W2, False)
        totals.append(total)
    return tuple(totals)


def squared_norm(calls: Sequence[SharedWeight]) -> Tensor:
    """||grad_W f||_F^2 of the weight that all calls share, all outputs together; [b], float64.

    With J [N o, T] and u [i, T] the gradients are J u^T, and their squared norm is the sum of
    (J^T J) * (u^T u) over pairs of positions. It is formed where that is cheaper, or where signed
    terms cancel too far.
    """
    T = sum(c.T for c in calls)
    outputs, i = calls[0].J.shape[2], calls[0].u.shape[2]
    route: Callable[[Rows, Patches], Tensor]
    if T == 1:
        each = (t.sum(2, dtype=torch.float64) for t in (calls[0].power, calls[0].u.square()))
        return torch.mul(*(t.flatten(1) for t in each)).sum(1)
    if T * (outputs + i) < outputs * i:
        route, entries = _plain_gram, T * (outputs + i)
    else:
        route, entries = _plain_forming, outputs * i
    block = max(1, tuning.BLOCK_ENTRIES // (calls[0].u.shape[1] * entries))
    return torch.cat([route(*part) for part in blocks(calls, block)])


def _plain_gram(J: Rows, u: Patches) -> Tensor:
    pairs = (J.mT @ J) * (u.mT @ u)
    total = summed(pairs)
    if unusual((total < CANCELLED[u.dtype] * summed(pairs.diagonal(dim1=2, dim2=3))).any()):
        return _plain_forming(J, u)
    return total


def _plain_forming(J: Rows, u: Patches) -> Tensor:
    return summed((u @ J.mT).square_())
