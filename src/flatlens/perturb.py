"""Quantities that need passes of their own: second derivatives and perturbed weights or inputs.

| function | what | where |
|---|---|---|
| ``hessian_trace`` | Tr H of the mean loss | Eq. 2, Lemma B.1 |
| ``adaptive_sharpness_hessian`` | sum_j w_j^2 H_jj | Eq. 40, Lemma E.2 |
| ``adaptive_sharpness_sampled`` | the same by perturbed weights | Eqs. 38, 46 |
| ``input_sensitivity_ascent`` | ||df/dx||_2 by gradient ascent | Eq. 47 |
| ``relative_flatness`` | sum_ss' <w_s, w_s'> Tr H_ss' | Petzka et al. |
| ``normalized_sharpness`` | minimised over scales of rows and columns | Eq. 36 |
| ``lambda_max``, ``edge_of_stability`` | the top eigenvalue of H | |
| ``fisher_trace`` | mean squared gradient of the loss of a sample | Kunstner et al. |
| ``gradient_noise_scale`` | Tr(Sigma) / ||g||^2 of the loss gradients | McCandlish et al. |
| ``batch_sharpness`` | g^T H g / ||g||^2 of mini-batches | Andreyev, Beneventano |
| ``margin_radius`` | first-order distance to another decision, per sample | Elsayed et al. |

Each function returns an :class:`Estimate`: the value, its standard error, and whether it converged.
Only trainable parameters count. The model runs in evaluation mode and is left exactly as found. A
Hessian that is not symmetric raises, because then a second derivative is wrong.
"""

from __future__ import annotations

from flatlens.algebra.traces import Estimate
from flatlens.curvature.gauges import batch_sharpness, fisher_trace, gradient_noise_scale
from flatlens.curvature.hessian_trace import adaptive_sharpness_hessian, hessian_trace
from flatlens.curvature.input_ascent import input_sensitivity_ascent
from flatlens.curvature.margins import margin_radius
from flatlens.curvature.normalized_sharpness import normalized_sharpness
from flatlens.curvature.perturbed_weights import adaptive_sharpness_sampled
from flatlens.curvature.relative_flatness import relative_flatness
from flatlens.curvature.top_eigenvalue import edge_of_stability, lambda_max

__all__ = [
    "Estimate",
    "adaptive_sharpness_hessian",
    "adaptive_sharpness_sampled",
    "batch_sharpness",
    "edge_of_stability",
    "fisher_trace",
    "gradient_noise_scale",
    "hessian_trace",
    "input_sensitivity_ascent",
    "lambda_max",
    "margin_radius",
    "normalized_sharpness",
    "relative_flatness",
]
