"""The table of inequalities between flatness and compression, one row each.

The rows are in the order of ``docs/theory.md``. To add an inequality, write its two sides as
functions of a :class:`Network` and add a row. Nothing else changes.

Notation: W_il is the weight that sample i used in layer l, x_il the input of that layer, w_il =
||grad_{W_l} f(x_i)||_F^2, S the sharpness, A and B the derivatives of the output with respect to
x_il in total and through the layer alone. Volumes are compared as logarithms. If a norm was
computed by an iteration, right-hand sides use its certified upper end. A sample that does not use a
layer adds 0 to both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from flatlens.errors import FlatlensError, counted
from flatlens.inequalities.arithmetic import (
    infinite_if_unknown,
    log,
    log_mean_exp,
    log_sum_exp,
    product,
    quotient,
)
from flatlens.inequalities.conditions import (
    PAPER,
    PAPER_AT_THE_INPUT,
    certificate,
    why_not_counted,
    why_not_dense,
    why_not_leaf,
    why_read_beside,
)
from flatlens.inequalities.lipschitz import LIPSCHITZ
from flatlens.inequalities.network import Network, ratios
from flatlens.inequalities.verdicts import NO_FIRST_LAYER, Row, all_layers
from flatlens.metrics import (
    adaptive_sharpness,
    input_invariant_mls,
    layer_log_volumes,
    log_products,
    matrix_normalized_sharpness,
    mls,
    nmls,
    nmls_through,
    sharpness_untied,
    weighted_nmls,
)
from flatlens.passes import needs
from flatlens.per_sample import upper_norm_per_sample, used_by, where_used
from flatlens.probes import Array, LayerProbe

# -- volumes: Eqs. 6, 8, 9, 10 and the one without n ----------------------------------------------


def lhs_eq6(net: Network) -> float:
    """Return mean_i sigma_1(A_i)^2."""
    return float((net.p.input.singular[:, 0] ** 2).mean())


def rhs_eq6(net: Network) -> float:
    """Return S max_i ||W_i1||^2 / x_i1^2."""
    return product(net.first_ratios().max(), net.S)


def log_mean_volume(net: Network) -> float:
    """Return log mean_i dVol_i."""
    return log_mean_exp(log_products(net.p.input.singular))


def rhs_eq8(net: Network) -> float:
    """Return log mean_i (||A_i||_F^2 / r)^(r/2)."""
    s = net.p.input.singular
    r = s.shape[1]
    return log_mean_exp(r / 2 * log((s**2).sum(1) / r))


def log_eq9(net: Network, ratio: Array, r: int) -> float:
    """Return log((1/n) sqrt(sum ratio^r) (nS/r)^(r/2)) with ratio = (||W||/x)^2."""
    n = net.p.n
    total = log_mean_exp(r * log(ratio)) + np.log(len(ratio))
    with np.errstate(invalid="ignore"):
        return infinite_if_unknown(float(-np.log(n) + total / 2 + r / 2 * log(n * net.S / r)))


def rhs_eq9(net: Network) -> float:
    """Return ``log_eq9`` with the first layer's ratios and r = min(N, M)."""
    return log_eq9(net, net.first_ratios(), net.p.input.singular.shape[1])


def lhs_eq10(net: Network) -> float:
    """Return log sum_l mean_i dVol_il."""
    return log_sum_exp([log_mean_exp(layer_log_volumes(q)) for q in net.p.layers])


def rhs_eq10(net: Network) -> float:
    """Return ``log_eq9`` over all layers at once, or summed over layers if their r_l differ."""
    ratio = [ratios(q) for q in net.p.layers]
    ranks = [q.singular.shape[1] for q in net.p.layers]
    if len(set(ranks)) == 1:
        return log_eq9(net, np.concatenate(ratio), ranks[0])
    return log_sum_exp([log_eq9(net, a, r) for a, r in zip(ratio, ranks, strict=True)])


def lhs_log_volume(net: Network) -> float:
    """Return mean_i log dVol_i."""
    return float(log_products(net.p.input.singular).mean())


def rhs_log_volume(net: Network) -> float:
    """Return (r/2) log(S/r) + r mean_i log(||W_i1|| / x_i1), with x^2 + 1 if a bias counts."""
    r = net.p.input.singular.shape[1]
    logs = log(net.first_ratios(bias=True)) / 2
    with np.errstate(invalid="ignore"):
        return infinite_if_unknown(r / 2 * float(log(net.S / r)) + r * float(logs.mean()))


