"""Quantities of the paper as functions of a probe.

Each metric takes a Probe and returns the mean over samples; ``metric.samples(p)`` returns the
values that it averages, and ``metric.needs`` names what it needs of a pass. Volumes are products of
min(N, M) singular values. If one of them is zero by the rank rule, the volume is 0 and its
logarithm is -inf.

To add a quantity, write its function here with what it needs, and add it to ``METRICS``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from flatlens.arguments import check_instance, check_integer, no_type_check
from flatlens.errors import FlatlensError
from flatlens.passes.needs import (
    ADAPTIVE,
    GRADIENTS,
    INPUT_INVARIANT,
    INPUT_SPECTRUM,
    INPUT_TOP,
    LAYER_GRADIENTS,
    LAYER_SPECTRA,
    LAYER_TOPS,
    THROUGH,
    UNTIED,
    WEIGHT_NORMS,
    missing,
    not_asked_for,
)
from flatlens.per_sample import norm_per_sample, root_mean_weighted, where_used
from flatlens.probes import Array, InputProbe, LayerProbe, Probe

A_PROBE = "a Probe: give fl.probe(model, x), or m.probe of a measurement"


@no_type_check
def check_asked_for(name: str, p: Probe, needs: frozenset[str]) -> None:
    """Raise if ``p`` is not a probe, or if its pass did not compute what a quantity needs."""
    check_instance("p", p, Probe, f"{name} takes {A_PROBE}")
    if names := missing(needs, p.asked):
        raise FlatlensError(f"{not_asked_for(names)}; add {name} to quantities")


class Metric:
    """A quantity that is a mean over samples and can also return the samples' values."""

    __name__: str

    def __init__(self, samples: Callable[..., Array], needs: frozenset[str]) -> None:
        self.samples = samples
        self.needs = needs
        functools.update_wrapper(self, samples)

    @no_type_check
    def __call__(self, p: Probe, **options: Any) -> float:
        """Return the mean over samples."""
        check_asked_for(self.__name__, p, self.needs)
        return float(self.samples(p, **options).mean())


class Total:
    """A quantity that is not a mean over samples."""

    __name__: str

    def __init__(self, function: Callable[[Probe], float], needs: frozenset[str]) -> None:
        self.function = function
        self.needs = needs
        functools.update_wrapper(self, function)

    @no_type_check
    def __call__(self, p: Probe) -> float:
        """Return the value."""
        check_asked_for(self.__name__, p, self.needs)
        return self.function(p)


def metric(*needs: str) -> Callable[[Callable[..., Array]], Metric]:
    """Declare a function of a Probe that returns one value per sample as a metric."""
    return lambda samples: Metric(samples, frozenset(needs))


def total(*needs: str) -> Callable[[Callable[[Probe], float]], Total]:
    """Declare a function of a Probe that returns one number as a quantity."""
    return lambda function: Total(function, frozenset(needs))


@metric(GRADIENTS)
def sharpness(p: Probe) -> Float[Array, " n"]:
    """Sharpness S = (1/n) sum_i ||grad_theta f(x_i)||_F^2 over all trainable parameters, Eq. 3.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2).double()
    >>> fl.sharpness(fl.probe(net, torch.ones(4, 3).double()))  # N (||x||^2 + 1)
    8.0
    """
    return np.sum([q.grad for q in p.parameters], axis=0) + np.zeros(p.n)


@metric(UNTIED)
def sharpness_untied(p: Probe) -> Float[Array, " n"]:
    """Sharpness of the measured layers with their weights untied per position.

    The mean over samples of sum_l sum_p ||J_p||_F^2 (||u_p||^2 + 1), docs/theory.md section 4.1.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Conv1d(1, 1, 1, bias=False).double()
    >>> fl.sharpness_untied(fl.probe(net, torch.ones(1, 1, 5).double()))
    5.0
    """
    return _over_layers(p, lambda q: q.untied + q.untied_bias)


