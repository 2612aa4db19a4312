"""The numbers from which the rows of the table are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float

from flatlens.algebra.scaling import Minimum, minimise
from flatlens.inequalities.arithmetic import quotient
from flatlens.inequalities.first_layers import FirstLayers, find_first_layers
from flatlens.inequalities.tolerances import tolerance
from flatlens.metrics import sharpness
from flatlens.per_sample import upper_norm_per_sample, where_used, without_squares
from flatlens.probes import Array, LayerProbe, Probe


@dataclass(frozen=True)
class Network:
    """A probe with its sharpness, its first layers and its tolerance."""

    p: Probe
    S: float  # sharpness, Eq. 3
    first_layers: FirstLayers | None
    tolerance: float  # relative rounding that a comparison allows
    exact_untied: bool = False  # use ||D^-1 C||_2 itself instead of its cheap bound

    @classmethod
    def of(cls, p: Probe, exact_untied: bool = False) -> Network:
        """Collect what the rows need from a probe."""
        S = float(sharpness.samples(p).mean())
        return cls(p, S, find_first_layers(p), tolerance(p), exact_untied)

    def first_ratios(self, bias: bool = False) -> Float[Array, " n"]:
        """Return (||W_i1|| / x_i1)^2 of each sample's first layer."""
        assert self.first_layers is not None
        return self.first_layers.gather(lambda layer: ratios(layer, bias))

    @cached_property
    def without_squares(self) -> str:
        """A size that is too small to be squared in float64, or ""; then no side is computed."""
        return without_squares(self.p)

    @cached_property
    def scaled_minimum(self) -> Minimum:
        """The minimum of Eq. 36 for the first layer; both sides of Eq. 37 are taken there."""
        extra = self.p.first
        assert extra is not None
        assert extra.curvature is not None
        assert extra.weight is not None
        return minimise(extra.curvature, extra.weight[0])


def ratios(layer: LayerProbe, bias: bool = False) -> Float[Array, " n"]:
    """Return (||W_il|| / x_il)^2 per sample, and 0 for samples that do not use the layer.

    Args:
        layer: one measured layer.
        bias: use x_il^2 + 1 instead of x_il^2 if the layer has a bias that counts in S.

    Returns:
        One ratio per sample; inf if a sample's input is zero.
    """
    size2 = layer.x_norm**2 + (bias and layer.bias_counts)
    return where_used(layer, quotient(upper_norm_per_sample(layer) ** 2, size2))