# -- MLS: Eqs. 11 and 48 --------------------------------------------------------------------------


def lhs_mls(net: Network) -> float:
    """Return MLS = mean_i sigma_1(A_i)."""
    return mls(net.p)


def rhs_eq11(net: Network) -> float:
    """Return sqrt(mean_i ||W_i1||^2 / x_i1^2) sqrt(S), which is also D of Eq. 48."""
    return product(np.sqrt(net.first_ratios().mean()), np.sqrt(net.S))


def rhs_eq11_bias(net: Network) -> float:
    """Return the right-hand side of Eq. 11 with x_i1^2 + 1 if a bias counts."""
    return product(np.sqrt(net.first_ratios(bias=True).mean()), np.sqrt(net.S))


def first_weight_gradients(net: Network) -> Array:
    """Return w_i1 of each sample's first layer."""
    assert net.first_layers is not None
    return net.first_layers.gather(lambda layer: layer.grad_weight)


def eq48_b(net: Network) -> float:
    """Return B = mean_i (||W_i1|| / x_i1) sqrt(w_i1)."""
    pairs = zip(net.first_ratios(), first_weight_gradients(net), strict=True)
    return float(np.mean([product(np.sqrt(a), np.sqrt(w)) for a, w in pairs]))


def eq48_c(net: Network) -> float:
    """Return C = sqrt(mean_i ||W_i1||^2 / x_i1^2) sqrt(mean_i w_i1)."""
    w = first_weight_gradients(net)
    return product(np.sqrt(net.first_ratios().mean()), np.sqrt(w.mean()))


# -- NMLS: Eq. 12 and its forms for shared weights ------------------------------------------------


def lhs_nmls(net: Network) -> float:
    """Return NMLS = sum_l mean_i sigma_1(A_il)."""
    return nmls(net.p)


def lhs_nmls_through(net: Network) -> float:
    """Return sum_l mean_i sigma_1(B_il)."""
    return nmls_through(net.p)


def over_layers(net: Network, terms: Sequence[Array], S: float) -> float:
    """Return sqrt(mean_i sum_l terms_il) sqrt(S)."""
    return product(np.sqrt(np.mean(np.sum(terms, axis=0))), np.sqrt(S))


def rhs_eq12(net: Network) -> float:
    """Return sqrt(mean_i sum_l ||W_il||^2 / x_il^2) sqrt(S)."""
    return over_layers(net, [ratios(q) for q in net.p.layers], net.S)


def rhs_eq12_bias(net: Network) -> float:
    """Return the right-hand side of Eq. 12 with x_il^2 + 1 if a bias counts."""
    return over_layers(net, [ratios(q, bias=True) for q in net.p.layers], net.S)


def untied_factors(net: Network, layer: LayerProbe) -> Array:
    """Return k_il^2 of docs/theory.md, section 4.1."""
    if net.exact_untied:
        if layer.untied_norm is None:
            raise FlatlensError(
                "exact=True needs ||D^-1 C||_2: probe the network with exact_untied=True"
            )
        return where_used(layer, layer.untied_norm**2)
    size2 = layer.patch_min + (layer.has_bias and "transpose" not in layer.kind)
    norms = upper_norm_per_sample(layer, "kernel")
    return where_used(layer, quotient(layer.kappa * norms**2, size2))


def rhs_eq12_untied(net: Network) -> float:
    """Return sqrt(mean_i sum_l k_il^2) sqrt(S_untied)."""
    terms = [untied_factors(net, q) for q in net.p.layers]
    return over_layers(net, terms, sharpness_untied(net.p))


def tied_factors(layer: LayerProbe) -> Array:
    """Return ||C_il||^2 / s_il^2 of docs/theory.md, section 4.2."""
    # J of a transposed convolution is taken before the overlapping sum, so its C is the kernel.
    norms = upper_norm_per_sample(layer, "kernel" if "transpose" in layer.kind else "operator")
    return where_used(layer, quotient(norms**2, layer.patch_rank**2))


def rhs_eq12_tied_rank(net: Network) -> float:
    """Return sqrt(mean_i sum_l ||C_il||^2 / s_il^2) sqrt(S)."""
    return over_layers(net, [tied_factors(q) for q in net.p.layers], net.S)


