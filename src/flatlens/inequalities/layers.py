"""The inequality of each single layer, Eq. 5."""

from __future__ import annotations

from typing import Any

import numpy as np

from flatlens.inequalities.arithmetic import product
from flatlens.inequalities.conditions import PAPER, first_reason
from flatlens.passes.needs import (
    BYPASS,
    LAYER_GRADIENTS,
    LAYER_SPECTRA,
    WEIGHT_NORMS,
    missing,
    not_asked_for,
    with_implied,
)
from flatlens.per_sample import (
    calls_that_share_the_gradient,
    mean_over_users,
    most_uses,
    upper_norm_per_sample,
)
from flatlens.probes import LayerProbe, Probe

NEEDS = with_implied({LAYER_SPECTRA, LAYER_GRADIENTS, WEIGHT_NORMS, BYPASS})


def _why_unknown(p: Probe) -> str:
    """Say which numbers of Eq. 5 the pass was not asked for."""
    names = missing(NEEDS, p.asked)
    return not_asked_for(names) if names else "it needs numbers that the pass does not find"


def layer_bounds(p: Probe, layer: LayerProbe) -> dict[str, Any]:
    """Compute one layer's own inequality, Eq. 5 averaged over the samples that use the layer.

    lhs = mean_i ||A_il||_F and rhs = mean_i ||W_il|| sqrt(w_il) / x_il. ``multiplicative`` bounds
    the response through the layer to u_p -> (1 + H) u_p with ||H||_F = 1 at all its positions
    (docs/theory.md section 4.3). It needs the gradient of this call alone, so it is NaN if the
    weight has other uses.

    Args:
        p: the probe.
        layer: one of the probe's layers.

    Returns:
        The columns ``eq5_lhs``, ``eq5_rhs``, ``eq5_slack``, ``eq5_verdict``, ``eq5_why`` and
        ``multiplicative`` of ``m.layers``.
    """
    root = np.sqrt(layer.grad_weight)
    energy = (layer.singular**2).sum(1) if layer.energy is None else layer.energy
    lhs = mean_over_users(layer, np.sqrt(energy))
    with np.errstate(divide="ignore"):
        inverse = 1 / layer.x_norm
    norms = upper_norm_per_sample(layer)
    largest = norms.max()  # factored out: equal norms give exactly that norm
    share = norms / largest if largest > 0 else np.ones_like(norms)
    terms = [product(a * c, b) for a, b, c in zip(root, inverse, share, strict=True)]
    rhs = float(largest * mean_over_users(layer, np.array(terms)))
    reason = first_reason(p, [layer], PAPER)
    verdict = "theorem" if reason is None else "observation"
    if np.isnan(lhs) or np.isnan(rhs):
        verdict, reason = "not applicable", _why_unknown(p)
    calls = calls_that_share_the_gradient(p, layer)
    alone = 1.0 if most_uses(calls, layer.weight) == 1 else np.nan
    kernel = upper_norm_per_sample(layer, "kernel")
    widest = kernel.max()
    relative = kernel / widest if widest > 0 else kernel
    return {
        "eq5_lhs": lhs,
        "eq5_rhs": rhs,
        "eq5_slack": rhs / lhs if lhs > 0 else np.inf,
        "eq5_verdict": verdict,
        "eq5_why": reason or "one position, a trainable weight used once, no bypass",
        "multiplicative": float(alone * widest * mean_over_users(layer, relative * root)),
    }
