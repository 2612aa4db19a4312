"""The layer that reads the network's input, for each sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from flatlens.per_sample import used_by
from flatlens.probes import Array, LayerProbe, Probe


@dataclass(frozen=True)
class FirstLayers:
    """The measured layer that reads the network's input, for each sample.

    Samples that take different branches may have different first layers.
    """

    layers: tuple[LayerProbe, ...]  # the first layers of all samples, each once
    index: Int[Array, " n"]  # each sample's index in ``layers``, or -1

    def gather(self, column: Callable[[LayerProbe], Array]) -> Float[Array, " n"]:
        """Return each sample's value in a column of its first layer; 0 if it has none."""
        if len(self.layers) == 1 and (self.index == 0).all():
            return column(self.layers[0])
        values = np.zeros(len(self.index))
        for k, layer in enumerate(self.layers):
            mine = self.index == k
            values[mine] = column(layer)[mine]
        return values

    def mean_by_width(self, values: Float[Array, " n"]) -> float:
        """Return mean_i values_i / d_i with the width d_i of sample i's first layer, or 1."""
        widths = np.array([*(layer.out_features for layer in self.layers), 1])
        if len(set(widths[self.index])) == 1:  # divide once, to round only once
            return float(values.mean()) / int(widths[self.index][0])
        return float((values / widths[self.index]).mean())

    @property
    def without(self) -> int:
        """The number of samples that have no first layer."""
        return int((self.index < 0).sum())


def find_first_layers(p: Probe) -> FirstLayers | None:
    """Find the first layer of each sample, or return None if no layer reads the input."""
    if p.first is not None and p.first.slot is not None:
        numbers = [k for k in dict.fromkeys(p.first.slot.tolist()) if k >= 0]
        index = np.full(p.n, -1)
        for place, number in enumerate(numbers):
            index[p.first.slot == number] = place
        return FirstLayers(tuple(p.layers[k] for k in numbers), index)
    layers: list[LayerProbe] = []
    index = np.full(p.n, -1)
    for layer in p.layers:
        mine = used_by(layer) & (index < 0) if layer.reads_input else np.zeros(p.n, bool)
        if mine.any():
            index[mine] = len(layers)
            layers.append(layer)
    return FirstLayers(tuple(layers), index) if layers else None