# -- skips: Eq. 17 --------------------------------------------------------------------------------


def lhs_eq17(net: Network) -> float:
    """Return mean_i sum_l (||A_il||_2 - ||A_il - B_il||_2)."""
    terms = [where_used(q, q.singular[:, 0] - q.gap_norm) for q in net.p.layers]
    return float(np.mean(np.sum(terms, axis=0)))


def inner_layers(net: Network) -> Sequence[LayerProbe]:
    """Return all measured layers except the last."""
    return net.p.layers[:-1]


def why_no_chain(net: Network) -> str | None:
    """Say why the network is not a chain of identity skips with a linear last layer."""
    inner, last = inner_layers(net), net.p.layers[-1]
    if not inner or net.first_layers is None or net.first_layers.layers[0] is not inner[0]:
        return "the network is not a chain that starts at its input"
    if partly := [q for q in net.p.layers if not used_by(q).all()]:
        return f"some samples do not use {partly[0].name}"
    for q in inner:
        if not (q.chain <= certificate(net.p)).all():
            return f"{q.name} has no identity skip to the next layer"
    if not last.is_output or last.positions > 1:
        return f"{last.name} is not a linear last layer"
    return None


def lhs_eq17_telescoped(net: Network) -> float:
    """Return MLS - mean_i ||W_iL||."""
    norms = upper_norm_per_sample(net.p.layers[-1], "operator")
    largest = norms.max()  # factored out: equal norms give exactly that norm
    mean = largest * (norms / largest).mean() if largest > 0 else 0.0
    return float(mls(net.p) - mean)


def rhs_eq17_telescoped(net: Network) -> float:
    """Return the right-hand side of Eq. 12 over all layers except the last."""
    return over_layers(net, [ratios(q) for q in inner_layers(net)], net.S)


# -- normalised and adaptive sharpness: Eqs. 35, 37, 44 -------------------------------------------


def lhs_eq35(net: Network) -> float:
    """Return sum_l xbar_l MLS_l."""
    return weighted_nmls(net.p)


def rhs_eq35(net: Network) -> float:
    """Return sum_l sqrt(mean_i ||W_il||^2 w_il), raised by the widest interval of a norm."""
    slack = max(1 + q.norms.slack_of(q.weight_norm) for q in net.p.layers)
    return matrix_normalized_sharpness(net.p) * slack


def why_no_eq37(net: Network) -> str | None:
    """Say why Eq. 36 was not minimised for this network."""
    extra = net.p.first
    if net.first_layers is None:
        return None
    if extra is None or extra.weight is None:
        return "the weight of the first layer differs from sample to sample"
    layer = net.first_layers.layers[0]
    if extra.curvature is not None and extra.crossed is not None:
        return None
    if reason := why_not_dense(net.p, layer):
        return reason
    if layer.kind == "linear":
        return f"the input of {layer.name} is too wide, or its entries are read in another order"
    what = "a convolution" if "conv" in layer.kind else f"a {layer.kind} layer of another shape"
    return f"{layer.name} is {what}: its columns are not input entries"


def lhs_eq37(net: Network) -> float:
    """Return sqrt(mean_i ||A_i1 diag(1/t)||_F^2 ||diag(t) x_i||^2) at the minimum of Eq. 36."""
    assert net.p.first is not None
    assert net.p.first.crossed is not None
    t2 = net.scaled_minimum.column  # 0 if a column dropped out
    inverse = np.divide(1.0, t2, out=np.zeros_like(t2), where=t2 > 0)
    crossed = torch.from_numpy(net.p.first.crossed) @ torch.from_numpy(t2)
    return float(np.sqrt(max(float(crossed @ torch.from_numpy(inverse)), 0.0)))


def rhs_eq37(net: Network) -> float:
    """Return the minimum of Eq. 36 with lambda = 1."""
    return net.scaled_minimum.value


def lhs_eq44(net: Network) -> float:
    """Return mean_i (1/d_i) sum_p x_ip^2 ||A_i[:, p]||^2 with the first layer's width d_i."""
    assert net.first_layers is not None
    return net.first_layers.mean_by_width(input_invariant_mls.samples(net.p))