@metric(INPUT_TOP)
def mls(p: Probe) -> Float[Array, " n"]:
    """Maximum local sensitivity: mean_i ||grad_x f(x_i)||_2, Def. 3.7.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(2, 2, bias=False).double()
    >>> _ = net.weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0])))
    >>> round(fl.mls(fl.probe(net, torch.ones(1, 2).double())), 9)
    3.0
    """
    return p.input.singular[:, 0]


@total(INPUT_TOP)
def max_sensitivity(p: Probe) -> float:
    """Largest sensitivity of all samples, max_i ||grad_x f(x_i)||_2.

    It is a lower bound of the Lipschitz constant of f (docs/theory.md section 8).

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()).double()
    >>> for q in net.parameters(): _ = torch.nn.init.constant_(q, 2.0)
    >>> fl.measure(net, torch.tensor([[3.0], [-5.0]]).double())["max_sensitivity"]
    2.0
    """
    return float(p.input.singular[:, 0].max())


@metric(LAYER_TOPS)
def nmls(p: Probe) -> Float[Array, " n"]:
    """Network maximum local sensitivity: the sum of MLS over measured layers, Def. 3.9.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)).double()
    >>> for q in net.parameters(): _ = torch.nn.init.constant_(q, 2.0)
    >>> fl.nmls(fl.probe(net, torch.ones(1, 1).double()))  # 4 + 2
    6.0
    """
    return _over_layers(p, lambda q: q.singular[:, 0])


@metric(LAYER_TOPS, THROUGH)
def nmls_through(p: Probe) -> Float[Array, " n"]:
    """Network maximum local sensitivity with the derivative through each layer alone.

    B stands in place of A, docs/theory.md section 1.

    >>> import torch, flatlens as fl
    >>> class Skip(torch.nn.Linear):
    ...     def forward(self, x): return x + super().forward(x)
    >>> net = Skip(1, 1).double()
    >>> _ = torch.nn.init.constant_(net.weight, 2.0)
    >>> p = fl.probe(net, torch.ones(1, 1).double())
    >>> fl.nmls(p), fl.nmls_through(p)
    (3.0, 2.0)
    """
    return _over_layers(p, lambda q: q.singular_through[:, 0])


def log_products(singular: Float[Array, "n r"], top: int | None = None) -> Float[Array, " n"]:
    """Return the log of the product of each sample's ``top`` largest singular values (or all)."""
    if top is not None and not 1 <= top <= singular.shape[1]:
        raise FlatlensError(
            f"top={top} singular values were asked for, but there are {singular.shape[1]}"
        )
    with np.errstate(divide="ignore"):
        return np.log(singular[:, :top]).sum(1)


@metric(INPUT_SPECTRUM)
@no_type_check
def log_volume(p: Probe, top: int | None = None) -> Float[Array, " n"]:
    """Mean log volume, mean_i log dVol_i, the log of Eq. 7; ``top=3`` is what the authors plotted.

    A sketched probe holds the first few singular values only: without ``top`` the result is NaN.

    Args:
        p: the probe.
        top: number of largest singular values in the product; None takes all of them.

    Raises:
        FlatlensError: if there are fewer than ``top`` singular values.

    >>> import math, torch, flatlens as fl
    >>> net = torch.nn.Linear(2, 2, bias=False).double()
    >>> _ = net.weight.data.copy_(torch.diag(torch.tensor([3.0, 2.0])))
    >>> p = fl.probe(net, torch.ones(1, 2).double())
    >>> round(math.exp(fl.log_volume(p)), 9), round(math.exp(fl.log_volume(p, top=1)), 9)
    (6.0, 3.0)
    """
    check_integer("top", top)
    singular = p.input.singular
    if top is not None and p.sketch is not None and p.sketch.converged:
        held = int((~np.isnan(singular)).any(0).sum())
        if held < top <= singular.shape[1]:
            raise FlatlensError(
                f"top={top} singular values were asked for, but this sketch holds {held}; make it "
                f"with sketch(..., top={top})"
            )
    return log_products(singular, top)


