"""Collect the derivative rows of one chunk, and compute each parameter's share from them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens import tuning
from flatlens.algebra import looks
from flatlens.algebra.buffers import Buffers
from flatlens.algebra.sums import out_of_range, relative, side_by_side, squares, summed
from flatlens.algebra.wide_tensor import shown_wide
from flatlens.capture.layout import split
from flatlens.capture.recording import Lookup
from flatlens.passes.forward import Forward, Named
from flatlens.passes.head import Head, find_head, mixture
from flatlens.passes.independence import Layouts
from flatlens.passes.needs import AT_THE_FIRST_LAYER, AT_THE_INPUT
from flatlens.passes.plan import ChunkPlan, plan_chunk, reaching_calls
from flatlens.passes.positions import Positions
from flatlens.passes.products import Products, gradients
from flatlens.passes.tied_tables import tied_share
from flatlens.passes.unmeasured import unmeasured

Rows = dict[int, Tensor]  # edge number -> [b, outputs, entries]
Share = tuple[Tensor, Tensor]  # ||df/dp||_F^2 and sum p^2 (df/dp)^2, per sample


class NeedsEachOutputError(Exception):
    """Raised if rounding spoils the rows of a head; each output then needs its own product."""


@dataclass(frozen=True)
class Setup:
    """Everything that is ready before the first product of a chunk.

    Attributes:
        forward: the forward pass.
        plan: which edges are asked for.
        positions: the calls in the weight-sharing format.
        products: asks autograd.
        target: directions of the outputs to measure, [b, k, N], such as R^T of a loss; None
            measures each output separately.
        plain: whether f itself is measured, and not R^T f of a loss.
        head: a head narrower than the outputs, or None.
        outputs: number of outputs, or of rows of ``target``.
        directions: the directions of the products, [b, k, N]; None means each output separately.
        count: number of products.
        named: all parameters.
        buffers: memory for the rows.
    """

    forward: Forward
    plan: ChunkPlan
    positions: list[Positions]
    products: Products
    target: Tensor | None
    plain: bool
    head: Head | None
    outputs: int
    directions: Tensor | None
    count: int
    named: Named
    buffers: Buffers

    @property
    def f(self) -> Tensor:
        """The outputs, [b, N]."""
        return self.forward.f

    @property
    def batch(self) -> int:
        """Number of samples."""
        return len(self.forward.f)

    @cached_property
    def unmeasured(self) -> tuple[str, ...]:
        """The parameters with a linear map that is not measured as a layer."""
        slow = list(self.plan.parameters.slow)
        return unmeasured(self.forward.graph, self.plan.calls, self.named, slow)

    def rows_of(self, call: int) -> int:
        """Return how many rows of df/dz a call gets; a head gets all of them."""
        is_head = self.head is not None and call == self.head.call
        return self.outputs if is_head else self.count


def set_up(
    forward: Forward,
    layouts: Layouts,
    named: Named,
    buffers: Buffers,
    *,
    target: Tensor | None,
    plain: bool,
    use_head: bool,
    needs: frozenset[str],
) -> Setup:
    """Plan one chunk and bring its calls into the weight-sharing format.

    Args:
        forward: the forward pass.
        layouts: the layout of each call.
        named: all parameters.
        buffers: memory.
        target: R^T of a loss, or None.
        plain: whether f itself is measured, and not R^T f of a loss.
        use_head: whether a narrow head may save products.
        needs: names of ``passes.needs`` to compute.
    """
    f = forward.f
    calls, alive = reaching_calls(forward, layouts)
    head = find_head(forward.graph, f, calls, target) if use_head else None
    outputs = (f if target is None else target).shape[1]
    directions = target if head is None else head.directions
    count = outputs if directions is None else directions.shape[1]
    at_input = head is not None or bool(needs & (AT_THE_INPUT | AT_THE_FIRST_LAYER))
    plan = plan_chunk(forward, calls, alive, named, needs, inputs=at_input)
    positions = [
        Positions(call, layout, len(f), outputs if head and i == head.call else count, buffers, i)
        for i, (call, layout) in enumerate(zip(calls, alive, strict=True))
    ]
    many = count >= tuning.MANY_PRODUCTS and len(f) <= tuning.FEW_SAMPLES
    products = Products(f, plan.edges, many and all(p.dense for p in positions))
    return Setup(
        forward, plan, positions, products, target, plain,
        head, outputs, directions, count, named, buffers,
    )  # fmt: skip


def collect(
    setup: Setup,
    directions: Tensor | None,
    span: range,
    retain: bool,
    take: Callable[[int, int, Tensor | None], None],
) -> Rows:
    """Compute the products of a span of directions and stack the rows at each edge.

    Args:
        setup: the chunk.
        directions: [b, k, N], or None for each output separately.
        span: which directions.
        retain: whether the graph must outlive the last product.
        take: receives (call, index in the span, df/dz) of every call except the head.
    """
    f, batch, plan = setup.f, setup.batch, setup.plan
    rows_by_edge = {
        k: setup.buffers.get(("row", k), (batch, len(span), entries), f)
        for k, (_, entries) in plan.kept_rows.items()
    }
    for place, grads in setup.products.each(directions, span, retain):
        for k, (layout, _) in plan.kept_rows.items():
            g = grads[k]
            if g is None:
                rows_by_edge[k][:, place] = 0
            else:
                rows_by_edge[k][:, place] = split(g, layout, batch).flatten(1)
            del g
        for i, k in enumerate(plan.outs):
            if setup.head is None or i != setup.head.call:
                take(i, place, grads[k])
        del grads  # frees memory for the next gradients
    return rows_by_edge


# -- a head's rows against one product without it ------------------------------------------------


def direct_mixture(setup: Setup) -> Float[Tensor, "b M"]:
    """Return df/dx along one mixture of all rows, without the head's directions."""
    f, target = setup.f, setup.target
    measured = f if target is None else (target @ f.unsqueeze(2)).squeeze(2)
    edges = [setup.plan.edges[k] for k in setup.plan.inputs]
    grads = gradients((measured * mixture(measured)).sum(), edges, True)
    pairs = zip(grads, setup.forward.fed, strict=True)
    return side_by_side([(torch.zeros_like(t) if g is None else g).flatten(1) for g, t in pairs])


