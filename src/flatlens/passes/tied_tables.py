"""Embedding tables that are also the weight of linear layers, such as wte of GPT-2.

The gradient of output n with respect to the table W of [V, d] is G = L + M, with L from the lookups
and M from the layers:

    L = sum_t e_{i_t} l_t^T      token t looks up row i_t, and l_t is the derivative at its copy
    M = sum_p j_p u_p^T          position p of a layer reads u_p, and j_p is df_n/dz there

Then ||G||^2 = ||L||^2 + ||M||^2 + 2 <L, M>, and <L, M> = sum_t l_t . M[i_t] needs only those rows
of M that a sample looked up. The same holds with W^2 between the factors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flatlens.algebra.looks import unusual
from flatlens.algebra.weight_gradients import CANCELLED, weight_gradient
from flatlens.capture.recording import Lookup
from flatlens.passes.positions import Positions

Share = tuple[Tensor, Tensor]
LookedUp = Sequence[tuple[Tensor, Lookup]]  # rows of a lookup [b, N, T d], the lookup


def tied_share(p: Tensor, calls: Sequence[Positions], looked_up: LookedUp, table: Share) -> Share:
    """Return a tied table's share of S and of the adaptive sharpness, per sample.

    Args:
        p: the table, [V, d].
        calls: the calls whose weight it is, each [V, d] as well.
        looked_up: the rows at each lookup.
        table: the share of the lookups alone.
    """
    layers = weight_gradient(calls)
    grads, indices = _side_by_side(p, looked_up)
    cross = torch.zeros_like(grads)  # M at the rows that were looked up, [b, N, T, d]
    for call in calls:
        J = call.J[:, 0].unflatten(1, (-1, p.shape[0]))  # [b, N, V, P]
        places = indices[:, None, :, None].expand(-1, J.shape[1], -1, J.shape[3])
        taken = J.gather(2, places).double()
        cross += torch.einsum("bntp,bdp->bntd", taken, call.u[:, 0].double())
    products = grads * cross
    weights = p.detach()[indices].double().square()
    plain = table[0] + layers.plain + 2 * products.sum((1, 2, 3))
    adaptive = table[1] + layers.adaptive + 2 * (products * weights.unsqueeze(1)).sum((1, 2, 3))
    limit = CANCELLED[calls[0].u.dtype]
    lost = (plain < limit * (table[0] + layers.plain)) | (
        adaptive < limit * (table[1] + layers.adaptive)
    )
    if unusual(lost.any()):
        _form(p, calls, looked_up, lost, (plain, adaptive))
    return plain, adaptive


def _form(
    p: Tensor,
    calls: Sequence[Positions],
    looked_up: LookedUp,
    samples: Bool[Tensor, " b"],
    shares: Share,
) -> None:
    """Replace the shares of ``samples``, whose terms cancel, by sums over the formed gradient."""
    weights = p.detach().double().square()
    for sample in samples.nonzero().flatten().tolist():
        squares = torch.zeros_like(weights)
        for output in range(looked_up[0][0].shape[1]):
            squares += tied_gradient(p, calls, looked_up, sample, output).square()
        shares[0][sample], shares[1][sample] = squares.sum(), (squares * weights).sum()


def tied_gradient(
    p: Tensor, calls: Sequence[Positions], looked_up: LookedUp, sample: int, output: int
) -> Float[Tensor, "V d"]:
    """Form the gradient of one output of one sample with respect to a tied table, in float64."""
    grads, indices = _side_by_side(p, looked_up)
    total = torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
    total.index_add_(0, indices[sample], grads[sample, output])
    for call in calls:
        J = call.J[sample, 0].unflatten(0, (-1, p.shape[0]))[output].double()  # [V, P]
        total += J @ call.u[sample, 0].double().mT
    return total


def _side_by_side(
    p: Tensor, looked_up: LookedUp
) -> tuple[Float[Tensor, "b N T d"], Int[Tensor, "b T"]]:
    """Join the rows and indices of all lookups; a padding index has no gradient."""
    grads = torch.cat([g.unflatten(2, (-1, p.shape[1])) for g, _ in looked_up], 2).double()
    indices = torch.cat([t.indices for _, t in looked_up], 1).long()
    counts = torch.cat([t.indices != t.padding for _, t in looked_up], 1)
    return grads * counts[:, None, :, None], indices