@metric(INPUT_SPECTRUM)
def log_volume_top3(p: Probe) -> Float[Array, " n"]:
    """Mean log volume of the three largest singular values (all of them, if there are fewer).

    The authors plot this form.

    >>> import math, torch, flatlens as fl
    >>> net = torch.nn.Linear(4, 4, bias=False).double()
    >>> _ = net.weight.data.copy_(torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0])))
    >>> round(math.exp(fl.measure(net, torch.ones(1, 4).double())["log_volume_top3"]), 9)
    6.0
    """
    return log_products(p.input.singular, min(3, p.input.singular.shape[1]))


@metric(INPUT_SPECTRUM)
def volume(p: Probe) -> Float[Array, " n"]:
    """Mean local volumetric ratio, mean_i dVol_i, Def. 3.3.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 1, bias=False).double()
    >>> _ = torch.nn.init.constant_(net.weight, 3**-0.5)
    >>> round(fl.volume(fl.probe(net, torch.ones(1, 3).double())), 9)
    1.0
    """
    return _exp(log_products(p.input.singular))


@metric(LAYER_SPECTRA)
def network_volume(p: Probe) -> Float[Array, " n"]:
    """Network volumetric ratio: the sum over layers of their mean dVol, Def. 3.5.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)).double()
    >>> for q in net.parameters(): _ = torch.nn.init.constant_(q, 2.0)
    >>> round(fl.network_volume(fl.probe(net, torch.ones(1, 1).double())), 9)
    6.0
    """
    return _over_layers(p, lambda q: _exp(layer_log_volumes(q)))


def layer_log_volumes(layer: LayerProbe) -> Float[Array, " n"]:
    """Return log dVol_il of each sample; -inf for samples that do not use the layer.

    If samples have different numbers of positions, sample i has r_il = min(N, M_il) singular
    values.
    """
    if layer.entries is None:
        return log_products(layer.singular)
    ranks = np.minimum(layer.entries, layer.singular.shape[1])
    places = np.arange(layer.singular.shape[1])
    logs = log_products(np.where(places < ranks[:, None], layer.singular, 1.0))
    return np.where(ranks > 0, logs, -np.inf)


def participation(singular: Float[Array, "n r"]) -> Float[Array, " n"]:
    """Return (sum s^2)^2 / sum s^4 per sample.

    It is 0 if all singular values are 0, and NaN if one of them is unknown.
    """
    top = singular[:, :1]
    relative = np.divide(singular, top, out=np.zeros_like(singular), where=top != 0) ** 2
    fourth = (relative**2).sum(1)
    return np.divide(relative.sum(1) ** 2, fourth, out=np.zeros(len(singular)), where=fourth != 0)


@metric(INPUT_SPECTRUM)
def local_dimension(p: Probe) -> Float[Array, " n"]:
    """Mean participation ratio of the output's local covariance, Eq. 15.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(4, 3, bias=False).double()
    >>> _ = torch.nn.init.eye_(net.weight)
    >>> round(fl.local_dimension(fl.probe(net, torch.ones(1, 4).double())), 9)
    3.0
    """
    return dimension(p.input)


def dimension(part: InputProbe | LayerProbe) -> Float[Array, " n"]:
    """Return the participation ratio of each sample, or its estimate in a sketch."""
    return participation(part.singular) if part.dimension is None else part.dimension


@metric(INPUT_TOP)
def normalized_mls(p: Probe) -> Float[Array, " n"]:
    """Normalised maximum local sensitivity, (1/n) sum_i ||x_i||^2 ||grad_x f||_2^2, Def. F.1.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(1, 1).double()
    >>> _ = torch.nn.init.constant_(net.weight, 3.0)
    >>> fl.normalized_mls(fl.probe(net, torch.full((1, 1), 2.0).double()))
    36.0
    """
    return p.input.x_norm**2 * p.input.singular[:, 0] ** 2


@metric(INPUT_INVARIANT)
def input_invariant_mls(p: Probe) -> Float[Array, " n"]:
    """Input-invariant sensitivity, (1/n) sum_i sum_p x_p^2 ||df/dx_p||^2, Def. E.3.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(2, 1).double()
    >>> _ = net.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    >>> fl.input_invariant_mls(fl.probe(net, torch.tensor([[3.0, 1.0]]).double()))  # 9 + 4
    13.0
    """
    return p.input.invariant