def check_head(direct: Tensor, through_head: Tensor, precision: torch.dtype) -> None:
    """Raise if a mixture of the head's rows differs from the direct product.

    Args:
        direct: the product without the head.
        through_head: the mixture.
        precision: the precision that derivatives are computed in.

    Raises:
        NeedsEachOutputError: if they differ by more than rounding.
    """
    limits = torch.finfo(precision)
    limit = {64: 1e-9, 32: 1e-3}.get(limits.bits, 16 * limits.eps)
    if looks.unusual((relative(through_head - direct, direct) > limit).any()):
        raise NeedsEachOutputError


# -- parameters that are no weight of a layer ----------------------------------------------------


def rule_shares(
    setup: Setup,
    rows_by_edge: Rows,
    bias_rows: Sequence[Tensor | None],
    without: Container[str] = (),
) -> dict[str, Share]:
    """Return the shares of parameters that are no layer's weight, except those in ``without``."""
    shares = {}
    plan = setup.plan.parameters
    for name, p in setup.named:
        if name in without:
            continue
        if name in plan.slow:
            shares[name] = share(p, [rows_by_edge[plan.slow[name]]])
        elif name in plan.rules:
            shares[name] = _bias_or_copy_share(setup, name, p, rows_by_edge, bias_rows)
        elif name in plan.tables:
            shares[name] = _lookup_share(setup, name, p, rows_by_edge)
    return shares


def _bias_or_copy_share(
    setup: Setup, name: str, p: Tensor, rows_by_edge: Rows, bias_rows: Sequence[Tensor | None]
) -> Share:
    """Return the share of a bias, or of a parameter with one copy per sample."""
    users, copies = setup.plan.parameters.rules[name]
    single = setup.positions[users[0]] if len(users) == 1 and not copies else None
    if single is not None and single.row_is_bias_gradient:
        return weighed(p, single.power.flatten(1))
    return share(p, [*(bias_rows[i] for i in users), *(rows_by_edge[k] for k in copies)])


def _lookup_share(setup: Setup, name: str, p: Tensor, rows_by_edge: Rows) -> Share:
    """Return the share of a table, which may also be the weight of linear layers."""
    plan = setup.plan.parameters
    looked_up = [(rows_by_edge[k], t) for k, t in plan.tables[name]]
    lookups_alone = table_share(p, looked_up)
    if name not in plan.tied:
        return lookups_alone
    calls = [setup.positions[i] for i in plan.tied[name]]
    return tied_share(p, calls, looked_up, lookups_alone)


def share(p: Tensor, uses: Sequence[Tensor | None]) -> Share:
    """Return a parameter's share of S and of adaptive sharpness from the rows of all its uses.

    The uses are added up before they are squared: one parameter has one gradient.
    """
    total = sum(u for u in uses if u is not None)
    assert isinstance(total, Tensor)
    return weighed(p, squares(total, 1))


def weighed(p: Tensor, power: Float[Tensor, "b numel"]) -> Share:
    """Return a parameter's share from the squares of its gradient, summed over outputs."""
    values = shown_wide(p.detach()).flatten()
    if not looks.can_look(p):
        return summed(power), summed(power.double() * values.double().square())
    if out_of_range(values[None]):
        values = values.double()
    adaptive = summed(power * values.square())
    if not bool(torch.isfinite(adaptive).all()):  # both factors are float32, their product is not
        adaptive = summed(power.double() * values.double().square())
    return summed(power), adaptive


def table_share(p: Tensor, looked_up: Sequence[tuple[Tensor, Lookup]]) -> Share:
    """Return a table's share: the gradient of a row is the sum over all lookups of that row."""
    N = looked_up[0][0].shape[1]
    grads = torch.cat([g.unflatten(2, (-1, p.shape[1])) for g, _ in looked_up], 2)  # [b, N, T, d]
    indices = torch.cat([t.indices for _, t in looked_up], 1)
    counts = torch.cat([t.indices != t.padding for _, t in looked_up], 1)  # padding has no gradient
    met_at = (indices[:, :, None] == indices[:, None, :]).int().argmax(2)  # where it was met first
    places = met_at[:, None, :, None].expand(-1, N, -1, p.shape[1])
    total = torch.zeros_like(grads).scatter_add(2, places, grads * counts[:, None, :, None])
    power = total.double().square().sum(1)  # [b, T, d]
    weights = p.detach()[indices].double().square()
    return power.sum((1, 2)), (power * weights).sum((1, 2))
