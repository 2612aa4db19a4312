"""The table of per-sample numbers that grows chunk by chunk, and how it becomes a Probe's arrays.

A column has a key: (owner, ..., name), such as ("layer", 2, "singular") or ("parameter",
"fc.weight", "grad"). How a column is treated is declared in ``probes``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatlens.capture.inputs import check_finite
from flatlens.capture.layer import Layer
from flatlens.errors import FlatlensError
from flatlens.passes.forward import Subject
from flatlens.passes.names import layer_name
from flatlens.probes import (
    REQUIRED,
    Array,
    FirstLayerProbe,
    InputProbe,
    LayerProbe,
    ParameterProbe,
    declared,
)

Key = tuple[str | int, ...]
OWNERS = {
    "input": InputProbe,
    "layer": LayerProbe,
    "first": FirstLayerProbe,
    "parameter": ParameterProbe,
}
# A frozen weight has no part in the parameters' gradients, but its layer has these columns.
ALWAYS_FINITE = ("grad_weight", "grad_bias", "untied", "x_norm")
COLUMNS = {owner: declared(kind) for owner, kind in OWNERS.items()}


def over_directions(key: Key) -> str:
    """How a column is combined over random directions: mean, largest, spectrum or same."""
    declaration = COLUMNS.get(str(key[0]), {}).get(str(key[-1]))
    return "same" if declaration is None else declaration.directions


@dataclass(frozen=True)
class LayerFacts:
    """What one call is, as one chunk saw it."""

    layer: Layer
    positions: int
    M: int
    reads_input: bool
    is_output: bool
    bias_counts: bool

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be the same for all samples."""
        return (self.layer.way, self.layer.weight.shape, self.positions, self.M)


@dataclass(frozen=True)
class ChunkColumns:
    """All numbers of one chunk. Tensors stay on their device until the end.

    Attributes:
        layers: the calls.
        paths: the path of each parameter.
        columns: per sample, [b] or [b, r].
        sums: over samples.
        first_weight: the weight of the layer that reads the input.
        unmeasured: parameters with a linear map that is not measured as a layer.
    """

    layers: list[LayerFacts]
    paths: dict[str, str]
    columns: dict[Key, Tensor]
    sums: dict[str, Tensor] = field(default_factory=dict)
    first_weight: Tensor | None = None
    unmeasured: tuple[str, ...] = ()


class ColumnTable:
    """The numbers of all samples so far.

    The numbers of one batch go into one table: hundreds of small tensors, allocated while the large
    ones of a chunk are there, would scatter over the heap and keep it from being reused.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.n = 0
        self.sums: dict[str, Tensor] = {}
        self.chunks: list[ChunkColumns] = []  # without their columns
        self._shapes: dict[Key, torch.Size] = {}
        self._tables: list[Tensor] = []
        self._batch, self._filled = 0, 0

    def begin_batch(self, samples: int) -> None:
        """Expect this many samples in the next chunks."""
        self._batch, self._filled = samples, 0

    def add(self, chunk: ChunkColumns) -> None:
        """Add a chunk's numbers; sums over samples are added up at once."""
        for name, total in chunk.sums.items():
            if name in self.sums:
                self.sums[name] += total
            else:
                self.sums[name] = total.double()
        self._check_same_network(chunk)
        names = [name for name, _ in self.subject.named]
        if names:
            grads = [chunk.columns["parameter", name, "grad"] for name in names]
            check_finite(torch.stack(grads, 1), self.n, "gradient")
        measured = [chunk.columns[key] for key in chunk.columns if key[-1] in ALWAYS_FINITE]
        if measured:
            check_finite(torch.stack(measured, 1), self.n, "layer input or its derivative")
        flat = [column.reshape(len(column), -1).double() for column in chunk.columns.values()]
        block = torch.cat(flat, 1)
        if self._filled == 0:
            self._tables.append(block.new_empty(self._batch, block.shape[1]))
        self._tables[-1][self._filled : self._filled + len(block)] = block
        self._filled += len(block)
        self.n += len(block)
        self.chunks.append(replace(chunk, columns={}, sums={}))

    def _check_same_network(self, chunk: ChunkColumns) -> None:
        """Refuse samples that take other layers, or other weights, than the first samples."""
        shapes = {key: column.shape[1:] for key, column in chunk.columns.items()}
        if not self.chunks:
            self._shapes = shapes
            return
        before = self.chunks[0].layers
        if shapes != self._shapes or [q.signature for q in chunk.layers] != [
            q.signature for q in before
        ]:
            raise FlatlensError(
                "the network calls other layers for other samples; measure samples that take the "
                "same path together"
            )
        for now, then in zip(chunk.layers, before, strict=True):
            self._check_same_weight(now.layer, then.layer)

    def _check_same_weight(self, now: Layer, then: Layer) -> None:
        """Refuse samples that use different weights: one norm would not bound all of them."""
        weight, other = now.weight, then.weight
        if weight is other or (
            weight.requires_grad == other.requires_grad
            and {id(weight), id(other)}.isdisjoint(self.subject.known)
            and torch.equal(weight, other)
        ):
            return
        raise FlatlensError(
            f"some samples use the weight of {layer_name(now, self.subject)} where others use "
            f"{layer_name(then, self.subject)} or other values of it (routing, experts, or weights "
            "computed from the sample); measure samples that use the same weights together"
        )

    def arrays(self) -> dict[Key, dict[str, Array]]:
        """Return the columns of all samples: {owner: {name: array over samples}}."""
        tables, start = self._tables, 0
        table = (tables[0] if len(tables) == 1 else torch.cat(tables)).cpu().numpy()
        arrays: dict[Key, dict[str, Array]] = {}
        for key, shape in self._shapes.items():
            values = table[:, start : start + shape.numel()].reshape(self.n, *shape)
            start += shape.numel()
            *owner, name = key if len(key) > 1 else (*key, "")
            whole = str(name).startswith("rank")
            values = values.astype(np.int64) if whole else values
            arrays.setdefault(tuple(owner), {})[str(name)] = values
        return arrays


def complete(owner: str, arrays: dict[str, Array], n: int) -> dict[str, Any]:
    """Fill in the columns that a pass did not measure, as they are declared."""
    filled: dict[str, Any] = dict(arrays)
    for name, declaration in COLUMNS[owner].items():
        if name in filled or not declaration.samples:
            continue
        missing = declaration.missing
        if missing == REQUIRED:
            raise AssertionError(f"the pass did not measure the column {name} of {owner}")
        if isinstance(missing, str):
            filled[name] = filled[missing]
        else:
            filled[name] = None if missing is None else np.full(n, missing)
    return filled
