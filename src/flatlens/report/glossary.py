"""Explain the names of quantities and inequalities in plain words."""

from __future__ import annotations

from collections.abc import Iterable

QUANTITIES = {
    "train_loss": "loss on the training data",
    "test_loss": "loss on the test data",
    "sharpness": "S, the average squared gradient of the outputs with respect to the weights "
    "(Eq. 3)",
    "sqrt_sharpness": "square root of S, the average squared gradient of the outputs with respect "
    "to the weights (Eq. 3); small is flat",
    "mls": "maximum local sensitivity: how far the output can move per unit of input, averaged "
    "over samples (Def. 3.7)",
    "nmls": "network maximum local sensitivity: the MLS of every layer's input, summed over layers "
    "(Def. 3.9)",
    "log_volume": "mean logarithm of the local volume ratio, the product of the singular values of "
    "the derivative of the output with respect to the input (Eq. 7); low is compressed",
    "log_volume_top3": "log volume from the three largest singular values, as in the authors' code",
    "local_dimension": "mean participation ratio of the singular values (Eq. 15): how many "
    "directions of the input the output depends on",
    "generalization_gap": "training accuracy minus test accuracy, in percentage points",
    "eq12.rhs": "right side of Eq. 12, the paper's upper bound of NMLS from sharpness",
    "eq48_bc.rhs": "C of Eq. 48, an upper bound of MLS from the gradient of the first layer",
    "eq48_cd.rhs": "D of Eq. 48, the right side of Eq. 11: an upper bound of MLS from sharpness",
    "relative_flatness": "relative flatness of the last linear layer (Petzka et al.)",
    "adaptive_sharpness": "sharpness with perturbations scaled by the weights (Eq. 41)",
    "normalized_mls": "MLS relative to the size of the input (Def. F.1)",
}
INEQUALITIES = {
    "eq5": "Eq. 5: the sensitivity of the output to one layer's input is bounded by the gradient "
    "of that layer's weight",
    "eq6": "Eq. 6: the mean squared sensitivity to the input is bounded by sharpness",
    "eq8": "Eq. 8: the volume is bounded by the mean squared derivative with respect to the input",
    "eq9": "Eq. 9: the volume is bounded by a power of sharpness",
    "eq10": "Eq. 10: the volume summed over layers is bounded by a power of sharpness",
    "eq11": "Eq. 11: MLS is bounded by the first layer's norm times the root of sharpness",
    "eq11_bias": "Eq. 11 with the gradients of the biases taken into account, which is tighter",
    "eq48_ab": "Eq. 48, A <= B: MLS against the gradient of the first layer, sample by sample",
    "eq48_bc": "Eq. 48, B <= C: the Cauchy-Schwarz step of Eq. 11",
    "eq48_cd": "Eq. 48, C <= D: the gradient of the first layer is part of sharpness",
    "eq12": "Eq. 12: NMLS is bounded by the norms of all layers times the root of sharpness",
    "eq12_bias": "Eq. 12 with the gradients of the biases taken into account, which is tighter",
    "eq12_untied": "Eq. 12 with shared weights counted once per position; true for any network",
    "eq12_untied_exact": "Eq. 12 with shared weights counted once per position, with exact norms",
    "eq12_kernel": "Eq. 12 with the norm of the reshaped kernel of a convolution",
    "eq12_tied_rank": "Eq. 12 for shared weights whose patches have full rank over positions",
    "eq17": "Eq. 17: Eq. 12 for networks with skip connections",
    "eq17_telescoped": "Eq. 17 summed along a chain of identity skips: a bound of MLS",
    "eq35": "Eq. 35: NMLS weighted by the size of the inputs is bounded by a matrix-normalised "
    "sharpness",
    "eq37": "Eq. 37: sensitivity is bounded by the normalised sharpness of the first layer",
    "eq44": "Eq. 44: sensitivity scaled by the input is bounded by adaptive sharpness",
    "eq44_shared": "Eq. 44 for a first layer that shares its weights over positions",
    "log_volume": "the mean log volume is bounded by the logarithm of sharpness (both sides are "
    "logarithms)",
    "lipschitz": "the largest sensitivity is bounded by the product of the layers' norms",
}


def explain(name: str) -> str | None:
    """Return what an inequality or a quantity means, or None for an unknown name.

    >>> explain("eq12_bias").startswith("Eq. 12 with the gradients of the biases")
    True
    """
    return INEQUALITIES.get(name) or QUANTITIES.get(name)


def explained(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return name and meaning of those names that have an explanation, each once."""
    pairs = [(name, explain(name)) for name in dict.fromkeys(names)]
    return [(name, meaning) for name, meaning in pairs if meaning]