def rhs_eq44(net: Network) -> float:
    """Return the adaptive sharpness, Eq. 41."""
    return adaptive_sharpness(net.p)


def why_no_eq44_shared(net: Network) -> str | None:
    """Say why the left-hand side is unknown."""
    return NO_FIRST_LAYER if net.p.first is None else None


def lhs_eq44_shared(net: Network) -> float:
    """Return mean_i (1/d_i) sum_j ||sum_p u_pj (J_p W)_j||^2 with the first layer's width d_i."""
    assert net.first_layers is not None
    assert net.p.first is not None
    return net.first_layers.mean_by_width(net.p.first.invariant)


def rhs_eq44_shared(net: Network) -> float:
    """Return the first weight's part of the adaptive sharpness."""
    assert net.first_layers is not None
    return float(net.first_layers.gather(lambda layer: layer.adaptive).mean())


# -- why a right-hand side is infinite ------------------------------------------------------------


def zero_input(
    layers: Callable[[Network], Sequence[LayerProbe]], bias: bool = False
) -> Callable[[Network], str | None]:
    """Return a function that names the first layer with a zero input and counts the samples.

    With ``bias`` layers whose bias counts in S are left out, because their ratio stays finite.
    """

    def why_infinite(net: Network) -> str | None:
        for q in layers(net):
            if count := int(np.sum(np.isinf(ratios(q, bias)))):
                return f"{q.name} gets a zero input in {counted(count, 'sample')}"
        return None

    return why_infinite


def first_layers(net: Network) -> Sequence[LayerProbe]:
    """Return the layers that read the network's input."""
    return net.first_layers.layers if net.first_layers else ()


def zero_patch(net: Network) -> str | None:
    """Name a layer with an all-zero patch, if the right-hand side of eq12_untied is infinite."""
    if np.isinf(rhs_eq12_untied(net)):
        for q in net.p.layers:
            if np.isinf(untied_factors(net, q)).any():
                return f"{q.name} has an all-zero patch and no bias"
    return None


def low_patch_rank(net: Network) -> str | None:
    """Name a layer whose patches do not determine the positions."""
    for q in net.p.layers:
        if (where_used(q, q.patch_rank, 1.0) == 0).any():
            return f"the patches of {q.name} do not have full rank over positions"
    return None


RATIOS = (needs.GRADIENTS, needs.WEIGHT_NORMS)  # needs of S times (||W|| / x)^2
DENSE_FIRST = "the first layer has one position, a trainable weight used once, and no bypass"
DENSE_ALL = "every layer has one position, a trainable weight used once, and no bypass"

