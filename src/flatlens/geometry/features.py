"""Collect the inputs of every measured layer in forward passes alone.

The strategy computes no derivative. If the features of all layers do not fit the memory, some
layers take further forward passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.algebra.buffers import Buffers
from flatlens.capture.inputs import Inputs
from flatlens.capture.layout import split
from flatlens.capture.recording import CapturePlan
from flatlens.passes.choice import Choice
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.independence import Layouts
from flatlens.passes.names import layer_name
from flatlens.passes.plan import reaching_calls
from flatlens.passes.request import Request
from flatlens.passes.run import MakeStrategy

Key = tuple[str | int, ...]  # of a column


def numbered(names: Iterable[str]) -> list[str]:
    """Number the repetitions of a name.

    >>> numbered(["fc", "fc", "head"])
    ['fc', 'fc#2', 'head']
    """
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


@dataclass(frozen=True)
class Place:
    """One place of the network: its input, the input of a layer, or its output.

    Attributes:
        name: "input", the name of the layer, or "output".
        weight: the weight of a dense layer with one output per row, else None.
    """

    name: str
    weight: Tensor | None = None


class Shelf:
    """The features of some places for all samples so far.

    Args:
        memory: bytes that all features may take; one place may always exceed it.
        samples: number of all samples.
        wanted: names of the places, or None for all.
        done: places of earlier rounds.

    Attributes:
        places: all places, in order; empty before the first chunk.
        features: the features of each place, a list of chunks [b, D].
        waiting: places for later rounds.
    """

    def __init__(
        self, memory: int, samples: int, wanted: Sequence[str] | None, done: frozenset[str]
    ) -> None:
        self.memory, self.samples, self.wanted, self.done = memory, samples, wanted, done
        self.places: list[Place] = []
        self.features: dict[str, list[Tensor]] = {}
        self.waiting: list[str] = []

    def add(self, places: list[Place], features: list[Tensor]) -> None:
        """Add the features of one chunk."""
        if not self.places:
            self._choose(places, features)
        for place, values in zip(places, features, strict=True):
            if place.name in self.features:
                self.features[place.name].append(values.detach().flatten(1).clone())

    def _choose(self, places: list[Place], features: list[Tensor]) -> None:
        self.places, used = places, 0
        for place, values in zip(places, features, strict=True):
            if place.name in self.done or not (self.wanted is None or place.name in self.wanted):
                continue
            needed = values.nbytes // len(values) * self.samples
            if self.features and used + needed > self.memory:
                self.waiting.append(place.name)
            else:
                self.features[place.name] = []
                used += needed


class FeatureStrategy:
    """The strategy that stores features and computes no derivative.

    Args:
        subject: the network.
        shelf: stores the features.
    """

    def __init__(self, subject: Subject, shelf: Shelf) -> None:
        self.subject, self.shelf = subject, shelf

    def run(self, inputs: Inputs, plan: CapturePlan, start: int = 0) -> Forward:
        """Run the network once."""
        return self.subject.run(inputs, plan, start)

    def measure(self, inputs: Inputs, forward: Forward, layouts: Layouts) -> ChunkColumns:
        """Store the features of one chunk; the columns have the outputs, and zero gradients."""
        batch = len(forward.f)
        calls, alive = reaching_calls(forward, layouts)
        names = numbered(layer_name(call.layer, self.subject) for call in calls)
        fed = [t.detach().flatten(1) for t in forward.fed]
        places, features = [Place("input")], [torch.cat(fed, 1) if len(fed) > 1 else fed[0]]
        for call, layout, name in zip(calls, alive, names, strict=True):
            x = split(call.x, layout, batch).flatten(1)
            dense = call.layer.is_linear and x.shape[1] == call.layer.matrix.shape[2]
            places.append(Place(name, call.layer.matrix[0] if dense else None))
            features.append(x)
        self.shelf.add([*places, Place("output")], [*features, forward.f])
        zeros = forward.f.new_zeros(batch, dtype=torch.float64)
        columns: dict[Key, Tensor] = {("output",): forward.f.detach()}
        columns |= {("parameter", name, "grad"): zeros for name, _ in self.subject.named}
        paths = {name: "unused" for name, _ in self.subject.named}
        return ChunkColumns([], paths, columns)


def strategy_for(shelf: Shelf) -> MakeStrategy:
    """Return what ``passes.run.look`` calls to make its strategy."""

    def make(
        subject: Subject, request: Request, buffers: Buffers, choice: Choice
    ) -> FeatureStrategy:
        return FeatureStrategy(subject, shelf)

    return make
