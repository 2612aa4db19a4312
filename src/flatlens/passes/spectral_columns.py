"""Columns of the network's input and of its layers from derivatives with respect to inputs.

Nothing here needs df/dz, the derivative at a layer's output. Columns that were not asked for are
left out. They are NaN if a missing column would stand for a known value.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from flatlens.algebra.looks import unusual
from flatlens.algebra.spectra import largest_singular_value, singular_values, spectral_norm
from flatlens.algebra.sums import out_of_range, relative, side_by_side
from flatlens.capture.inputs import check_finite
from flatlens.capture.layout import split
from flatlens.passes.derivative_rows import Rows, Setup
from flatlens.passes.needs import (
    BYPASS,
    INPUT_INVARIANT,
    INPUT_SPECTRUM,
    INPUT_TOP,
    LAYER_SPECTRA,
    LAYER_TOPS,
    PATCH_RANKS,
    THROUGH,
)
from flatlens.passes.segments import Key
from flatlens.passes.slots import LayerFacts

Spectrum = tuple[Tensor, Tensor]  # singular values and rank


class SpectralColumns:
    """The derivatives of one chunk at inputs, and the values that several columns share.

    Attributes:
        setup: the chunk.
        rows_by_edge: the rows at all edges that keep them, by edge number.
        needs: names of ``passes.needs`` to compute.
        first_call: the call that reads the network's input, or None.
    """

    def __init__(self, setup: Setup, rows_by_edge: Rows, needs: frozenset[str]) -> None:
        self.setup, self.rows_by_edge, self.needs = setup, rows_by_edge, needs
        reads = [q.reads_input for q in setup.plan.layers]
        self.first_call = reads.index(True) if any(reads) else None
        self._spectra: dict[int, Spectrum] = {}

    # -- the network's input ---------------------------------------------------------------------

    @cached_property
    def input_rows(self) -> Tensor:
        """df/dx, [b, outputs, M]."""
        return side_by_side([self.rows_by_edge[k] for k in self.setup.plan.inputs])

    @cached_property
    def input_power(self) -> Tensor:
        """Squares of df/dx, summed over outputs."""
        power = self.input_rows[:, 0].square()
        for v in range(1, self.input_rows.shape[1]):
            power.addcmul_(self.input_rows[:, v], self.input_rows[:, v])
        if power.dtype == torch.float32 and out_of_range(self.input_rows.flatten(1)):
            return self.input_rows.double().square().sum(1)
        return power

    @cached_property
    def input_spectrum(self) -> Spectrum:
        """Singular values of df/dx, and the rank."""
        return self._decomposed(self.input_rows, INPUT_SPECTRUM in self.needs)

    def input_columns(self) -> dict[Key, Tensor]:
        """Return the columns of ``InputProbe``."""
        if not self.setup.plan.inputs:
            return {}
        fed = side_by_side([t.detach().flatten(1) for t in self.setup.forward.fed])
        x2 = fed.double().square()
        columns: dict[Key, Tensor] = {("input", "x_norm"): x2.sum(1).sqrt()}
        if INPUT_TOP in self.needs:
            columns["input", "singular"], columns["input", "rank"] = self.input_spectrum
        if INPUT_INVARIANT in self.needs:
            columns["input", "invariant"] = (self.input_power * x2).sum(1)
        return columns

    # -- layers ----------------------------------------------------------------------------------

    def layer_spectrum(self, call: int) -> Spectrum | None:
        """Return singular values and rank of A of a call; None if they are not asked for."""
        if LAYER_TOPS not in self.needs:
            return None
        number, whole = self.setup.plan.layers[call].total, LAYER_SPECTRA in self.needs
        at_input = INPUT_SPECTRUM in self.needs if whole else INPUT_TOP in self.needs
        if at_input and [number] == self.setup.plan.inputs:
            return self.input_spectrum if whole else _largest_alone(*self.input_spectrum)
        if number not in self._spectra:
            self._spectra[number] = self._decomposed(self.rows_by_edge[number], whole)
        return self._spectra[number]

    def _decomposed(self, A: Tensor, whole: bool) -> Spectrum:
        """Return singular values and rank; values beyond the width of a head are zero.

        Without ``whole`` only the largest value is known: the others are NaN and the rank is -1.
        """
        try:
            precision = self.setup.forward.precision
            s, rank = singular_values(A, precision) if whole else largest_singular_value(A)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            at_input = A is self.__dict__.get("input_rows")
            what = "input gradient" if at_input else "gradient at the input of a layer"
            check_finite(A, self.setup.forward.start, what)
            raise
        beyond = min(self.setup.outputs, A.shape[2]) - s.shape[1]
        filling = 0.0 if whole else torch.nan
        return (s if beyond == 0 else F.pad(s, (0, beyond), value=filling)), rank

    def check_finite(self) -> None:
        """Raise if a derivative at the input of the network or of a layer is not finite.

        Parameter gradients can still be finite: d sqrt(0 x) / dx is 0 times infinity.
        """
        tops = []
        if INPUT_TOP in self.needs:
            tops.append(("input gradient", self.input_spectrum[0][:, 0]))
        for i, positions in enumerate(self.setup.positions if self.setup.plan.layers else ()):
            spectrum = self.layer_spectrum(i)
            if spectrum is not None:
                what = f"gradient at the input of layer {i} ({positions.layer.kind})"
                tops.append((what, spectrum[0][:, 0]))
        if tops and unusual(~torch.isfinite(torch.stack([top for _, top in tops])).all()):
            for what, top in tops:
                check_finite(top[:, None], self.setup.forward.start, what)

    def layer_columns(self, call: int) -> dict[str, Tensor]:
        """Return the columns of ``LayerProbe`` that do not need df/dz."""
        setup, positions = self.setup, self.setup.positions[call]
        x = split(setup.plan.calls[call].x, positions.layout, setup.batch)
        columns = {"x_norm": x.flatten(1).double().norm(dim=1), **self._beside_layer(call)}
        spectrum = self.layer_spectrum(call)
        if spectrum is not None:
            columns |= {"singular": spectrum[0], "rank": spectrum[1]}
        if THROUGH not in self.needs:
            width = 1 if spectrum is None else spectrum[0].shape[1]
            columns["singular_through"] = setup.f.new_full((setup.batch, width), torch.nan)
        if PATCH_RANKS in self.needs:
            zeros = torch.zeros_like(columns["x_norm"])
            rank = positions.patch_rank(self.bias_counts(call)) if self._full_rank else zeros
            columns["patch_rank"] = rank
        return columns

    @cached_property
    def _full_rank(self) -> bool:
        """Whether every layer has at least as many features as positions.

        If not, the smallest singular value over positions is zero for some layer, and none is
        computed.
        """
        pairs = enumerate(self.setup.positions)
        return all(p.u.shape[2] + self.bias_counts(i) >= p.T for i, p in pairs)

    def _beside_layer(self, call: int) -> dict[str, Tensor]:
        """Return the distance of A from B, if something else reads the layer's input."""
        setup, q = self.setup, self.setup.plan.layers[call]
        unknown = setup.f.new_full((setup.batch,), torch.nan, dtype=torch.float64)
        columns: dict[str, Tensor] = {}
        if BYPASS not in self.needs:
            columns |= {"bypass": unknown, "beside": unknown}
        if THROUGH not in self.needs:
            columns |= {
                "gap_norm": unknown,
                "chain": unknown,
                "rank_through": torch.full_like(unknown, -1),
            }
        if -1 != q.total != q.through != -1:
            A, B = self.rows_by_edge[q.total], self.rows_by_edge[q.through]
            if BYPASS in self.needs:
                columns["bypass"] = relative((A - B).double(), A)
            if THROUGH in self.needs:
                columns |= self._through(call, A, B)
        if q.beside_input and BYPASS in self.needs:
            columns["beside"] = self._beside_input(call) if setup.plan.inputs else unknown
        return columns

    def _through(self, call: int, A: Tensor, B: Tensor) -> dict[str, Tensor]:
        singular, rank = self._decomposed(B, LAYER_SPECTRA in self.needs)
        return {
            "singular_through": singular,
            "rank_through": rank,
            "gap_norm": spectral_norm((A - B).double()),
            "chain": self._chain(call, A, B),
        }

    def _beside_input(self, call: int) -> Tensor:
        """Return the relative part of df/dx that is not A."""
        q, inputs = self.setup.plan.layers[call], self.setup.plan.inputs
        A = self.rows_by_edge[q.total]
        through = [A if k == q.input else torch.zeros_like(self.rows_by_edge[k]) for k in inputs]
        return relative(self.input_rows - side_by_side(through), self.input_rows)

    def _chain(self, call: int, A: Tensor, B: Tensor) -> Tensor:
        """Return the distance of A_i - B_i from A_{i+1}: 0 in a chain of identity skips."""
        layers = self.setup.plan.layers
        after = self.rows_by_edge[layers[call + 1].total] if call + 1 < len(layers) else None
        if after is None or after.shape != A.shape:
            return A.new_full((self.setup.batch,), torch.inf, dtype=torch.float64)
        return relative(A - B - after, after)

    # -- what a call is --------------------------------------------------------------------------

    def bias_counts(self, call: int) -> bool:
        """Whether the bias is a trainable parameter with no other use, added at each position."""
        layer, plan = self.setup.plan.calls[call].layer, self.setup.plan.parameters
        name = plan.trainable.get(id(layer.bias))
        return layer.bias_per_position and plan.rules.get(name or "") == ([call], [])

    def facts(self, call: int) -> LayerFacts:
        """Return the facts about a call."""
        forward, recorded = self.setup.forward, self.setup.plan.calls[call]
        end, _, _ = forward.graph.below_views(get_gradient_edge(forward.f))
        out, _, _ = forward.graph.below_views(recorded.out)
        return LayerFacts(
            recorded.layer,
            recorded.parameter,
            self.setup.positions[call].T,
            recorded.x.numel() // self.setup.batch,
            reads_input=self.setup.plan.layers[call].reads_input,
            is_output=self.setup.plain and end.node is out.node,
            bias_counts=self.bias_counts(call),
        )

    def all_facts(self) -> list[LayerFacts]:
        """Return the facts about every call; empty if no layer is asked for."""
        return [self.facts(i) for i in range(len(self.setup.plan.layers))]


def _largest_alone(singular: Tensor, rank: Tensor) -> Spectrum:
    """Return a spectrum with only its largest value; the others are NaN."""
    alone = torch.full_like(singular, torch.nan)
    alone[:, 0] = singular[:, 0]
    return alone, torch.full_like(rank, -1)
