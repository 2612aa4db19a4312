"""The facts of a layer for each sample: whether it used the layer, and the norm of its weight.

Everything the paper proves is a statement about one sample before it is averaged (docs/theory.md
section 11). Therefore metrics and inequalities read weights only through these functions.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from flatlens.probes import Array, LayerProbe, Probe

WhichNorm = Literal["chosen", "operator", "kernel", "frobenius"]

SMALLEST, LARGEST = 1e-140, 1e140  # sizes whose squares are float64 numbers with all digits


def norm_per_sample(layer: LayerProbe, which: WhichNorm = "chosen") -> Float[Array, " n"]:
    """Return the norm of the weight that each sample used, ||W_il||.

    Args:
        layer: one measured layer.
        which: "chosen" is the norm that ``weight_norm`` selected, "operator" the norm of the map
            from input to output, "kernel" the spectral norm of the flattened kernel, "frobenius"
            the Frobenius norm of the weight.

    Returns:
        One norm per sample; it is meaningless for samples that do not use the layer.
    """
    norms = layer.norm_i if which == "chosen" else getattr(layer, f"{which}_i")
    if norms is not None:
        return np.asarray(norms)
    norm = layer.norm if which == "chosen" else getattr(layer.norms, which)
    return np.full(len(layer.x_norm), norm)


def upper_norm_per_sample(layer: LayerProbe, which: WhichNorm = "chosen") -> Float[Array, " n"]:
    """Return the certified upper end of each sample's norm, which enters a right-hand side."""
    norm = layer.weight_norm if which == "chosen" else which
    slacks = {"operator": layer.slack_i, "kernel": layer.kernel_slack_i}.get(norm)
    slack = layer.norms.slack_of(norm) if slacks is None else slacks
    return norm_per_sample(layer, which) * (1 + slack)


def used_by(layer: LayerProbe) -> Bool[Array, " n"]:
    """Return which samples used the layer."""
    return np.ones(len(layer.x_norm), bool) if layer.used is None else layer.used > 0


def where_used(layer: LayerProbe, values: Array, otherwise: float = 0.0) -> Float[Array, " n"]:
    """Return the values of the samples that used the layer, and ``otherwise`` for the others."""
    used = used_by(layer)
    return values if used.all() else np.where(used, values, otherwise)


def mean_over_users(layer: LayerProbe, values: Array) -> float:
    """Return the mean over the samples that used the layer."""
    used = used_by(layer)
    return float(values.mean() if used.all() else values[used].mean())


def root_mean_weighted(norms: Float[Array, " n"], squares: Float[Array, " n"]) -> float:
    """Return sqrt(mean_i norms_i^2 squares_i).

    The largest norm is factored out of the mean. Its square may overflow, and equal norms then give
    exactly norm * sqrt(mean(squares)).
    """
    largest = norms.max()
    if largest == 0:
        return 0.0
    return float(largest * np.sqrt(((norms / largest) ** 2 * squares).mean()))


def most_uses(layers: list[LayerProbe], weight: str | None) -> int:
    """Return the largest number of times that one sample uses a parameter as a layer's weight."""
    uses = [used_by(layer).astype(int) for layer in layers if layer.weight == weight]
    return int(np.sum(uses, axis=0).max()) if uses else 0


def calls_that_share_the_gradient(p: Probe, layer: LayerProbe) -> list[LayerProbe]:
    """Return the calls whose positions add up to a layer's ``grad_weight``.

    A parameter that several calls use has one gradient, in which their parts may cancel. The list
    is empty if the parameter also has uses that are not calls, or if calls read it in different
    ways. The gradient cannot be split then.
    """
    if layer.weight is None:  # computed: a weight of this call alone
        return [layer]
    path = next(q.path for q in p.parameters if q.name == layer.weight)
    calls = [q for q in p.layers if q.weight == layer.weight]
    return [] if path in ("slow", "rule") or (path == "frozen" and len(calls) > 1) else calls


def without_squares(p: Probe) -> str:
    """Name a size of the network whose square is too small for float64, or return "".

    For derivatives the largest sample counts: one sample with a derivative of 1e-200 adds nothing
    to any sum. Sums are divided by activations, so the smallest activation counts.
    """
    sizes = [("the derivative with respect to the input", p.input.singular[:, 0].max(initial=0.0))]
    for layer in p.layers:
        used, name = used_by(layer), layer.name
        norms, tops, x = norm_per_sample(layer)[used], layer.singular[used, 0], layer.x_norm[used]
        gradients = np.divide(tops * x, norms, out=np.zeros_like(x), where=norms > 0)
        sizes += [
            (f"the weight of {name}", norms.max(initial=0.0)),
            (f"the derivative with respect to the input of {name}", tops.max(initial=0.0)),
            (f"the gradient of {name}", gradients.max(initial=0.0)),
            (f"the input of {name}", x[x > 0].min(initial=1.0)),
        ]
    for what, size in sizes:
        if 0 < size < SMALLEST:
            return f"{what} has size {size:.0e}, and its square is too small for float64"
    return ""
