"""The names of everything that a pass can compute.

Every quantity and every inequality declares once which names it needs. A pass computes the union of
these and nothing else. ``Request.needs`` holds the union, which is fixed before the first chunk.
The names are phrases, so that a message can say what was not asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

# Norms of weights that a pass computes; "matrices" leaves out the norms of maps of images.
AskedNorms = Literal["none", "matrices", "all"]

GRADIENTS = "gradient norms"  # ||grad_p f||_F^2 of every parameter
LAYER_GRADIENTS = "gradient norms of layers"  # ||grad_p f||_F^2 of every layer's weight and bias
ADAPTIVE = "adaptive sharpness"  # squared gradients, each entry weighted by the parameter's square
UNTIED = "untied gradient norms"  # ||grad f||_F^2 with the weights untied per position
INPUT_TOP = "the sensitivity to the input"  # largest singular value of df/dx
INPUT_SPECTRUM = "the singular values at the input"  # all values, rank and dimension
INPUT_INVARIANT = "the input-invariant sensitivity"  # sum_p x_p^2 ||df/dx_p||^2
LAYER_TOPS = "the sensitivities of layers"  # largest singular value of A at every layer
LAYER_SPECTRA = "the singular values at layers"  # all of them
THROUGH = "the sensitivities through layers alone"  # B, ||A - B||_2 and chains of skips
BYPASS = "the bypasses of layers"  # ||A - B||_F, and what else reads the network's input
PATCH_RANKS = "the ranks of patches"  # smallest singular value of the patches
WEIGHT_NORMS = "the norms of weights"  # the chosen norm and the kernel's, of every layer
OPERATOR_NORMS = "the operator norms of weights"  # of the map from a layer's input to its output
SCALED_SUMS = "the sums of Eq. 37"  # curvature and crossed sums of the first layer
FIRST_INVARIANT = "the shared sum of Eq. 44"  # invariant sum of the first layer
CHAIN = "the chain of layers"  # layers and Lipschitz maps from the input to the output

# Names that another name includes, because they are computed on the way.
IMPLIED = {
    INPUT_SPECTRUM: INPUT_TOP,
    LAYER_SPECTRA: LAYER_TOPS,
    OPERATOR_NORMS: WEIGHT_NORMS,
    THROUGH: LAYER_TOPS,
}
AT_THE_INPUT = frozenset({INPUT_TOP, INPUT_SPECTRUM, INPUT_INVARIANT})
# These need df/dz of all outputs, and not only its norms.
JACOBIANS = frozenset({LAYER_GRADIENTS, ADAPTIVE, UNTIED, SCALED_SUMS, FIRST_INVARIANT})
BACK_TO_PARAMETERS = JACOBIANS | {GRADIENTS}
# All other names concern single layers.
WITHOUT_LAYERS = AT_THE_INPUT | {GRADIENTS}
AT_THE_FIRST_LAYER = frozenset({SCALED_SUMS, FIRST_INVARIANT})
BESIDE_LAYERS = frozenset({THROUGH, BYPASS})
EVERYTHING = frozenset(
    {
        *(GRADIENTS, LAYER_GRADIENTS, ADAPTIVE, UNTIED, INPUT_TOP, INPUT_SPECTRUM),
        *(INPUT_INVARIANT, LAYER_TOPS, LAYER_SPECTRA, THROUGH, BYPASS, PATCH_RANKS),
        *(WEIGHT_NORMS, OPERATOR_NORMS, SCALED_SUMS, FIRST_INVARIANT, CHAIN),
    }
)


def with_implied(needs: Iterable[str]) -> frozenset[str]:
    """Add the names that are computed on the way to the given ones.

    >>> sorted(with_implied([INPUT_SPECTRUM]))
    ['the sensitivity to the input', 'the singular values at the input']
    """
    names = frozenset(needs)
    return names | {IMPLIED[name] for name in names if name in IMPLIED}


def not_asked_for(missing: Iterable[str]) -> str:
    """Say that something was not asked for.

    >>> not_asked_for([ADAPTIVE])
    'adaptive sharpness was not asked for'
    """
    names = sorted(missing)
    if len(names) == 1:
        plural = names[0].removeprefix("the ").split()[0].endswith("s")
        return f"{names[0]} {'were' if plural else 'was'} not asked for"
    return f"{', '.join(names[:-1])} and {names[-1]} were not asked for"


def missing(needs: Iterable[str], asked: Iterable[str] | None) -> list[str]:
    """Return the names that are needed but were not asked for; None as ``asked`` means all."""
    return [] if asked is None else sorted(frozenset(needs) - frozenset(asked))
