"""The conditions of the proofs, each decided from what the pass saw.

A condition takes a probe and one of its layers. It returns None where the condition is met, and
otherwise the reason in one sentence, which becomes ``why`` of an inequality. Nothing is guessed
from module names: positions, uses of a parameter in the autograd graph and ||A - B|| are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from flatlens.algebra.wide_tensor import HALF
from flatlens.capture.no_trace import name_of
from flatlens.per_sample import most_uses
from flatlens.probes import LayerProbe, Probe

Condition = Callable[[Probe, LayerProbe], str | None]


def why_not_dense(p: Probe, layer: LayerProbe) -> str | None:
    """Say why a layer is not z = W x + b at one position that reads every input entry once."""
    if layer.positions > 1:
        return f"{layer.name} shares its weights over {layer.positions} positions"
    if layer.groups > 1:
        return f"{layer.name} has {layer.groups} groups that each read a part of its input"
    if layer.fewest == 0:
        return f"{layer.name} does not read all of its input"
    if layer.kappa > 1:
        return f"{layer.name} reads an entry of its input {layer.kappa} times"
    return None


def why_not_counted(p: Probe, layer: LayerProbe) -> str | None:
    """Say why the gradient of a layer's weight is not part of the sharpness."""
    if layer.weight is None:
        return f"the weight of {layer.name} is computed, not a parameter itself"
    if _path(p, layer.weight) == "frozen":
        return f"{layer.weight} is frozen"
    return None


def why_not_leaf(p: Probe, layer: LayerProbe) -> str | None:
    """Say why a layer's weight is not a trainable parameter that is used exactly once."""
    if reason := why_not_counted(p, layer):
        return reason
    count = most_uses(p.layers, layer.weight)  # uses by a single sample
    if count > 1:
        return f"{layer.weight} is used {count} times"
    if _path(p, layer.weight) != "layer":
        return f"{layer.weight} is also used outside of {layer.name}"
    return None


def why_bypassed(p: Probe, layer: LayerProbe) -> str | None:
    """Say why A differs from B: something else reads the tensor that enters the layer."""
    if layer.bypass.max() > certificate(p):
        return f"{layer.name}: its input is also read elsewhere (a skip or another branch)"
    return None


def why_read_beside(p: Probe, layer: LayerProbe) -> str | None:
    """Say why df/dx is not the derivative at the first layer: something else reads the input."""
    if layer.beside.max() > certificate(p):
        return f"the network's input is also read beside {layer.name}"
    return None


def why_rounded(p: Probe) -> str | None:
    """Say why derivatives at two places of the network may disagree: half precision.

    A proof says how the derivative at a layer's input follows from the one at its output. In half
    precision each of the two is rounded separately, so the relation holds only up to rounding.
    """
    if p.dtype not in HALF:
        return None
    return f'derivatives are rounded to {name_of(p.dtype)} (precision="model")'


PAPER: tuple[Condition, ...] = (why_not_dense, why_not_leaf, why_bypassed)
PAPER_AT_THE_INPUT: tuple[Condition, ...] = (why_read_beside, *PAPER)


def first_reason(
    p: Probe, layers: Iterable[LayerProbe], conditions: Iterable[Condition]
) -> str | None:
    """Return the reason of the first layer that breaks a condition, or None if none does."""
    conditions = tuple(conditions)
    reasons = (condition(p, layer) for layer in layers for condition in conditions)
    return next((reason for reason in reasons if reason), None)


def certificate(p: Probe) -> float:
    """Return the relative size below which a difference of derivatives counts as zero.

    It is below the tolerance of a comparison, so that no theorem fails because of it.
    """
    if p.dtype in HALF:
        return 4 * torch.finfo(p.dtype).eps
    return 1e-12 if p.dtype == torch.float64 else 1e-7


def _path(p: Probe, name: str | None) -> str:
    """Return how the parameter of this name entered the sharpness."""
    return next(q.path for q in p.parameters if q.name == name)
