"""The table of per-sample numbers, which grows chunk by chunk and becomes the arrays of a Probe.

A column has a key: (owner, ..., name), such as ("layer", 2, "singular") or ("parameter",
"fc.weight", "grad"). How a column is treated is declared in ``probes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from flatlens.capture.chain import UnreadChain
from flatlens.capture.inputs import check_finite
from flatlens.errors import FlatlensError, counted
from flatlens.passes.forward import Subject
from flatlens.passes.needs import AskedNorms
from flatlens.passes.segments import COLUMNS, Key, Segment, Shapes, aligned
from flatlens.passes.slots import LayerFacts, Slot, Slots
from flatlens.probes import PATHS, Array

# The gradient columns leave out frozen weights, but their layers have these columns.
ALWAYS_FINITE = ("grad_weight", "grad_bias", "untied", "x_norm")
T = TypeVar("T")


def over_directions(key: Key) -> str:
    """Return how a column is combined over random directions: mean, largest, spectrum or same."""
    declaration = COLUMNS.get(str(key[0]), {}).get(str(key[-1]))
    return "same" if declaration is None else declaration.directions


@dataclass(frozen=True)
class ChunkColumns:
    """All numbers of one chunk, in tensors that stay on their device until the end.

    Attributes:
        layers: the calls.
        paths: the path of each parameter.
        columns: values per sample, [b] or [b, r].
        sums: values summed over samples.
        first_weight: the weight of the layer that reads the input.
        unmeasured: parameters with a linear map that is not measured as a layer.
        chain: the layers, by index of the call, and Lipschitz maps from the input to the output.
    """

    layers: list[LayerFacts]
    paths: dict[str, str]
    columns: dict[Key, Tensor]
    sums: dict[str, Tensor] = field(default_factory=dict)
    first_weight: Tensor | None = None
    unmeasured: tuple[str, ...] = ()
    chain: UnreadChain | None = None


class ColumnTable:
    """The numbers of all samples so far.

    Args:
        subject: the network.
        weight_norms: which norms of weights are asked for.

    Samples that take different layers have different columns. Each set of columns has a
    :class:`Segment`; at the end they are aligned by slot.

    Attributes:
        n: samples so far.
        slots: the layers that samples used.
        paths: the path of each parameter.
        first_layer: the layer that reads the input.
        unmeasured: parameters with a linear map that is not measured as a layer, as keys.
    """

    def __init__(self, subject: Subject, weight_norms: AskedNorms = "all") -> None:
        self.subject = subject
        self.n = 0
        self.slots = Slots(subject, weight_norms)
        self.paths: dict[str, str] = {}
        self.first_layer = FirstLayer()
        self.unmeasured: dict[str, None] = {}
        self._segments: dict[Shapes, Segment] = {}
        self._left = 0  # samples of the batch that are not measured yet

    def begin_batch(self, samples: int) -> None:
        """Expect this many samples in the next chunks."""
        self._left = samples

    def add(self, chunk: ChunkColumns) -> list[int]:
        """Add a chunk's numbers and return the slot of each of its calls."""
        outputs = chunk.columns["output",]
        samples = len(outputs)
        numbers = self.slots.assign(chunk.layers, self.n, samples)
        columns = by_slot(chunk.columns, numbers)
        reading = [k for k, q in zip(numbers, chunk.layers, strict=True) if q.reads_input]
        if reading:
            number = outputs.new_full((samples,), reading[0], dtype=torch.float64)
            columns["first", "slot"] = number
        slot = self.slots.all[reading[0]] if reading else None
        self.first_layer.add(self.n, slot, chunk.first_weight, chunk.sums)
        for name, path in chunk.paths.items():
            self.paths[name] = max(path, self.paths.get(name, path), key=PATHS.index)
        shapes = tuple((key, column.shape[1:]) for key, column in columns.items())
        segment = self._segments.get(shapes)
        if segment is None:
            room = 0 if self._segments else self._left
            segment = self._segments[shapes] = Segment(shapes, room)
        elif len(self._segments) == 1:
            segment.room = self._left
        segment.add(self.n, list(columns.values()))
        self.unmeasured |= dict.fromkeys(chunk.unmeasured)
        self.n += samples
        self._left -= samples
        return numbers

    def check(self, columns: Mapping[Key, Tensor]) -> None:
        """Raise if the next chunk has gradients that are not finite, or another output size."""
        grads = [v for key, v in columns.items() if key[0] == "parameter" and key[-1] == "grad"]
        if grads:
            check_finite(torch.stack(grads, 1), self.n, "gradient")
        measured = [columns[key] for key in columns if key[-1] in ALWAYS_FINITE]
        if measured:
            check_finite(torch.stack(measured, 1), self.n, "layer input or its derivative")
        N = columns["output",].shape[1]
        for shapes in self._segments:
            if dict(shapes)["output",] != (N,):
                raise FlatlensError(
                    f"sample {self.n} has {counted(N, 'output')} and earlier samples have another "
                    "number; measure samples with the same number of outputs together"
                )
            break

    def arrays(self) -> dict[Key, dict[str, Array]]:
        """Return the columns of all samples: {owner: {name: array over samples}}."""
        segments = [(s.samples(), s.arrays()) for s in self._segments.values()]
        return segments[0][1] if len(segments) == 1 else aligned(segments, self.n)


def by_slot(columns: Mapping[Key, T], numbers: list[int]) -> dict[Key, T]:
    """Return the columns with layers indexed by slot instead of by call."""
    return {
        ("layer", numbers[int(key[1])], *key[2:]) if key[0] == "layer" else key: column
        for key, column in columns.items()
    }


class FirstLayer:
    """The weight and the sums of the layer that reads the network's input.

    Attributes:
        weight: its weight; None if it is not the same for all samples.
        sums: sums over samples, if all samples have the same weight.
    """

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.sums: dict[str, Tensor] = {}
        self._slot: Slot | None = None
        self._same = True

    def add(
        self, n: int, slot: Slot | None, weight: Tensor | None, sums: Mapping[str, Tensor]
    ) -> None:
        """Add a chunk that begins with sample ``n``."""
        if n == 0:
            self._slot, self.weight = slot, weight
            self.sums = {name: total.double() for name, total in sums.items()}
            return
        if self._same and not (self._is_same(slot, weight) and sums.keys() == self.sums.keys()):
            self._same, self.weight, self.sums = False, None, {}
        for name in self.sums:
            self.sums[name] += sums[name]

    def _is_same(self, slot: Slot | None, weight: Tensor | None) -> bool:
        if slot is not self._slot:
            return False
        if slot is None or slot.owned or weight is None or self.weight is None:
            return True
        return torch.equal(weight.double(), self.weight.double())
