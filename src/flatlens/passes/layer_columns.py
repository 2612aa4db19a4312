"""Columns of the network's input, its layers and parameters from the derivative rows of a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.algebra.weight_gradients import WeightSums, squared_norm, weight_gradient
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.derivative_rows import Rows, Setup, Share, rule_shares, share
from flatlens.passes.needs import (
    ADAPTIVE,
    AT_THE_FIRST_LAYER,
    BACK_TO_PARAMETERS,
    FIRST_INVARIANT,
    LAYER_GRADIENTS,
    SCALED_SUMS,
    UNTIED,
)
from flatlens.passes.positions import widen_where_needed
from flatlens.passes.segments import Key
from flatlens.passes.spectral_columns import SpectralColumns

WIDEST_CROSSED = 4096  # input entries; Eq. 37 needs a matrix of their square
OF_WEIGHTS = BACK_TO_PARAMETERS - {UNTIED}  # quantities that need the gradients of parameters


def all_columns(
    setup: Setup, rows_by_edge: Rows, needs: frozenset[str], exact_untied: bool = False
) -> ChunkColumns:
    """Compute all columns of a chunk from its derivative rows.

    Args:
        setup: the chunk; its positions hold df/dz.
        rows_by_edge: the rows at all other edges.
        needs: names of ``passes.needs`` to compute.
        exact_untied: whether ||D^-1 C||_2 is asked for.
    """
    spectral = SpectralColumns(setup, rows_by_edge, needs)
    columns: dict[Key, Tensor] = {("output",): setup.f.detach(), **spectral.input_columns()}
    spectral.check_finite()
    view = _ChunkDerivatives(spectral)
    gradients = view.gradients() if needs & OF_WEIGHTS else None
    if gradients is not None:
        columns |= gradients.columns(setup, needs)
    for i in range(len(setup.plan.layers)):
        layer = {**spectral.layer_columns(i), **view.layer_columns(i, gradients)}
        if exact_untied:
            layer["untied_norm"] = setup.positions[i].untied_norms()
        columns |= {("layer", i, name): values for name, values in layer.items()}
    first_call = spectral.first_call
    return ChunkColumns(
        layers=spectral.all_facts(),
        paths=setup.plan.parameters.paths,
        columns=columns,
        sums={} if gradients is None else gradients.sums,
        first_weight=None if first_call is None else setup.positions[first_call].W,
        unmeasured=setup.unmeasured,
    )


@dataclass(frozen=True)
class _Gradients:
    """Squared gradients of parameters, and what they add to each quantity.

    Attributes:
        shares: the share of each trainable parameter.
        by_call: the share of each call's weight, if it is known.
        bias_rows: df/db of each call, or None.
        invariant: Eq. 44's sum of the first layer, if there is one.
        sums: sums over samples for Eqs. 36 and 37.
    """

    shares: dict[str, Share]
    by_call: dict[int, Share]
    bias_rows: list[Tensor | None]
    invariant: Tensor | None
    sums: dict[str, Tensor]

    def columns(self, setup: Setup, needs: frozenset[str]) -> dict[Key, Tensor]:
        """Return the columns of ``ParameterProbe``, and Eq. 44's sum of the first layer."""
        columns: dict[Key, Tensor] = {}
        if self.invariant is not None and FIRST_INVARIANT in needs:
            columns["first", "invariant"] = self.invariant
        zeros = setup.f.new_zeros(setup.batch, dtype=torch.float64)
        for name, _ in setup.named:
            grad, adaptive = self.shares.get(name, (zeros, zeros))
            columns["parameter", name, "grad"] = grad
            if ADAPTIVE in needs:  # else only some parameters have a share
                columns["parameter", name, "adaptive"] = adaptive
        return columns