@metric(ADAPTIVE)
def adaptive_sharpness(p: Probe) -> Float[Array, " n"]:
    """Adaptive sharpness, (1/n) sum_i sum_j theta_j^2 ||df/dtheta_j||^2, Eq. 41.

    This is the Gauss-Newton form.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(1, 1).double()
    >>> for q in net.parameters(): _ = torch.nn.init.constant_(q, 2.0)
    >>> fl.adaptive_sharpness(fl.probe(net, torch.full((1, 1), 3.0).double()))  # 4 * 9 + 4
    40.0
    """
    return np.sum([q.adaptive for q in p.parameters], axis=0) + np.zeros(p.n)


def harmonic_norm(layer: LayerProbe) -> float:
    """Return xbar_l = (mean_i 1/||x_i^l||^2)^(-1/2), Eq. 34; 0 if some input is zero."""
    with np.errstate(divide="ignore", over="ignore"):
        return float(np.mean(where_used(layer, layer.x_norm**-2.0)) ** -0.5)


@total(LAYER_TOPS)
def weighted_nmls(p: Probe) -> float:
    """Weighted network sensitivity, sum_l xbar_l MLS_l: the left-hand side of Eq. 35.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(1, 1).double()
    >>> _ = torch.nn.init.constant_(net.weight, 3.0)
    >>> round(fl.weighted_nmls(fl.probe(net, torch.full((1, 1), 2.0).double())), 9)
    6.0
    """
    if not p.layers:
        return float("nan")
    return float(sum(harmonic_norm(q) * where_used(q, q.singular[:, 0]).mean() for q in p.layers))


@total(LAYER_GRADIENTS, WEIGHT_NORMS)
def matrix_normalized_sharpness(p: Probe) -> float:
    """Matrix-normalised sharpness, sum_l sqrt(mean_i ||W_il||^2 ||grad_{W_l} f||_F^2).

    It is the right-hand side of Eq. 35.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(1, 1).double()
    >>> _ = torch.nn.init.constant_(net.weight, 3.0)
    >>> round(fl.matrix_normalized_sharpness(fl.probe(net, torch.full((1, 1), 2.0).double())), 9)
    6.0
    """
    if not p.layers:
        return float("nan")
    return float(
        sum(root_mean_weighted(norm_per_sample(q), where_used(q, q.grad_weight)) for q in p.layers)
    )


METRICS: dict[str, Metric | Total] = {
    "sharpness": sharpness,
    "sharpness_untied": sharpness_untied,
    "adaptive_sharpness": adaptive_sharpness,
    "matrix_normalized_sharpness": matrix_normalized_sharpness,
    "mls": mls,
    "max_sensitivity": max_sensitivity,
    "nmls": nmls,
    "nmls_through": nmls_through,
    "weighted_nmls": weighted_nmls,
    "normalized_mls": normalized_mls,
    "input_invariant_mls": input_invariant_mls,
    "volume": volume,
    "log_volume": log_volume,
    "log_volume_top3": log_volume_top3,
    "network_volume": network_volume,
    "local_dimension": local_dimension,
}


# The headline set: small, cheap, and what loggers get. Two of its names are inequalities.
HEADLINE = (
    *("sharpness", "mls", "nmls", "log_volume", "local_dimension", "normalized_mls"),
    *("eq11", "eq12"),
)


def _exp(logs: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return exp(logs); a volume beyond the range of float64 is inf."""
    with np.errstate(over="ignore"):
        return np.exp(logs)


def _over_layers(p: Probe, column: Callable[[LayerProbe], Array]) -> Float[Array, " n"]:
    """Sum a column over the layers that each sample uses; NaN if no layer is measured."""
    if not p.layers:
        return np.full(p.n, np.nan)
    return np.sum([where_used(q, column(q)) for q in p.layers], axis=0) + np.zeros(p.n)
