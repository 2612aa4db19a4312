"""Slots identify the layer of a call, so that samples that take different layers can be joined.

A *slot* is the k-th use of one weight by one sample. A weight that is a parameter or a buffer is
recognised by its name. A computed weight (a hypernetwork, a dynamic convolution) is recognised by
the parameters behind it (``docs/theory.md`` section 11). Examples:

- two samples that take two experts have two slots;
- a block that one sample passes twice has two slots;
- a kernel that is computed from the sample has one slot, with a norm for each sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flatlens.algebra.operator_norms import WeightNorms, weight_norms
from flatlens.capture.layer import Layer, with_wide_weight
from flatlens.passes.forward import Subject
from flatlens.passes.names import layer_name
from flatlens.passes.needs import AskedNorms
from flatlens.probes import NORM_COLUMNS, Array

NOT_ASKED = WeightNorms(*[float("nan")] * 3)


@dataclass(frozen=True)
class LayerFacts:
    """The facts about one call in one chunk.

    ``parameter`` is the tensor that the layer's weight is a view of, or the weight itself.
    """

    layer: Layer
    parameter: Tensor
    positions: int
    M: int
    reads_input: bool
    is_output: bool
    bias_counts: bool


@dataclass(frozen=True)
class Span:
    """Consecutive samples that use a slot in the same way.

    Attributes:
        start: the number of the first sample.
        samples: number of samples.
        entries: entries of the slot's input per sample.
        norms: norms of the weight that they use; None if it is the weight of the slot's ``layer``.
    """

    start: int
    samples: int
    entries: int
    norms: WeightNorms | None


class Slot:
    """One layer, with the facts of all samples that use it.

    Attributes:
        name: its name in ``Probe.layers``.
        owned: whether the weight is a parameter or a buffer, and not computed.
        weight_norms: which norms of its weight are asked for.
        layer: the layer as the first of its samples used it.
        parameter: the tensor that its weight is a view of, or the weight itself.
        positions: the largest number of positions of any sample.
        reads_input, is_output, bias_counts: whether this holds for every sample that uses it.
        reads: smallest and largest number of times that an entry of the input is read.
        spans: the samples that use it.
    """

    def __init__(self, name: str, owned: bool, facts: LayerFacts, weight_norms: AskedNorms) -> None:
        self.name, self.owned, self.weight_norms = name, owned, weight_norms
        layer = facts.layer
        self.parameter = facts.parameter
        # The graph behind a computed weight is not needed any more.
        detached = {"weight": layer.weight.detach()}
        is_parameter = owned and layer.weight is facts.parameter
        self.layer: Layer = layer if is_parameter else replace(layer, **detached)  # type: ignore
        self.positions = 0
        self.reads_input = self.is_output = self.bias_counts = True
        self.reads = layer.reads()
        self.spans: list[Span] = []
        self._own_norms: WeightNorms | None = None

    def add(self, facts: LayerFacts, start: int, samples: int) -> None:
        """Record that some samples use this slot."""
        layer = facts.layer
        self.positions = max(self.positions, facts.positions)
        self.reads_input = self.reads_input and facts.reads_input
        self.is_output = self.is_output and facts.is_output
        self.bias_counts = self.bias_counts and facts.bias_counts
        # The norm of a convolution depends on the size of its image.
        resized = not layer.is_linear and layer.in_shape[1:] != self.layer.in_shape[1:]
        if resized:
            fewest, most = layer.reads()
            self.reads = (min(self.reads[0], fewest), max(self.reads[1], most))
        same_weight = not resized and (
            self.owned
            or layer.weight is self.layer.weight
            or torch.equal(layer.weight.detach(), self.layer.weight)
        )
        norms = None if same_weight else self._norms_of(layer)
        self.spans.append(Span(start, samples, facts.M, norms))

    @property
    def entries(self) -> int:
        """The largest number of entries of the slot's input."""
        return max(span.entries for span in self.spans)

    def norms(self) -> WeightNorms:
        """The norms of its weight; the largest of each if samples use different weights."""
        norms_by_span = self._each_norm()
        return WeightNorms.largest(norms_by_span)

    def sample_columns(self, n: int, weight_norm: str) -> dict[str, Array]:
        """Return the columns that can differ between samples: norms of the weight, and entries."""
        columns: dict[str, Array] = {}
        norms_by_span = self._each_norm()
        reference = norms_by_span[0]
        if any(norms is not reference and norms != reference for norms in norms_by_span):
            sources = {f"{name}_i": name for name in NORM_COLUMNS}
            for name, source in {**sources, "norm_i": weight_norm}.items():
                columns[name] = self._filled(n, [getattr(norms, source) for norms in norms_by_span])
        entries = [span.entries for span in self.spans]
        if len(set(entries)) > 1:
            columns["entries"] = self._filled(n, entries).astype(np.int64)
        return columns

    def _each_norm(self) -> list[WeightNorms]:
        if self._own_norms is None:  # looking them up also reads the weight
            self._own_norms = self._norms_of(self.layer)
        return [span.norms or self._own_norms for span in self.spans]

    def _norms_of(self, layer: Layer) -> WeightNorms:
        if self.weight_norms == "none":
            return NOT_ASKED
        return weight_norms(with_wide_weight(layer), operator=self.weight_norms == "all")

    def _filled(self, n: int, values: list[float] | list[int]) -> Array:
        """Expand one value per span to one per sample; 0 for samples without the slot."""
        column = np.zeros(n)
        for span, value in zip(self.spans, values, strict=True):
            column[span.start : span.start + span.samples] = value
        return column


class Slots:
    """All slots so far, in the order in which samples first used them."""

    def __init__(self, subject: Subject, weight_norms: AskedNorms = "all") -> None:
        self.subject, self.weight_norms = subject, weight_norms
        self.all: list[Slot] = []
        owned = [*subject.named, *subject.model.named_buffers()]
        self._owned = {id(t): name for name, t in owned}
        self._numbers: dict[Hashable, int] = {}
        self._names: Counter[str] = Counter()

    def assign(self, layers: list[LayerFacts], start: int, samples: int) -> list[int]:
        """Return the number of the slot of each call of one chunk; new slots are added.

        Args:
            layers: the calls, in order.
            start: the number of the chunk's first sample.
            samples: samples of the chunk.
        """
        uses: Counter[Hashable] = Counter()
        numbers = []
        for facts in layers:
            source = self._source(facts)
            uses[source] += 1
            key = (source, uses[source])
            if key not in self._numbers:
                self._numbers[key] = len(self.all)
                self.all.append(self._new(facts))
            number = self._numbers[key]
            self.all[number].add(facts, start, samples)
            numbers.append(number)
        return numbers

    def _source(self, facts: LayerFacts) -> Hashable:
        """Return the key that all calls of one layer share, whichever sample makes them."""
        layer = facts.layer
        weight = self._owned.get(id(facts.parameter))
        if weight is None:
            weight = f"computed {layer_name(layer, self.subject)}"
        bias = None if layer.bias is None else self._owned.get(id(layer.bias), "computed")
        return (layer.way, tuple(layer.weight.shape), layer.weight.stride(), weight, bias)

    def _new(self, facts: LayerFacts) -> Slot:
        name = layer_name(facts.layer, self.subject)
        self._names[name] += 1
        number = self._names[name]
        owned = id(facts.parameter) in self._owned
        return Slot(name if number == 1 else f"{name}#{number}", owned, facts, self.weight_norms)
