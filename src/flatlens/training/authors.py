"""Quantities as the code of the paper's authors computes them, where it differs from the paper.

`bound_authors` is the right side of Eq. 12, and `d_authors` is D of Eq. 48 (the right side of Eq.
11). Both use the norms below and add 1e-4 to every squared norm of an input.

In a network of linear layers alone the norms are spectral. In a network with convolutions they are
Frobenius norms. The square of a convolution's norm is multiplied by its number of output positions.
(A third variant, the log volume of the three largest singular values, is `log_volume_top3` of
`measure`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from flatlens.inequalities.first_layers import find_first_layers
from flatlens.metrics import sharpness
from flatlens.passes.needs import GRADIENTS, WEIGHT_NORMS
from flatlens.per_sample import norm_per_sample, where_used
from flatlens.probes import Array, LayerProbe, Probe

EPSILON = 1e-4


def bound_authors(p: Probe) -> float:
    """Return sqrt(mean_i sum_l ||W_l||^2 / (||x_il||^2 + 1e-4)) sqrt(S).

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Conv1d(1, 1, 1, bias=False).double()
    >>> _ = torch.nn.init.constant_(net.weight, 3.0)
    >>> p = fl.probe(net, torch.ones(1, 1, 4).double())  # T = 4, ||x||^2 = 4, S = 4
    >>> round(bound_authors(p), 3)
    6.0
    """
    total = np.sum([_ratio(p, layer) for layer in p.layers], axis=0)
    return math.sqrt(total.mean() * sharpness(p))


def d_authors(p: Probe) -> float:
    """Return sqrt(mean_i ||W_i||^2 / (||x_i||^2 + 1e-4)) sqrt(S) of the first layer.

    NaN if no layer reads the input of the network.
    """
    input_layers = find_first_layers(p)
    if input_layers is None:
        return math.nan
    return math.sqrt(input_layers.gather(lambda layer: _ratio(p, layer)).mean() * sharpness(p))


def _ratio(p: Probe, layer: LayerProbe) -> Float[Array, " n"]:
    convolutional = any("conv" in other.kind for other in p.layers)
    norm2 = norm_per_sample(layer, "frobenius" if convolutional else "operator") ** 2
    if "conv" in layer.kind:
        norm2 = norm2 * layer.positions
    return where_used(layer, norm2 / (layer.x_norm**2 + EPSILON))


VARIANTS: dict[str, Callable[[Probe], float]] = {
    "bound_authors": bound_authors,
    "d_authors": d_authors,
}
for variant in VARIANTS.values():  # ``measure`` reads the needs of a function
    variant.needs = frozenset({GRADIENTS, WEIGHT_NORMS})  # type: ignore[attr-defined]


def split(quantities: str | Sequence[str]) -> tuple[str | list[str], list[str]]:
    """Split names into those for `measure` and variants of the authors.

    Args:
        quantities: names, or names of sets.

    Returns:
        Quantities for `measure`, and names of `VARIANTS`.

    >>> split(["mls", "d_authors"]), split("all")
    ((['mls'], ['d_authors']), ('all', []))
    """
    if isinstance(quantities, str) and ":" not in quantities:
        return quantities, []
    quantities = [quantities] if isinstance(quantities, str) else quantities
    names = list(dict.fromkeys(quantities))
    return [q for q in names if q not in VARIANTS], [q for q in names if q in VARIANTS]
