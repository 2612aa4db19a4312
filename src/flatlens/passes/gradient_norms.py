"""Measure gradient norms and derivatives with respect to inputs, without storing df/dz.

This is enough for the sharpness, for all spectra and for the headline set. The gradient norm of a
weight at few positions follows from two Gram matrices over positions, and its gradient is never
formed. A dense layer keeps only the norms of its rows. If only the sharpness is asked for, products
stop before the input and come a few at a time, so memory does not grow with the number of outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens import tuning
from flatlens.algebra.buffers import Buffers
from flatlens.algebra.sums import norms, side_by_side
from flatlens.algebra.weight_gradients import squared_norm
from flatlens.capture.inputs import Inputs
from flatlens.capture.layout import split
from flatlens.capture.recording import CapturePlan
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.derivative_rows import (
    Rows,
    Setup,
    check_head,
    collect,
    direct_mixture,
    rule_shares,
)
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.head import mixed_rows
from flatlens.passes.head_fallback import HeadFallback
from flatlens.passes.independence import Layouts
from flatlens.passes.needs import GRADIENTS
from flatlens.passes.positions import widen_where_needed
from flatlens.passes.request import Request
from flatlens.passes.segments import Key
from flatlens.passes.spectral_columns import SpectralColumns


class GradientNorms:
    """The strategy for ||df/dp||_F^2 of every parameter and for derivatives at inputs.

    Args:
        subject: the network.
        request: the request of the caller.
        buffers: memory for the rows.
        rows_at_once: products whose rows are stored at a time, if no derivative with respect to an
            input is asked for. Spectra need the rows of all products.
    """

    def __init__(
        self, subject: Subject, request: Request, buffers: Buffers, rows_at_once: int
    ) -> None:
        self.subject, self.request, self.rows_at_once = subject, request, rows_at_once
        self.chunks = HeadFallback(subject, request, buffers)

    def run(self, inputs: Inputs, plan: CapturePlan, start: int = 0) -> Forward:
        """Run the network once."""
        return self.subject.run(inputs, plan, start)

    def measure(self, inputs: Inputs, forward: Forward, layouts: Layouts) -> ChunkColumns:
        """Measure the samples of one forward pass."""
        return self.chunks.measure(inputs, forward, layouts, self._columns)

    def _columns(self, setup: Setup) -> ChunkColumns:
        needs = self.request.needs
        at_once = self.rows_at_once if needs == {GRADIENTS} else setup.count
        rows_by_edge, grads = _measured(setup, at_once, GRADIENTS in needs)
        columns: dict[Key, Tensor] = {("output",): setup.f.detach()}
        if GRADIENTS in needs:
            zeros = setup.f.new_zeros(setup.batch, dtype=torch.float64)
            for name, _ in setup.named:
                columns["parameter", name, "grad"] = grads.get(name, zeros)
        spectral = SpectralColumns(setup, rows_by_edge, needs)
        spectral.check_finite()
        columns |= spectral.input_columns()
        for i in range(len(setup.plan.layers)):
            layer = spectral.layer_columns(i)
            columns |= {("layer", i, name): values for name, values in layer.items()}
        first_call, paths = spectral.first_call, setup.plan.parameters.paths
        first_weight = None if first_call is None else setup.positions[first_call].W
        return ChunkColumns(
            spectral.all_facts(), paths, columns,
            first_weight=first_weight, unmeasured=setup.unmeasured,
        )  # fmt: skip


def _measured(setup: Setup, rows_at_once: int, gradients: bool) -> tuple[Rows, dict[str, Tensor]]:
    """Return the rows of the last products, and ||df/dp||_F^2 of each parameter from all products.

    Without ``gradients`` no derivative of a parameter is computed or returned.
    """
    head = setup.head
    direct = setup.f.new_zeros(()) if head is None else direct_mixture(setup)
    mixed = torch.zeros_like(direct)
    if setup.products.batched:
        rows_at_once = max(rows_at_once, tuning.BATCHED_ROWS // setup.batch)
    sizes = _dense_sizes(setup) if gradients else {}
    grads: dict[str, Tensor] = {}
    rows_by_edge: Rows = {}
    for start in range(0, setup.count, rows_at_once):
        span = range(start, min(start + rows_at_once, setup.count))
        rows_by_edge = _span_rows(setup, span, sizes)
        if head is not None:
            A = side_by_side([rows_by_edge[k] for k in setup.plan.inputs])
            mixed += mixed_rows(head, A, start)
        if gradients:
            for name, grad in _from_rows(setup, rows_by_edge, sizes).items():
                grads[name] = grads[name] + grad if name in grads else grad
    if head is not None:
        check_head(direct, mixed, setup.forward.precision)
        sizes[head.call] = norms(head.jacobian)
    return rows_by_edge, grads | _from_sizes(setup, sizes) if gradients else {}


def _dense_sizes(setup: Setup) -> dict[int, Tensor]:
    """Allocate a norm for each row of df/dz of the dense layers that share no parameter."""
    plan = setup.plan.parameters
    joined = [group for group, owner in plan.groups if owner is not None and len(group) > 1]
    joined += [users for users, copies in plan.rules.values() if copies or len(users) > 1]
    joined += plan.tied.values()
    sharing = {i for group in joined for i in group}
    return {
        i: setup.f.new_zeros(setup.batch, setup.count, dtype=torch.float64)
        for i, positions in enumerate(setup.positions)
        if positions.dense and i not in sharing
    }


def _span_rows(setup: Setup, span: range, sizes: dict[int, Tensor]) -> Rows:
    """Collect the rows of some products; for dense layers write only their norms, to ``sizes``."""
    for positions in setup.positions:
        positions.begin(len(span))

    # For few samples one call for the norms of all rows is faster than a call for each row.
    together: dict[int, dict[int, Tensor]] = {i: {} for i in sizes}  # by call and product
    few_samples = setup.batch <= tuning.FEW_SAMPLES

    def take(call: int, place: int, grad: Tensor | None) -> None:
        if call not in sizes:
            setup.positions[call].take(place, grad)
        elif grad is None:
            sizes[call][:, span.start + place] = 0
        else:
            row = split(grad, setup.positions[call].layout, setup.batch).reshape(setup.batch, -1)
            if few_samples:
                together[call][span.start + place] = row
            else:
                sizes[call][:, span.start + place] = norms(row)

    rows_by_edge = collect(setup, setup.directions, span, span.stop < setup.count, take)
    for call, by_product in together.items():
        if by_product:  # empty if no product reaches the layer
            stacked = torch.stack(list(by_product.values()), 1)
            sizes[call][:, list(by_product)] = norms(stacked).to(sizes[call])
    return rows_by_edge


def _from_sizes(setup: Setup, sizes: dict[int, Tensor]) -> dict[str, Tensor]:
    """Return the shares of dense layers: df/dz for the bias and df/dz x^T for the weight."""
    plan = setup.plan.parameters
    energies = {i: size.double().square().sum(1) for i, size in sizes.items()}
    grads = {
        name: energies[users[0]]
        for name, (users, _) in plan.rules.items()
        if users and users[0] in energies
    }
    for group, owner in plan.groups:
        if owner is not None and group[0] in energies:
            x_norm = norms(setup.positions[group[0]].u.flatten(1))
            grads[owner] = energies[group[0]] * x_norm.double().square()
    return grads


def _from_rows(setup: Setup, rows_by_edge: Rows, sizes: dict[int, Tensor]) -> dict[str, Tensor]:
    """Return the shares of all other parameters from the rows of some products."""
    plan = setup.plan.parameters
    stored = [positions for i, positions in enumerate(setup.positions) if i not in sizes]
    widen_where_needed(stored, [None] * len(stored))
    others = {n: users for n, (users, _) in plan.rules.items() if not sizes.keys() & users}
    biases = {i for users in others.values() for i in users}
    bias_rows = [p.bias_rows() if i in biases else None for i, p in enumerate(setup.positions)]
    shares = rule_shares(setup, rows_by_edge, bias_rows, plan.rules.keys() - others)
    grads = {name: grad for name, (grad, _) in shares.items()}
    for group, owner in plan.groups:
        if owner is not None and group[0] not in sizes:
            grads[owner] = squared_norm([setup.positions[i] for i in group])
    return grads
