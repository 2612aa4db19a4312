"""Probe -> number: every quantity of the paper that one pass gives.

Each metric is a function of a Probe that returns the mean over samples; ``metric.samples(p)`` gives
the values it averages. Volumes are products of min(N, M) singular values: where one of them is zero
by the rank rule the volume is 0 and its logarithm -inf, never the product of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from flatlens.errors import FlatlensError
from flatlens.per_sample import mean_over_users, norm_per_sample, root_mean_weighted, used_by
from flatlens.probes import Array, InputProbe, LayerProbe, Probe


class Metric:
    """A mean over samples that also gives the samples."""

    def __init__(self, samples: Callable[..., Array]) -> None:
        self.samples = samples
        functools.update_wrapper(self, samples)

    def __call__(self, p: Probe, **options: Any) -> float:
        return float(self.samples(p, **options).mean())


@Metric
def sharpness(p: Probe) -> Float[Array, " n"]:
    """S = (1/n) sum_i ||grad_theta f(x_i)||_F^2 over all trainable parameters, Eq. 3.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2).double()
    >>> fl.sharpness(fl.probe(net, torch.ones(4, 3).double()))  # N (||x||^2 + 1)
    8.0
    """
    return np.sum([q.grad for q in p.parameters], axis=0) + np.zeros(p.n)


@Metric
def sharpness_untied(p: Probe) -> Float[Array, " n"]:
    """S with the weights untied per position: sum_p ||J_p||^2 (||u_p||^2 + 1), theory 4.1.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Conv1d(1, 1, 1, bias=False).double()
    >>> fl.sharpness_untied(fl.probe(net, torch.ones(1, 1, 5).double()))
    5.0
    """
    return np.sum([q.untied + q.untied_bias for q in p.layers], axis=0)


@Metric
def mls(p: Probe) -> Float[Array, " n"]:
    """Maximum local sensitivity: mean_i ||grad_x f(x_i)||_2, Def. 3.7.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(2, 2, bias=False).double()
    >>> _ = net.weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0])))
    >>> round(fl.mls(fl.probe(net, torch.ones(1, 2).double())), 9)
    3.0
    """
    return p.input.singular[:, 0]


@Metric
def nmls(p: Probe) -> Float[Array, " n"]:
    """Network MLS: the sum over measured layers of their MLS, Def. 3.9 (a sum, as in Eq. 12).

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)).double()
    >>> for q in net.parameters(): _ = torch.nn.init.constant_(q, 2.0)
    >>> fl.nmls(fl.probe(net, torch.ones(1, 1).double()))  # 4 + 2
    6.0
    """
    return np.sum([q.singular[:, 0] for q in p.layers], axis=0)


@Metric
def nmls_through(p: Probe) -> Float[Array, " n"]:
    """NMLS with the derivative through each layer alone (B in place of A), theory 1.

    >>> import torch, flatlens as fl
    >>> class Skip(torch.nn.Linear):
    ...     def forward(self, x): return x + super().forward(x)
    >>> net = Skip(1, 1).double()
    >>> _ = torch.nn.init.constant_(net.weight, 2.0)
    >>> p = fl.probe(net, torch.ones(1, 1).double())
    >>> fl.nmls(p), fl.nmls_through(p)
    (3.0, 2.0)
    """
    return np.sum([q.singular_through[:, 0] for q in p.layers], axis=0)


def log_products(singular: Float[Array, "n r"], top: int | None = None) -> Float[Array, " n"]:
    """log of the product of the first ``top`` singular values of each sample (default: all)."""
    if top is not None and not 1 <= top <= singular.shape[1]:
        raise FlatlensError(
            f"top={top} singular values were asked for, but there are {singular.shape[1]}"
        )
    with np.errstate(divide="ignore"):
        return np.log(singular[:, :top]).sum(1)


@Metric
def log_volume(p: Probe, top: int | None = None) -> Float[Array, " n"]:
    """mean_i log dVol_i, the log of Eq. 7; ``top=3`` is what the authors plotted.

    A sketched probe holds the first few singular values: without ``top`` it gives NaN.

    >>> import math, torch, flatlens as fl
    >>> net = torch.nn.Linear(2, 2, bias=False).double()
    >>> _ = net.weight.data.copy_(torch.diag(torch.tensor([3.0, 2.0])))
    >>> p = fl.probe(net, torch.ones(1, 2).double())
    >>> round(math.exp(fl.log_volume(p)), 9), round(math.exp(fl.log_volume(p, top=1)), 9)
    (6.0, 3.0)
    """
    singular = p.input.singular
    if top is not None and p.sketch is not None and p.sketch.converged:
        held = int((~np.isnan(singular)).any(0).sum())
        if held < top <= singular.shape[1]:
            raise FlatlensError(
                f"top={top} singular values were asked for, but this sketch holds {held}; make it "
                f"with sketch(..., top={top})"
            )
    return log_products(singular, top)


@Metric
def log_volume_top3(p: Probe) -> Float[Array, " n"]:
    """The same of the three largest singular values (or all, if fewer), as the authors plot it.

    >>> import math, torch, flatlens as fl
    >>> net = torch.nn.Linear(4, 4, bias=False).double()
    >>> _ = net.weight.data.copy_(torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0])))
    >>> round(math.exp(fl.measure(net, torch.ones(1, 4).double())["log_volume_top3"]), 9)
    6.0
    """
    return log_products(p.input.singular, min(3, p.input.singular.shape[1]))


@Metric
def volume(p: Probe) -> Float[Array, " n"]:
    """Mean local volumetric ratio, mean_i dVol_i, Def. 3.3.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 1, bias=False).double()
    >>> _ = torch.nn.init.constant_(net.weight, 3**-0.5)
    >>> round(fl.volume(fl.probe(net, torch.ones(1, 3).double())), 9)
    1.0
    """
    return np.exp(log_products(p.input.singular))


@Metric
def network_volume(p: Probe) -> Float[Array, " n"]:
    """Network volumetric ratio: the sum over layers of their mean dVol, Def. 3.5.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)).double()
    >>> for q in net.parameters(): _ = torch.nn.init.constant_(q, 2.0)
    >>> round(fl.network_volume(fl.probe(net, torch.ones(1, 1).double())), 9)
    6.0
    """
    return np.sum([np.exp(layer_log_volumes(q)) for q in p.layers], axis=0)


def layer_log_volumes(layer: LayerProbe) -> Float[Array, " n"]:
    """log dVol_il of each sample; -inf for samples that do not use the layer.

    Where samples have different numbers of positions, sample i has r_il = min(N, M_il) singular
    values of its own.
    """
    if layer.entries is None:
        return log_products(layer.singular)
    own = np.minimum(layer.entries, layer.singular.shape[1])
    places = np.arange(layer.singular.shape[1])
    logs = log_products(np.where(places < own[:, None], layer.singular, 1.0))
    return np.where(own > 0, logs, -np.inf)


def participation(singular: Float[Array, "n r"]) -> Float[Array, " n"]:
    """(sum s^2)^2 / sum s^4, and 0 where there is no direction at all."""
    top = singular[:, :1]
    relative = np.divide(singular, top, out=np.zeros_like(singular), where=top > 0) ** 2
    fourth = (relative**2).sum(1)
    return np.divide(relative.sum(1) ** 2, fourth, out=np.zeros(len(singular)), where=fourth > 0)


@Metric
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
    """The participation ratio, or its estimate."""
    return participation(part.singular) if part.dimension is None else part.dimension


@Metric
def normalized_mls(p: Probe) -> Float[Array, " n"]:
    """(1/n) sum_i ||x_i||^2 ||grad_x f||_2^2, Def. F.1.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(1, 1).double()
    >>> _ = torch.nn.init.constant_(net.weight, 3.0)
    >>> fl.normalized_mls(fl.probe(net, torch.full((1, 1), 2.0).double()))
    36.0
    """
    return p.input.x_norm**2 * p.input.singular[:, 0] ** 2


@Metric
def input_invariant_mls(p: Probe) -> Float[Array, " n"]:
    """(1/n) sum_i sum_p x_p^2 ||df/dx_p||^2, Def. E.3.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(2, 1).double()
    >>> _ = net.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    >>> fl.input_invariant_mls(fl.probe(net, torch.tensor([[3.0, 1.0]]).double()))  # 9 + 4
    13.0
    """
    return p.input.invariant


@Metric
def adaptive_sharpness(p: Probe) -> Float[Array, " n"]:
    """(1/n) sum_i sum_j theta_j^2 ||df/dtheta_j||^2: the Gauss-Newton form, Eq. 41.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(1, 1).double()
    >>> for q in net.parameters(): _ = torch.nn.init.constant_(q, 2.0)
    >>> fl.adaptive_sharpness(fl.probe(net, torch.full((1, 1), 3.0).double()))  # 4 * 9 + 4
    40.0
    """
    return np.sum([q.adaptive for q in p.parameters], axis=0) + np.zeros(p.n)


def harmonic_norm(layer: LayerProbe) -> float:
    """xbar_l = (mean_i 1/||x_i^l||^2)^(-1/2), Eq. 34; 0 where some input is zero."""
    with np.errstate(divide="ignore", over="ignore"):
        return float(np.mean(layer.x_norm**-2.0) ** -0.5)


def weighted_nmls(p: Probe) -> float:
    """sum_l xbar_l MLS_l, left-hand side of Eq. 35.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(1, 1).double()
    >>> _ = torch.nn.init.constant_(net.weight, 3.0)
    >>> round(fl.weighted_nmls(fl.probe(net, torch.full((1, 1), 2.0).double())), 9)
    6.0
    """
    return float(sum(harmonic_norm(q) * q.singular[:, 0].mean() for q in p.layers))


def matrix_normalized_sharpness(p: Probe) -> float:
    """sum_l sqrt(mean_i ||W_il||^2 ||grad_{W_il} f||_F^2), right-hand side of Eq. 35.

    Where all samples use the same weights it is sum_l ||W_l|| sqrt(mean_i ||grad_{W_l} f||_F^2).

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(1, 1).double()
    >>> _ = torch.nn.init.constant_(net.weight, 3.0)
    >>> round(fl.matrix_normalized_sharpness(fl.probe(net, torch.full((1, 1), 2.0).double())), 9)
    6.0
    """
    return float(sum(root_mean_weighted(norm_per_sample(q), q.grad_weight) for q in p.layers))


METRICS: dict[str, Callable[..., float]] = {
    "sharpness": sharpness,
    "sharpness_untied": sharpness_untied,
    "adaptive_sharpness": adaptive_sharpness,
    "matrix_normalized_sharpness": matrix_normalized_sharpness,
    "mls": mls,
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


def calls(p: Probe, layer: LayerProbe) -> list[LayerProbe]:
    """The calls whose positions ``grad_weight`` adds up; none where that is not known.

    A parameter that several calls use has one gradient, in which they may cancel. What it gets from
    uses that are no calls, or from calls that read it in unlike ways, cannot be told apart.
    """
    if layer.weight is None:  # computed: a weight of this call alone
        return [layer]
    path = next(q.path for q in p.parameters if q.name == layer.weight)
    found = [q for q in p.layers if q.weight == layer.weight]
    return [] if path == "slow" or (path == "frozen" and len(found) > 1) else found


def layer_row(p: Probe, layer: LayerProbe) -> dict[str, Any]:
    """One layer's numbers, means over the samples that use it, as a row of a table.

    ``samples`` counts these samples. ``norm`` is the mean of their norms ||W_il||.

    ``sharpness`` and ``adaptive_sharpness`` are those of the layer's parameters, all uses together:
    rows that share a parameter repeat its share of S and do not add up. So is ``sharing_ratio``,
    with the positions of all calls; NaN where the parameter has uses that are no such calls.
    """
    mean = functools.partial(mean_over_users, layer)
    tied = mean(layer.grad_weight)
    untied = sum(mean(q.untied) for q in calls(p, layer))
    return {
        "name": layer.name,
        "kind": layer.kind,
        "weight": layer.weight,
        "positions": layer.positions,
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "norm": mean_norm(layer),
        "x_norm": mean(layer.x_norm),
        "mls": mean(layer.singular[:, 0]),
        "mls_through": mean(layer.singular_through[:, 0]),
        "log_volume": mean(layer_log_volumes(layer)),
        "local_dimension": mean(dimension(layer)),
        "sharpness": tied + mean(layer.grad_bias),
        "adaptive_sharpness": mean(layer.adaptive),
        "sharpness_untied": mean(layer.untied) + mean(layer.untied_bias),
        "sharing_ratio": tied / untied if untied > 0 else float("nan"),
        "bypass": float(layer.bypass.max()),
        "samples": int(used_by(layer).sum()),
    }


def mean_norm(layer: LayerProbe) -> float:
    """mean_i ||W_il|| over the samples that use the layer."""
    return layer.norm if layer.norm_i is None else mean_over_users(layer, layer.norm_i)
