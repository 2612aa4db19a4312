"""Neural collapse (Papyan, Han and Donoho 2020): NC1 to NC4, from the Gram matrix of a cloud.

Notation: h_i are the features of sample i of class c_i, mu_c the class means, mu their mean, and C
the number of classes. In the limit of collapse NC1, NC2, NC3 and NC4 are all 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from flatlens.geometry.clouds import Array, Cloud

ROUNDING = 1e-12  # share of the largest singular value of the class means that counts as zero


@dataclass(frozen=True)
class Classes:
    """Class indices of all points; each index from 0 to C - 1 occurs.

    Attributes:
        labels: one class index per point.
        predicted: the class that the network predicts, or -1 if it is unknown.
    """

    labels: Int[Array, " n"]
    predicted: Int[Array, " n"]

    @property
    def weights(self) -> Float[Array, "C n"]:
        """The matrix W with mu_c = sum_i W_ci h_i."""
        one_hot = (self.labels[None, :] == np.unique(self.labels)[:, None]).astype(float)
        return one_hot / one_hot.sum(1, keepdims=True)

    def without(self, left_out: Int[Array, " k"]) -> Classes:
        """Return the labels without those of some points."""
        return Classes(np.delete(self.labels, left_out), np.delete(self.predicted, left_out))


def within_class_variability(cloud: Cloud, classes: Classes) -> float:
    """Return NC1 = Tr(S_W S_B^+) / C: the variance within classes, relative to that between them.

    S_W = (1/n) sum_i (h_i - mu_c)(h_i - mu_c)^T, S_B = (1/C) sum_c (mu_c - mu)(mu_c - mu)^T.
    """
    W = classes.weights
    C = len(W)
    centred_means = W - W.mean(0)  # rows mu_c - mu in terms of the points
    B = centred_means @ cloud.centred @ centred_means.T
    values, U = np.linalg.eigh(B)
    keep = values > ROUNDING * max(values[-1], 0.0)
    if C < 2 or not keep.any():
        return float("nan")
    # With the SVD M = U S V^T of the rows mu_c - mu: ||S^-1 V^T d||^2 = ||S^-2 U^T M d||^2.
    own_weights = W[np.searchsorted(np.unique(classes.labels), classes.labels)]
    deviations = np.eye(cloud.n) - own_weights  # rows h_i - mu_c(i)
    products = centred_means @ cloud.centred @ deviations.T  # M d_i
    scaled = (U[:, keep] / values[keep]).T @ products
    return float((scaled**2).sum(0).mean())


def equiangularity(cloud: Cloud, classes: Classes) -> tuple[float, float]:
    """Return NC2, the distance of the class means from a simplex with equal angles and norms.

    The first number is the mean over pairs of classes of |cos(mu_c - mu, mu_c' - mu) + 1/(C-1)|,
    the second the standard deviation of ||mu_c - mu|| divided by its mean.
    """
    W = classes.weights
    C = len(W)
    centred_means = W - W.mean(0)
    B = centred_means @ cloud.centred @ centred_means.T
    norms = np.sqrt(np.maximum(B.diagonal(), 0.0))
    if C < 2 or norms.min() <= 0:
        return float("nan"), float("nan")
    cosines = (B / np.outer(norms, norms))[~np.eye(C, dtype=bool)]
    return float(np.abs(cosines + 1 / (C - 1)).mean()), float(norms.std() / norms.mean())


def nearest_means(cloud: Cloud, classes: Classes) -> Int[Array, " n"]:
    """Return for each point the class whose mean is nearest."""
    W = classes.weights
    products = W @ cloud.centred  # <mu_c - m, h_i - m>
    sizes = np.einsum("cn,cn->c", products, W)  # ||mu_c - m||^2
    return np.unique(classes.labels)[(sizes[:, None] - 2 * products).argmin(0)]


def self_duality(
    points: Float[Tensor, "n D"], labels: Int[Array, " n"], weight: Float[Tensor, "C D"]
) -> float:
    """Return NC3 = ||W / ||W||_F - M / ||M||_F||_F^2 with the rows mu_c - mu in M.

    Args:
        points: features that enter the classifier.
        labels: their classes, 0 to C - 1, all of which occur.
        weight: the classifier's weight.
    """
    means = torch.stack(
        [points[torch.from_numpy(labels == c)].double().mean(0) for c in range(len(weight))]
    )
    M, W = means - means.mean(0), weight.detach().double().cpu()
    if not bool(M.any()) or not bool(W.any()):
        return float("nan")
    return float((W / W.norm() - M / M.norm()).square().sum())
