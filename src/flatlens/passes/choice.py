"""Choose how to measure: exactly or by a sketch, and how many samples at a time.

The choice is a value. It is made once, from one sample's forward pass, before anything is measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from flatlens import tuning
from flatlens.capture.recording import Recording
from flatlens.errors import FlatlensError
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.head import head_width
from flatlens.passes.kernels import PLAIN, Kernels, choose_kernels
from flatlens.passes.needs import AT_THE_INPUT
from flatlens.passes.request import Request


@dataclass(frozen=True)
class Choice:
    """The choice of a strategy, with its chunk and its stored rows.

    Attributes:
        method: the strategy.
        chunk: samples at a time.
        rows_at_once: rows of df/dz that are stored at a time, for all layers.
        products: products that an exact pass takes.
        why: a note for the user, or "" if there was nothing to choose.
        kernels: the kernels that attention runs in a sketch.
    """

    method: Literal["exact", "sketch", "gradient_norms"]
    chunk: int
    rows_at_once: int
    products: int
    why: str = ""
    kernels: Kernels = PLAIN


@dataclass(frozen=True)
class StoredRows:
    """Which derivative rows stay in memory until a chunk is done.

    Attributes:
        inputs: whether the rows at the network's input stay.
        layers: whether the rows at the inputs of layers stay.
        jacobians: whether df/dz of every layer stays; if not, a dense layer keeps only norms.
    """

    inputs: bool = True
    layers: bool = True
    jacobians: bool = True

    @property
    def nothing(self) -> bool:
        """Whether no rows stay, so that a few rows at a time are enough (sharpness alone)."""
        return not (self.inputs or self.layers or self.jacobians)


def choose(subject: Subject, request: Request, solo: Forward, n: int) -> Choice:
    """Choose the strategy and the chunk from the forward pass of one sample.

    Args:
        subject: the network.
        request: the request of the caller.
        solo: the forward pass of one sample.
        n: samples in the batch at hand.

    Raises:
        FlatlensError: if one sample alone does not fit ``request.memory``.
    """
    calls, outputs = solo.recording.calls, solo.f.shape[1]
    head = head_width(solo.graph, solo.f, calls[-1]) if calls else None
    products = head or outputs
    if outputs**2 > tuning.MOST_PAIRS_OF_OUTPUTS and request.method != "exact":
        products = outputs  # a head would store a number for each pair
    exactly, why = _exact_or_sketch(request, products, solo, n)
    if not exactly:
        room = _chunk(subject, request, solo.recording, tuning.SKETCH_ROWS, StoredRows(), n)
        scores = solo.recording.scores
        kernels = choose_kernels(scores, subject.dtype, min(room[0], n), request.memory)
        return Choice("sketch", *room, products, why, kernels)
    kept_rows = StoredRows(
        inputs=bool(request.needs & AT_THE_INPUT),
        layers=request.needs_layers,
        jacobians=not request.norms_are_enough,
    )
    room = _chunk(subject, request, solo.recording, products, kept_rows, n)
    return Choice("exact" if kept_rows.jacobians else "gradient_norms", *room, products, why)


def _exact_or_sketch(request: Request, products: int, solo: Forward, n: int) -> tuple[bool, str]:
    """Choose the method that takes fewer products; return the reason as a note."""
    if request.method == "exact":
        return True, ""
    directions, rtol = request.sketch.directions, request.sketch.rtol
    if request.method == "sketch":
        if products > directions:
            return False, ""
        goal = "" if rtol is None else f" (rtol={rtol})"
        return True, f"exact: {products} products are no more than {directions} directions{goal}"
    if products <= tuning.ALWAYS_EXACT and request.budget is None:
        return True, ""
    sketched = directions + tuning.LAYER_PRODUCTS * (len(solo.recording.calls) + 1)
    cost = products * (1 + products / tuning.SPECTRA_DOUBLE)
    exactly = products <= tuning.ALWAYS_EXACT or cost <= tuning.TIMES_DEARER * sketched
    why = f"{products} products a sample against about {sketched}"
    if request.budget is not None:
        seconds = _seconds_per_product(solo) * n
        exactly = products <= sketched or products * seconds <= request.budget
        why += f", {products * seconds:.3g} s against {sketched * seconds:.3g} s"
        why += f" with a budget of {request.budget:g} s"
    return exactly, f"{'exact' if exactly else 'sketched'}: {why}"


def _seconds_per_product(solo: Forward) -> float:
    """Time one product of one sample, times three: its algebra takes about twice as long."""
    start = time.perf_counter()
    for _ in range(3):
        torch.autograd.grad(solo.f.sum(), solo.edges, retain_graph=True, allow_unused=True)
    return time.perf_counter() - start


def _chunk(
    subject: Subject,
    request: Request,
    recording: Recording,
    stored: int,
    kept_rows: StoredRows,
    n: int,
) -> tuple[int, int]:
    """Choose the samples and the stored rows at a time from an estimate of memory."""
    alone = kept_rows.nothing
    if alone:
        stored = min(stored, tuning.PRODUCTS_AT_ONCE)
    size = bytes_per_sample(subject, recording, stored, kept_rows)
    memory, asked = request.memory, request.chunk
    enough = min(n, tuning.ENOUGH_SAMPLES)
    most = tuning.MOST_CHUNK_BYTES if memory is None else memory // enough
    while alone and stored > 1 and size > most:
        stored //= 2
        size = bytes_per_sample(subject, recording, stored, kept_rows)
    if memory is not None:
        if size > memory:
            raise FlatlensError(
                f"one sample needs about {size:,} bytes, more than memory={memory:,}; "
                "raise it, or measure fewer outputs with output="
            )
        return min(memory // size, asked or n), stored
    if asked is not None:
        return asked, stored
    fewest = tuning.SHARPNESS_FEWEST_SAMPLES if alone else tuning.FEWEST_SAMPLES
    room = tuning.SHARPNESS_CHUNK_BYTES if alone else tuning.CHUNK_BYTES
    largest = tuning.SHARPNESS_MOST_SAMPLES if alone else tuning.MOST_SAMPLES
    fewest = min(fewest, tuning.MOST_CHUNK_BYTES // size)
    return max(1, fewest, min(room // size, largest)), stored


def bytes_per_sample(
    subject: Subject, recording: Recording, stored: int, kept_rows: StoredRows
) -> int:
    """Estimate the memory that one sample needs in a chunk, with ``stored`` rows of each layer."""
    entries = 0
    for i, call in enumerate(recording.calls):
        layer, outputs = call.layer, prod(call.layer.out_shape)
        dense = layer.is_linear and call.x.numel() == layer.matrix.shape[2]
        at_input = stored if kept_rows.layers or (kept_rows.inputs and i == 0) else 0
        at_output = 0 if dense and not kept_rows.jacobians else stored
        entries += (3 + at_input) * call.x.numel() + (3 + at_output) * outputs
        entries += layer.unrolled_entries
    seen = {id(t) for c in recording.calls for t in (c.parameter, c.layer.bias)}
    seen |= {id(t.parameter) for t in recording.lookups}
    others = (p.numel() for _, p in subject.named if p.requires_grad and id(p) not in seen)
    entries += (3 + stored) * sum(others)
    looked_up = (t.indices.numel() * t.parameter.shape[1] for t in recording.lookups)
    entries += (3 + stored) * sum(looked_up)
    return max(1, entries) * max(32, torch.finfo(subject.dtype).bits) // 8 + stored * stored * 8