TABLE: tuple[Row, ...] = (
    Row("eq6", "Eq. 6, k = 2", lhs_eq6, rhs_eq6, DENSE_FIRST,
        first_layer=PAPER_AT_THE_INPUT, infinite=zero_input(first_layers),
        sides=(needs.INPUT_TOP, *RATIOS)),
    Row("eq8", "Eq. 8", log_mean_volume, rhs_eq8, "AM-GM", needs_layers=False, logs=True,
        sides=(needs.INPUT_SPECTRUM,), of_any_numbers=True),
    Row("eq9", "Eq. 9", log_mean_volume, rhs_eq9, DENSE_FIRST,
        first_layer=PAPER_AT_THE_INPUT, infinite=zero_input(first_layers), logs=True,
        sides=(needs.INPUT_SPECTRUM, *RATIOS)),
    Row("eq10", "Eq. 10", lhs_eq10, rhs_eq10, DENSE_ALL,
        each=PAPER, infinite=zero_input(all_layers), logs=True,
        sides=(needs.LAYER_SPECTRA, *RATIOS)),
    Row("eq11", "Eq. 11", lhs_mls, rhs_eq11, DENSE_FIRST,
        first_layer=PAPER_AT_THE_INPUT, infinite=zero_input(first_layers),
        sides=(needs.INPUT_TOP, *RATIOS)),
    Row("eq11_bias", "Eq. 11 with biases", lhs_mls, rhs_eq11_bias, DENSE_FIRST,
        first_layer=PAPER_AT_THE_INPUT, infinite=zero_input(first_layers, bias=True),
        sides=(needs.INPUT_TOP, *RATIOS)),
    Row("eq48_ab", "Eq. 48, A <= B", lhs_mls, eq48_b, DENSE_FIRST,
        first_layer=PAPER_AT_THE_INPUT, infinite=zero_input(first_layers),
        sides=(needs.INPUT_TOP, needs.LAYER_GRADIENTS, needs.WEIGHT_NORMS)),
    Row("eq48_bc", "Eq. 48, B <= C", eq48_b, eq48_c, "Cauchy-Schwarz", about_first=True,
        sides=(needs.LAYER_GRADIENTS, needs.WEIGHT_NORMS), of_any_numbers=True),
    Row("eq48_cd", "Eq. 48, C <= D", eq48_c, rhs_eq11, "the first layer's weight is part of S",
        first_layer=(why_not_counted,),
        sides=(needs.LAYER_GRADIENTS, *RATIOS), of_any_numbers=True),
    Row("eq12", "Eq. 12", lhs_nmls, rhs_eq12, DENSE_ALL,
        each=PAPER, infinite=zero_input(all_layers),
        sides=(needs.LAYER_TOPS, *RATIOS)),
    Row("eq12_bias", "Eq. 12 with biases", lhs_nmls, rhs_eq12_bias, DENSE_ALL,
        each=PAPER, infinite=zero_input(all_layers, bias=True),
        sides=(needs.LAYER_TOPS, *RATIOS)),
    Row("eq12_untied", "theory 4.1", lhs_nmls_through, rhs_eq12_untied,
        "weights counted once per position", infinite=zero_patch,
        sides=(needs.LAYER_TOPS, needs.THROUGH, needs.UNTIED, needs.WEIGHT_NORMS)),
    Row("eq12_tied_rank", "theory 4.2", lhs_nmls_through, rhs_eq12_tied_rank,
        "every weight is a trainable parameter used once",
        each=(why_not_leaf,), infinite=low_patch_rank,
        sides=(needs.LAYER_TOPS, needs.THROUGH, needs.PATCH_RANKS, needs.OPERATOR_NORMS, *RATIOS)),
    Row("eq17", "Eq. 17", lhs_eq17, rhs_eq12,
        "every layer has one position and a trainable weight used once",
        each=(why_not_dense, why_not_leaf), infinite=zero_input(all_layers), scale=lhs_nmls,
        sides=(needs.LAYER_TOPS, needs.THROUGH, *RATIOS)),
    Row("eq17_telescoped", "Eq. 17, telescoped", lhs_eq17_telescoped, rhs_eq17_telescoped,
        "a chain of identity skips with a linear last layer", not_applicable=why_no_chain,
        first_layer=(why_read_beside,), each=(why_not_dense, why_not_leaf), layers=inner_layers,
        infinite=zero_input(inner_layers), scale=lhs_mls,
        sides=(needs.INPUT_TOP, needs.THROUGH, needs.OPERATOR_NORMS, *RATIOS)),
    Row("eq35", "Eq. 35", lhs_eq35, rhs_eq35, DENSE_ALL, each=PAPER,
        sides=(needs.LAYER_TOPS, needs.LAYER_GRADIENTS, needs.WEIGHT_NORMS)),
    Row("eq37", "Eq. 37", lhs_eq37, rhs_eq37, DENSE_FIRST,
        not_applicable=why_no_eq37, first_layer=PAPER_AT_THE_INPUT,
        sides=(needs.SCALED_SUMS,)),
    Row("eq44", "Eq. 44", lhs_eq44, rhs_eq44, DENSE_FIRST, first_layer=PAPER_AT_THE_INPUT,
        sides=(needs.INPUT_INVARIANT, needs.ADAPTIVE)),
    Row("eq44_shared", "Eq. 44, shared weights", lhs_eq44_shared, rhs_eq44_shared,
        "the first layer's weight is a trainable parameter used once",
        not_applicable=why_no_eq44_shared, first_layer=(why_not_leaf,),
        sides=(needs.FIRST_INVARIANT, needs.ADAPTIVE)),
    Row("log_volume", "theory 3", lhs_log_volume, rhs_log_volume, DENSE_FIRST,
        first_layer=PAPER_AT_THE_INPUT, infinite=zero_input(first_layers, bias=True),
        logs=True, show_logs=True,
        sides=(needs.INPUT_SPECTRUM, *RATIOS)),
    LIPSCHITZ,
)  # fmt: skip
NAMES = tuple(row.name for row in TABLE)
