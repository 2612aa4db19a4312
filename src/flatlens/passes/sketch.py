"""Estimate a chunk from a few random output directions, for networks with many outputs.

- Sums of squares (sharpness, its split, untied and adaptive) are means over random output
  directions v of +-1: E ||grad (v . f)||^2 = ||grad f||_F^2. They need first derivatives only and
  go through the same rules as the exact pass; the spread over directions is the standard error.
- Spectra come from Lanczos (``sketched_spectra``), which needs a second derivative. Attention then
  runs its plain kernel, which has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatlens.algebra.buffers import Buffers
from flatlens.algebra.student import plain_rtol
from flatlens.algebra.traces import FEWEST
from flatlens.capture.inputs import Inputs
from flatlens.capture.recording import CapturePlan
from flatlens.metrics import sharpness
from flatlens.passes import sketched_spectra
from flatlens.passes.columns import ChunkColumns, over_directions
from flatlens.passes.derivative_rows import Setup, collect, set_up
from flatlens.passes.directions import SampleStreams, Signs
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.independence import Layouts
from flatlens.passes.layer_columns import Asked, all_columns
from flatlens.passes.request import Request
from flatlens.passes.segments import Key
from flatlens.passes.sketched_spectra import SpectrumFinder
from flatlens.passes.standard_errors import Replicates, layer_errors, network_errors
from flatlens.probes import Probe, Sketch

MAX_DIRECTIONS = 4096


class ExactIsCheaperError(Exception):
    """The first chunk shows that rtol takes ``directions``, no fewer than all products."""

    def __init__(self, directions: int) -> None:
        super().__init__(directions)
        self.directions = directions


@contextlib.contextmanager
def plain_kernels(on: bool = True) -> Iterator[None]:
    """Run attention by its plain kernel: the other kernels have no second derivative."""
    if not on:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


class SketchStrategy:
    """The strategy that estimates.

    Args:
        subject: the network.
        request: what is asked for.
        buffers: memory for the rows.
        products: products that an exact pass would take.
    """

    def __init__(self, subject: Subject, request: Request, buffers: Buffers, products: int) -> None:
        self.subject, self.request, self.buffers = subject, request, buffers
        self.products = products
        self.streams = SampleStreams(request.sketch.seed)
        self.replicates: list[Replicates] = []  # one per chunk
        self.spread = 0.0  # summed squared standard errors of the samples' participation ratios
        self.converged = True

    def run(self, inputs: Inputs, plan: CapturePlan, start: int = 0) -> Forward:
        """Run the network once, with kernels that have a second derivative."""
        with plain_kernels():
            return self.subject.run(inputs, plan, start)

    def measure(self, inputs: Inputs, forward: Forward, layouts: Layouts) -> ChunkColumns:
        """Estimate the samples of one forward pass."""
        setup, signs = self.set_up(inputs, forward, layouts)
        chunk = self.means(setup, signs)
        spectra = SpectrumFinder(setup, signs, self.request.sketch)
        self.spread += float(spectra.spread.sum())
        self.converged = self.converged and spectra.converged
        columns = {k: v for k, v in chunk.columns.items() if over_directions(k) != "spectrum"}
        return replace(chunk, columns=columns | spectra.columns)

    def set_up(self, inputs: Inputs, forward: Forward, layouts: Layouts) -> tuple[Setup, Signs]:
        """Plan a chunk for one direction at a time, and draw from every sample's own stream."""
        f = forward.f
        setup = set_up(
            forward, layouts, self.subject.named, self.buffers,
            target=f.new_empty(len(f), 1, f.shape[1]), plain=self.request.root is None,
            use_head=False, spectra=True,
        )  # fmt: skip
        root = self.request.root
        products = None if root is None else root.products(f.detach(), forward.samples)
        signs = Signs(f, self.streams.of(inputs), products)
        return setup, signs

    # -- means over directions -------------------------------------------------------------------

    def means(self, setup: Setup, signs: Signs) -> ChunkColumns:
        """Average over directions; sums over samples are remembered by direction."""
        replicates, sums = Replicates(), _Sums()
        at_a_time = self.request.sketch.directions
        while True:
            for _ in range(at_a_time):
                chunk = _one_direction(setup, signs.to_outputs(signs.next()).unsqueeze(1))
                sums.add(chunk)
                replicates.add(chunk.columns)
            wanted = self._directions_needed(replicates)
            if wanted >= self.products and not self.replicates:
                raise ExactIsCheaperError(round(wanted))
            if wanted <= sums.count or sums.count + at_a_time > self.limit:
                break
        self.replicates.append(replicates)
        return sums.mean()

    @property
    def limit(self) -> int:
        """Most directions per chunk."""
        return min(MAX_DIRECTIONS, self.products)

    def _directions_needed(self, replicates: Replicates) -> float:
        """About how many directions of this chunk make all samples so far known to rtol."""
        rtol = self.request.sketch.rtol
        if rtol is None:
            return 0.0
        total = replicates.sharpness()
        variance = float(total.var())
        before = [r.sharpness() for r in self.replicates]
        mean = sum(float(t.mean()) for t in before) + float(total.mean())
        known = sum(float(t.var()) / len(t) for t in before)
        target = (plain_rtol(rtol, len(total)) * mean) ** 2 - known
        if variance == 0:
            return 0.0
        return max(float(FEWEST), variance / target) if target > 0 else np.inf

    def take_slots(self, numbers: list[int]) -> None:
        """Learn the slot of each call of the chunk that was measured last."""
        self.replicates[-1].count_layers_by_slot(numbers)

    # -- standard errors -------------------------------------------------------------------------

    def with_errors(self, probe: Probe) -> Probe:
        """Add the standard errors of what was estimated."""
        notes, options = [], self.request.sketch
        errors = network_errors(probe, self.replicates, self.spread)
        if options.rtol is not None and errors["sharpness"] > options.rtol * sharpness(probe):
            notes.append(f"rtol={options.rtol} was not met within {self.limit} directions")
        if not self.converged:
            notes.append(
                f"Lanczos did not meet tolerance={options.tolerance} in "
                f"{sketched_spectra.MAX_STEPS} steps: largest singular values are lower ends"
            )
        directions = min(r.count for r in self.replicates)
        layers = layer_errors(probe, self.replicates)
        result = Sketch(directions, options.seed, errors, layers, self.converged)
        return replace(probe, sketch=result).with_notes(*notes)


def _one_direction(setup: Setup, direction: Tensor) -> ChunkColumns:
    """The columns of one random direction, [b, 1, N]: those of a network with that one output."""
    for positions in setup.positions:
        positions.begin(1)

    def take(call: int, v: int, grad: Tensor | None) -> None:
        setup.positions[call].take(v, grad)

    rows_by_edge = collect(setup, direction, range(1), True, take)
    chunk = all_columns(setup, rows_by_edge, Asked())
    for i in range(len(setup.positions)):  # of one row, the singular value is the norm
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
        """The columns, with means over directions where they are means."""
        assert self.chunk is not None
        columns: dict[Key, Tensor] = {
            key: column / self.count if over_directions(key) == "mean" else column
            for key, column in self.chunk.columns.items()
        }
        sums = {name: total / self.count for name, total in self.chunk.sums.items()}
        return replace(self.chunk, columns=columns, sums=sums)
