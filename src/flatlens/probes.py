"""What one pass saw: a handful of float64 numbers per sample, layer and parameter.

Everything the paper defines is arithmetic on these (``metrics``). Symbols are those of
``docs/theory.md``: A = df/dx^l in total, B = df/dx^l through the layer alone, J = df/dz^l, u_p the
patches of x^l, n samples, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Int

from flatlens.algebra.operator_norms import WeightNorms

Array = np.ndarray


@dataclass(frozen=True)
class InputProbe:
    """The network as seen from its input."""

    singular: Float[Array, "n r"]  # of A = df/dx, descending
    rank: Int[Array, " n"]
    x_norm: Float[Array, " n"]
    invariant: Float[Array, " n"]  # sum_p x_p^2 ||A[:, p]||^2, Eq. 43
    dimension: Float[Array, " n"] | None = None  # participation ratio, where it is estimated


@dataclass(frozen=True)
class LayerProbe:
    """One call of a linear map."""

    name: str
    kind: str
    weight: str | None  # the parameter that is the weight; None where the weight is computed
    bias: str | None
    has_bias: bool
    bias_counts: bool  # the bias is a trainable parameter used once, so that grad_b f = sum_p J_p
    positions: int
    groups: int
    in_features: int
    out_features: int
    M: int
    reads_input: bool  # x^l is the network's input, up to a reshape
    norms: WeightNorms
    norm: float  # the one chosen by weight_norm
    x_norm: Float[Array, " n"]
    patch_min: Float[Array, " n"]  # min_p ||u_p||^2
    singular: Float[Array, "n r"]  # of A
    rank: Int[Array, " n"]
    singular_through: Float[Array, "n r"]  # of B
    rank_through: Int[Array, " n"]
    bypass: Float[Array, " n"]  # ||A - B||_F / ||A||_F
    gap_norm: Float[Array, " n"]  # ||A - B||_2
    grad_weight: Float[Array, " n"]  # ||grad_W f||_F^2 of the parameter, all its uses
    grad_bias: Float[Array, " n"]
    untied: Float[Array, " n"]  # sum_p ||J_p||_F^2 ||u_p||^2
    untied_bias: Float[Array, " n"]  # sum_p ||J_p||_F^2
    adaptive: Float[Array, " n"]  # sum W^2 (df/dW)^2
    kappa: int  # how often one input entry occurs over all patches, at most
    fewest: int  # the same, at least
    beside: Float[Array, " n"]  # if x^l is the input: what of df/dx is not A, relative
    is_output: bool  # what the layer gives is the network's output, up to a reshape
    chain: Float[Array, " n"]  # ||A - B - A of the next layer||_F, relative; inf where unlike
    patch_rank: Float[Array, " n"]  # smallest singular value of [U, 1] over positions, or 0
    untied_norm: Float[Array, " n"] | None = None  # ||D^-1 C||_2, where it was asked for
    energy: Float[Array, " n"] | None = None  # ||A||_F^2, where it is estimated
    dimension: Float[Array, " n"] | None = None  # participation ratio, where it is estimated


@dataclass(frozen=True)
class FirstLayerProbe:
    """What only the layer that reads the network's input is asked for (Eqs. 36, 37, 44)."""

    invariant: Float[Array, " n"]  # sum_j ||sum_p u_pj (J_p W)_j||^2
    weight: Float[Array, "g o i"]
    curvature: Float[Array, "o i"] | None = None  # mean_i ||df/dW_kj||^2, of a dense layer
    crossed: Float[Array, "M M"] | None = None  # mean_i ||A_i[:, j]||^2 x_ik^2, of a dense layer


@dataclass(frozen=True)
class ParameterProbe:
    """One parameter's share of the sharpness, and how it was found.

    ``path``: "layer" (weight of a measured layer), "rule" (one copy per sample), "slow" (samples
    one at a time), "frozen" (no part of S) or "unused" (the output does not depend on it).
    """

    name: str
    numel: int
    path: str
    grad: Float[Array, " n"]  # ||df/dp||_F^2
    adaptive: Float[Array, " n"]  # sum_j p_j^2 ||df/dp_j||^2


@dataclass(frozen=True)
class Sketch:
    """What was estimated: sums of squares from random output directions, spectra by Lanczos.

    Singular values beyond the first few are NaN, and so is what needs them; ranks are -1.
    """

    directions: int  # per sample, at least
    seed: int
    errors: dict[str, float]  # standard error of each quantity that is a mean over directions
    layer_errors: list[dict[str, float]]  # the same, of each layer's columns
    converged: bool  # whether every largest singular value met the tolerance


@dataclass(frozen=True)
class Probe:
    """What one pass over n samples saw."""

    n: int
    N: int
    M: int
    dtype: torch.dtype
    output: Float[Array, "n N"]
    input: InputProbe
    layers: list[LayerProbe]
    parameters: list[ParameterProbe]
    first: FirstLayerProbe | None
    chunk: int
    notes: list[str] = field(default_factory=list)
    sketch: Sketch | None = None

    def merge(self, *others: Probe) -> Probe:
        """One probe of all samples, from probes of shares of them; in any order, to round-off."""
        from flatlens.merging import merge

        return merge(self, *others)

    def with_notes(self, *notes: str) -> Probe:
        """The same probe with more said about how it came to be."""
        return replace(self, notes=[*self.notes, *notes])