class _ChunkDerivatives:
    """The rows df/dz of one chunk, together with its derivatives with respect to inputs."""

    def __init__(self, spectral: SpectralColumns) -> None:
        self.spectral, self.setup, self.needs = spectral, spectral.setup, spectral.needs
        if self.needs & BACK_TO_PARAMETERS:
            calls = self.setup.positions
            widen_where_needed(calls, [self._sensitivity(i) for i in range(len(calls))])

    def _sensitivity(self, call: int) -> Tensor | None:
        """Return ||A||_2 or ||A||_F of a call; None if no product with A or the weight is used."""
        if not self.needs & (AT_THE_FIRST_LAYER | {ADAPTIVE}):
            return None
        spectrum = self.spectral.layer_spectrum(call)
        if spectrum is not None:
            return spectrum[0][:, 0]
        number = self.setup.plan.layers[call].total
        if number == -1:
            return self.setup.f.new_ones(self.setup.batch, dtype=torch.float64)
        A = self.spectral.rows_by_edge[number]
        return torch.linalg.vector_norm(A.flatten(1), dim=1, dtype=torch.float64)

    def gradients(self) -> _Gradients:
        """Measure every parameter and every weight of a layer."""
        setup, adaptive = self.setup, ADAPTIVE in self.needs
        bias_rows = [p.bias_rows() if p.layer.bias is not None else None for p in setup.positions]
        shares = rule_shares(setup, self.spectral.rows_by_edge, bias_rows)
        by_call: dict[int, Share] = {}
        invariant, sums = self._dense_first_layer()
        first_call = self.spectral.first_call if FIRST_INVARIANT in self.needs else None
        unknown = setup.f.new_full((setup.batch,), torch.nan, dtype=torch.float64)
        for group, owner in setup.plan.parameters.groups:
            calls = [setup.positions[i] for i in group]
            wanted = group == [first_call] and invariant is None
            if adaptive or wanted:
                weight = weight_gradient(calls, wanted)
            else:
                weight = WeightSums(squared_norm(calls), unknown, unknown)
            invariant = weight.invariant if wanted else invariant
            by_call.update(dict.fromkeys(group, weight[:2]))
            if owner is not None:
                shares[owner] = weight[:2]
        if first_call is not None and invariant is None:  # its weight has other uses, too
            invariant = weight_gradient([setup.positions[first_call]], True).invariant
        return _Gradients(shares, by_call, bias_rows, invariant, sums)

    def _dense_first_layer(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Compute the sums of Eqs. 37 and 44 for a dense first layer (FirstLayerProbe)."""
        first_call = self.spectral.first_call
        if first_call is None or not self.needs & AT_THE_FIRST_LAYER:
            return None, {}
        positions, q = self.setup.positions[first_call], self.setup.plan.layers[first_call]
        if not positions.dense:
            return None, {}
        u2 = positions.u[:, 0, :, 0].square()
        A2, B2 = (self._power(k, u2) for k in (q.total, q.through))
        sums: dict[str, Tensor] = {}
        if u2.shape[1] <= WIDEST_CROSSED and SCALED_SUMS in self.needs:
            sums["curvature"] = positions.power[:, 0].to(u2).mT @ u2
            sums["crossed"] = A2.mT @ u2
        return (B2 * u2).sum(1), sums  # J W is B, and u is x^l

    def _power(self, number: int, like: Tensor) -> Tensor:
        """Return the squares of the rows at an edge, summed over outputs."""
        spectral = self.spectral
        if [number] == self.setup.plan.inputs and spectral.input_power.dtype == like.dtype:
            return spectral.input_power
        return spectral.rows_by_edge[number].to(like).square().sum(1)

    def layer_columns(self, call: int, gradients: _Gradients | None) -> dict[str, Tensor]:
        """Return the columns of ``LayerProbe`` that need df/dz."""
        positions = self.setup.positions[call]
        columns: dict[str, Tensor] = {}
        if gradients is not None and self.needs & {LAYER_GRADIENTS, ADAPTIVE}:
            columns |= self._gradient_columns(call, gradients)
        if UNTIED in self.needs:
            untied, bias, patch_min = positions.energies()
            per_position = positions.layer.bias_per_position
            columns |= {"untied": untied, "patch_min": patch_min}
            columns["untied_bias"] = bias if per_position else torch.zeros_like(untied)
        return columns

    def _gradient_columns(self, call: int, gradients: _Gradients) -> dict[str, Tensor]:
        plan = self.setup.plan
        weight = gradients.by_call.get(call)
        if weight is None:
            weight = gradients.shares[plan.parameters.trainable[id(plan.calls[call].parameter)]]
        columns = {"grad_weight": weight[0], "grad_bias": torch.zeros_like(weight[0])}
        if ADAPTIVE in self.needs:
            columns["adaptive"] = weight[1]
        bias, bias_rows = plan.calls[call].layer.bias, gradients.bias_rows[call]
        if bias is not None and bias_rows is not None:
            name = plan.parameters.trainable.get(id(bias))
            own = share(bias, [bias_rows]) if name is None else gradients.shares[name]
            columns["grad_bias"] = own[0]
        return columns
