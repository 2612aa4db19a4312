"""Statistics of one cloud of points, computed from its Gram matrix.

A cloud is n points h_i in R^D. ``Cloud`` holds the inner products of the centred points and of
their mean. These are n x n numbers for any D, so points with many entries need not be stored. To
leave out samples, as the jackknife does, it leaves out rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

Array = np.ndarray
BLOCK = 1 << 22  # entries that are widened to float64 at a time
DISCARDED = 0.1  # share of the largest ratios that TwoNN leaves out, as its authors do


@dataclass(frozen=True)
class Cloud:
    """Inner products of n points.

    Attributes:
        centred: <h_i - m, h_j - m> with the mean m of all points.
        along_mean: <h_i - m, m>.
        mean_square: ||m||^2.
        points: the points themselves if they have fewer than n entries, else None. Their singular
            values then come from the smaller matrix D x D.
    """

    centred: Float[Array, "n n"]
    along_mean: Float[Array, " n"]
    mean_square: float
    points: Float[Array, "n D"] | None = None

    @classmethod
    def of(cls, points: Float[Tensor, "n D"]) -> Cloud:
        """Take the inner products of some points, in float64."""
        n, D = points.shape
        K = np.zeros((n, n))
        along, square = np.zeros(n), 0.0
        for block in points.split(max(1, BLOCK // n), 1):
            wide = block.double()
            mean = wide.mean(0)
            rest = wide - mean
            K += (rest @ rest.mT).cpu().numpy()
            along += (rest @ mean).cpu().numpy()
            square += float(mean.square().sum())
        return cls(K, along, square, points.double().cpu().numpy() if n > D else None)

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.centred)

    def without(self, left_out: Int[Array, " k"]) -> Cloud:
        """Return the cloud without some points, centred at the mean of the others."""
        stay = np.setdiff1d(np.arange(self.n), left_out)
        K, along = self.centred[np.ix_(stay, stay)], self.along_mean[stay]
        shift = K.mean(0)  # <h_i - m, m' - m> with the new mean m'
        size = shift.mean()
        centred = K - shift[:, None] - shift[None, :] + size
        new_along = along - along.mean() + shift - size
        square = float(self.mean_square + 2 * along.mean() + size)
        return Cloud(centred, new_along, square, None if self.points is None else self.points[stay])

    def uncentred(self) -> Float[Array, "n n"]:
        """Return <h_i, h_j>."""
        along = self.along_mean
        return self.centred + along[:, None] + along[None, :] + self.mean_square

    def squared_distances(self) -> Float[Array, "n n"]:
        """Return ||h_i - h_j||^2."""
        square = self.centred.diagonal()
        return np.maximum(square[:, None] + square[None, :] - 2 * self.centred, 0.0)


def participation_ratio(cloud: Cloud) -> float:
    """Return (Tr C)^2 / Tr C^2 of the covariance C of the points.

    It is the number of principal directions that share the variance (Gao et al. 2017): 1 on a line,
    D for a ball. With n points it is at most n - 1.

    >>> import torch
    >>> points = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> participation_ratio(Cloud.of(points))
    2.0
    """
    squares = float((cloud.centred**2).sum())
    return float(np.trace(cloud.centred)) ** 2 / squares if squares > 0 else float("nan")


def effective_rank(cloud: Cloud) -> float:
    """Return exp(entropy) of the singular values of the matrix of all points, without centring.

    With p_k = sigma_k / sum sigma this is Roy and Vetterli's effective rank (2007), which Garrido
    et al. (2023) call RankMe and use to rank representations without labels.

    >>> import torch
    >>> round(effective_rank(Cloud.of(torch.eye(3))), 9)
    3.0
    """
    points = cloud.points
    values = np.linalg.eigvalsh(cloud.uncentred() if points is None else points.T @ points)
    values = values[values > 1e-14 * len(values) * max(values[-1], 0.0)]
    if not len(values):
        return float("nan")
    p = np.sqrt(values) / np.sqrt(values).sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def intrinsic_dimension(cloud: Cloud) -> float:
    """Return the TwoNN estimate of the intrinsic dimension (Facco et al. 2017).

    Let mu be the ratio of the distances to the second and to the first neighbour. If the density is
    constant over both, its distribution is F(mu) = 1 - mu^-d. The slope d of -log(1 - F) over log
    mu is fitted through the origin. The largest tenth of the ratios is left out, and so are points
    that coincide with another point.

    >>> import torch
    >>> angle = torch.linspace(0, 6, 400, dtype=torch.float64) ** 1.1
    >>> circle = torch.stack([angle.cos(), angle.sin(), 0 * angle], 1)
    >>> 0.5 < intrinsic_dimension(Cloud.of(circle)) < 2.5
    True
    """
    distances = cloud.squared_distances()
    np.fill_diagonal(distances, np.inf)
    rounding = 1e-13 * max(float(np.trace(cloud.centred)), 0.0) / cloud.n
    distances[distances <= rounding] = np.inf
    if cloud.n < 4:
        return float("nan")
    two = np.sqrt(np.partition(distances, 1, axis=1)[:, :2])
    two = two[np.isfinite(two).all(1)]
    ratios = np.sort(two[:, 1] / two[:, 0])
    used = int(len(ratios) * (1 - DISCARDED))
    if used < 3:
        return float("nan")
    shares = np.arange(1, len(ratios) + 1) / len(ratios)
    log_ratio, height = np.log(ratios[:used]), -np.log(1 - shares[:used])
    return float((log_ratio * height).sum() / (log_ratio**2).sum())
