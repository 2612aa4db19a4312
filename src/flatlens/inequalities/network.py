"""What the rows of the table are computed from: a probe, its sharpness and its first layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from flatlens.algebra.scaling import Minimum, minimise
from flatlens.inequalities.arithmetic import quotient
from flatlens.inequalities.tolerances import tolerance
from flatlens.metrics import sharpness
from flatlens.per_sample import upper_norm_per_sample, used_by, where_used
from flatlens.probes import Array, LayerProbe, Probe


@dataclass(frozen=True)
class FirstLayers:
    """The measured layer that reads the network's input, for each sample.

    Samples that take different branches may have different first layers.
    """

    layers: tuple[LayerProbe, ...]  # each is the first layer of at least one sample
    index: Int[Array, " n"]  # which of them, for each sample; -1 where a sample has none

    def gather(self, column: Callable[[LayerProbe], Array]) -> Float[Array, " n"]:
        """Take each sample's value from the column of its own first layer; 0 where it has none."""
        if len(self.layers) == 1 and (self.index == 0).all():
            return column(self.layers[0])
        values = np.zeros(len(self.index))
        for k, layer in enumerate(self.layers):
            mine = self.index == k
            values[mine] = column(layer)[mine]
        return values

    @property
    def without(self) -> int:
        """The number of samples that have no first layer."""
        return int((self.index < 0).sum())


def find_first_layers(p: Probe) -> FirstLayers | None:
    """Find the first layer of each sample, or return None if no layer reads the input."""
    index = np.full(p.n, -1)
    layers: list[LayerProbe] = []
    for layer in p.layers:
        mine = used_by(layer) & (index < 0) if layer.reads_input else np.zeros(p.n, bool)
        if mine.any():
            index[mine] = len(layers)
            layers.append(layer)
    return FirstLayers(tuple(layers), index) if layers else None


@dataclass(frozen=True)
class Network:
    """One network as the rows of the table see it."""

    p: Probe
    S: float  # sharpness, Eq. 3
    first: FirstLayers | None
    tolerance: float  # relative rounding that a comparison allows
    exact_untied: bool = False  # take ||D^-1 C||_2 itself instead of its cheap bound

    @classmethod
    def of(cls, p: Probe, exact_untied: bool = False) -> Network:
        """Collect what the rows need from a probe."""
        return cls(p, sharpness(p), find_first_layers(p), tolerance(p), exact_untied)

    def first_ratios(self, bias: bool = False) -> Float[Array, " n"]:
        """Return (||W_i1|| / x_i1)^2 of each sample's first layer."""
        assert self.first is not None
        return self.first.gather(lambda layer: ratios(layer, bias))

    @cached_property
    def scaled_minimum(self) -> Minimum:
        """The minimum of Eq. 36 for the first layer; both sides of Eq. 37 are taken there."""
        extra = self.p.first
        assert extra is not None
        assert extra.curvature is not None
        return minimise(extra.curvature, extra.weight[0])


def ratios(layer: LayerProbe, bias: bool = False) -> Float[Array, " n"]:
    """Return (||W_il|| / x_il)^2 per sample, and 0 for samples that do not use the layer.

    Args:
        layer: one measured layer.
        bias: take x_il^2 + 1 for x_il^2 where the layer has a bias that counts in S.

    Returns:
        One ratio per sample; inf where a sample's input is zero.
    """
    size2 = layer.x_norm**2 + (bias and layer.bias_counts)
    return where_used(layer, quotient(upper_norm_per_sample(layer) ** 2, size2))
