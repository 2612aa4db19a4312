"""Estimate a chunk from a few random output directions, for networks with many outputs.

- Sums of squares (sharpness, its split, untied and adaptive) are means over random output
  directions v of +-1: E ||grad (v . f)||^2 = ||grad f||_F^2. They need only first derivatives and
  use the same code as the exact pass. The spread over directions gives the standard error.
- Spectra come from Lanczos (``sketched_spectra``), which needs products with the Jacobian as well
  (``forward_products``). Attention runs the kernels that ``kernels`` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flatlens.algebra.buffers import Buffers
from flatlens.algebra.student import plain_rtol
from flatlens.algebra.traces import FEWEST
from flatlens.capture.injection import Change, Injection, Place
from flatlens.capture.inputs import Inputs
from flatlens.capture.recording import CapturePlan
from flatlens.errors import counted
from flatlens.metrics import sharpness
from flatlens.passes import sketched_spectra
from flatlens.passes.columns import ChunkColumns, over_directions
from flatlens.passes.derivative_rows import Setup, collect, set_up
from flatlens.passes.directions import SampleStreams, Signs
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.forward_products import Way
from flatlens.passes.independence import Layouts
from flatlens.passes.kernels import PLAIN, Kernels
from flatlens.passes.layer_columns import all_columns
from flatlens.passes.needs import (
    BACK_TO_PARAMETERS,
    BESIDE_LAYERS,
    GRADIENTS,
    INPUT_INVARIANT,
    INPUT_TOP,
    LAYER_SPECTRA,
    LAYER_TOPS,
    PATCH_RANKS,
)
from flatlens.passes.request import Request
from flatlens.passes.segments import Key
from flatlens.passes.sketched_spectra import SpectrumFinder
from flatlens.passes.standard_errors import (
    ProductErrors,
    Replicates,
    layer_errors,
    network_errors,
)
from flatlens.probes import Probe, Sketch

MAX_DIRECTIONS = 4096
# Quantities that are means or maxima over random directions; others need at most one product.
OVER_DIRECTIONS = BACK_TO_PARAMETERS | BESIDE_LAYERS | {INPUT_INVARIANT, LAYER_SPECTRA}
BY_LANCZOS = frozenset({INPUT_TOP, LAYER_TOPS})


class ExactIsCheaperError(Exception):
    """Raised if rtol takes ``directions``, which are no fewer than all products."""

    def __init__(self, directions: int) -> None:
        super().__init__(directions)
        self.directions = directions


@dataclass(frozen=True)
class _ChunkEstimate:
    """The contribution of one chunk to the standard errors.

    Attributes:
        replicates: sums over its samples, by direction.
        moments: mean and variance of the sharpness over directions; None if it is not asked for.
        spread: summed squared standard errors of the samples' participation ratios.
        converged: whether every largest singular value met the tolerance, on its device.
        input_error: largest error of sigma_1 at the input, summed over samples.
        layer_error: largest error of sigma_1 at layers, summed over samples and layers.
    """

    replicates: Replicates
    moments: tuple[float, float] | None = None
    spread: Tensor | None = None
    converged: Tensor | None = None
    input_error: Tensor | None = None
    layer_error: Tensor | None = None


class SketchStrategy:
    """The strategy that estimates from random output directions.

    Args:
        subject: the network.
        request: the request of the caller.
        buffers: memory for the rows.
        products: products that an exact pass would take.
        kernels: the kernels of attention.
    """

    def __init__(
        self,
        subject: Subject,
        request: Request,
        buffers: Buffers,
        products: int,
        kernels: Kernels = PLAIN,
    ) -> None:
        self.subject, self.request, self.buffers = subject, request, buffers
        self.kernels, self.way = kernels, Way()
        self.needs = _needs_of_a_sketch(request)
        self.products = products
        self.streams = SampleStreams(request.sketch.seed)
        self.chunks: list[_ChunkEstimate] = []
        self._latest: _ChunkEstimate | None = None  # belongs to the chunk measured last

    @property
    def replicates(self) -> list[Replicates]:
        """Sums over samples for each direction, one entry per chunk."""
        return [chunk.replicates for chunk in self.chunks]

    def expect(self, inputs: Inputs, start: int) -> None:
        """Seed the directions of a batch from its samples; the first has the index ``start``."""
        self.streams.expect(inputs, start)

    def run(self, inputs: Inputs, plan: CapturePlan, start: int = 0) -> Forward:
        """Run the network once, with the chosen kernels."""
        with self.kernels.on():
            return self.subject.run(inputs, plan, start)

    def run_again(
        self, inputs: Inputs, forward: Forward, changes: Mapping[Place, Change]
    ) -> Tensor:
        """Run the samples of a forward pass again with changed tensors, and return f."""
        with self.kernels.on():
            plan, injection = forward.recording.plan, Injection(changes)
            return self.subject.run(inputs, plan, forward.start, injection).f

    def measure(self, inputs: Inputs, forward: Forward, layouts: Layouts) -> ChunkColumns:
        """Estimate the samples of one forward pass."""
        setup, signs = self.set_up(forward, layouts)
        chunk, estimate = self.means(setup, signs)
        columns = {k: v for k, v in chunk.columns.items() if over_directions(k) != "spectrum"}
        if self.needs & BY_LANCZOS:
            replay = partial(self.run_again, inputs, forward)
            options = self.request.sketch
            spectra = SpectrumFinder(setup, signs, options, self.needs, replay, self.way)
            self.way = spectra.products.way
            estimate = replace(
                estimate, spread=spectra.spread.sum(), converged=spectra.converged,
                input_error=spectra.input_error, layer_error=spectra.layer_error,
            )  # fmt: skip
            columns |= spectra.columns
        self._latest = estimate
        return replace(chunk, columns=columns)

    def set_up(self, forward: Forward, layouts: Layouts) -> tuple[Setup, Signs]:
        """Plan a chunk for one direction at a time, and open the stream of each sample."""
        f = forward.f
        setup = set_up(
            forward, layouts, self.subject.named, self.buffers,
            target=f.new_empty(len(f), 1, f.shape[1]), plain=self.request.root is None,
            use_head=False, needs=self.needs,
        )  # fmt: skip
        root = self.request.root
        products = None if root is None else root.products(f.detach(), forward.samples)
        signs = Signs(f, self.streams.of(forward.samples), products)
        return setup, signs

    # -- means over directions -------------------------------------------------------------------

    def means(self, setup: Setup, signs: Signs) -> tuple[ChunkColumns, _ChunkEstimate]:
        """Average over directions, and store the sums over samples for each direction."""
        replicates, sums, needs = Replicates(), _Sums(), self.needs
        rtol = self.request.sketch.rtol
        at_a_time = self.request.sketch.directions
        while True:
            for _ in range(at_a_time):
                direction = signs.to_outputs(signs.next()).unsqueeze(1)
                chunk = _one_direction(setup, direction, needs)
                needs -= {PATCH_RANKS}  # they do not depend on directions
                sums.add(chunk)
                replicates.add(chunk.columns)
                if not needs & OVER_DIRECTIONS:
                    signs.skip(at_a_time - 1)  # Lanczos then starts from the same numbers
                    break
            if rtol is None:
                return sums.mean(), _ChunkEstimate(replicates)
            total = replicates.sharpness()
            mean, variance = torch.stack([total.mean(), total.var()]).tolist()
            moments = (mean, variance / len(total))
            wanted = self._directions_needed(mean, variance, plain_rtol(rtol, len(total)))
            if wanted >= self.products and not self.chunks:
                raise ExactIsCheaperError(round(wanted))
            if wanted <= sums.count or sums.count + at_a_time > self.limit:
                return sums.mean(), _ChunkEstimate(replicates, moments)

    @property
    def limit(self) -> int:
        """The largest number of directions per chunk."""
        return min(MAX_DIRECTIONS, self.products)

    def _directions_needed(self, mean: float, variance: float, rtol: float) -> float:
        """Estimate the directions of this chunk that reach ``rtol`` for all samples so far.

        Args:
            mean: mean of the chunk's sharpness over directions, summed over samples.
            variance: its variance over directions.
            rtol: the relative standard error that is asked for.
        """
        before = [chunk.moments for chunk in self.chunks if chunk.moments is not None]
        mean = sum(mean for mean, _ in before) + mean
        known = sum(squared_error for _, squared_error in before)
        target = (rtol * mean) ** 2 - known
        if variance == 0:
            return 0.0
        return max(float(FEWEST), variance / target) if target > 0 else np.inf

    def commit(self, numbers: list[int]) -> None:
        """Add the chunk that was measured last; ``numbers`` holds the slot of each of its calls."""
        assert self._latest is not None
        self._latest.replicates.count_layers_by_slot(numbers)
        self.chunks.append(self._latest)
        self._latest = None

    # -- standard errors -------------------------------------------------------------------------

    def with_errors(self, probe: Probe) -> Probe:
        """Return the probe with the standard errors of its estimates."""
        notes, options = [], self.request.sketch
        replicates = self.replicates
        spread, converged = self._spectra()
        errors = network_errors(probe, replicates, spread, self.needs)
        if self.way.note:
            notes.append(self.way.note)
            errors |= self._product_errors().of_quantities(probe, self.request.needs)
        S = float(sharpness.samples(probe).mean())
        if options.rtol is not None and errors["sharpness"] > options.rtol * S:
            most = counted(self.limit, "direction")
            notes.append(f"rtol={options.rtol} was not met within {most}")
        if not converged:
            notes.append(
                f"Lanczos did not meet tolerance={options.tolerance} in "
                f"{sketched_spectra.MAX_STEPS} steps: largest singular values are lower bounds"
            )
        directions = options.directions
        if self.needs & OVER_DIRECTIONS:
            directions = min(r.count for r in replicates)
        layers = layer_errors(probe, replicates)
        result = Sketch(directions, options.seed, errors, layers, converged)
        return replace(probe, sketch=result).with_notes(*notes)

    def _spectra(self) -> tuple[float, bool]:
        """Return the summed spread of all chunks, and whether all singular values converged."""
        spread = sum(chunk.spread for chunk in self.chunks if chunk.spread is not None)
        flags = [chunk.converged for chunk in self.chunks if chunk.converged is not None]
        return float(spread), not flags or bool(torch.stack(flags).all())

    def _product_errors(self) -> ProductErrors:
        """Return the errors of the largest singular values that errors of products cause."""
        at_input = sum(c.input_error for c in self.chunks if c.input_error is not None)
        at_layers = sum(c.layer_error for c in self.chunks if c.layer_error is not None)
        return ProductErrors(float(at_input), float(at_layers))


def _needs_of_a_sketch(request: Request) -> frozenset[str]:
    """Return the needs that a sketch computes for a request.

    ``rtol`` needs the sharpness. Layers need the input's values, because random numbers are drawn
    for the input first, and the first layer is often at the input.
    """
    needs = request.needs
    if request.sketch.rtol is not None:
        needs |= {GRADIENTS}
    return needs | {INPUT_TOP} if LAYER_TOPS in needs else needs


def _one_direction(setup: Setup, direction: Tensor, needs: frozenset[str]) -> ChunkColumns:
    """Return the columns of a network whose one output is a random direction, [b, 1, N]."""
    for positions in setup.positions:
        positions.begin(1)

    def take(call: int, v: int, grad: Tensor | None) -> None:
        setup.positions[call].take(v, grad)

    rows_by_edge = collect(setup, direction, range(1), True, take)
    chunk = all_columns(setup, rows_by_edge, needs)
    if LAYER_SPECTRA in needs:
        for i in range(len(setup.positions)):  # the singular value of one row is its norm
            norm = chunk.columns["layer", i, "singular"][:, 0]
            chunk.columns["layer", i, "energy"] = norm.square()
    return chunk


class _Sums:
    """Columns combined over directions, as ``probes`` declares them."""

    def __init__(self) -> None:
        self.count = 0
        self.chunk: ChunkColumns | None = None

    def add(self, chunk: ChunkColumns) -> None:
        """Add the columns of one direction."""
        self.count += 1
        if self.chunk is None:
            self.chunk = chunk
            return
        columns = self.chunk.columns
        for key, column in chunk.columns.items():
            how = over_directions(key)
            if how == "mean":
                columns[key] = columns[key] + column
            elif how == "largest":
                columns[key] = torch.maximum(columns[key], column)
        for name, total in chunk.sums.items():
            self.chunk.sums[name] = self.chunk.sums[name] + total

    def mean(self) -> ChunkColumns:
        """Return the columns, averaged over directions where ``probes`` declares a mean."""
        assert self.chunk is not None
        columns: dict[Key, Tensor] = {
            key: column / self.count if over_directions(key) == "mean" else column
            for key, column in self.chunk.columns.items()
        }
        sums = {name: total / self.count for name, total in self.chunk.sums.items()}
        return replace(self.chunk, columns=columns, sums=sums)
