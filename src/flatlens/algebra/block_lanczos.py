"""Several largest eigenvalues of one symmetric operator, and its spectral density, from products.

``top_eigenvalues`` is block Lanczos with restarts; ``spectral_density`` is stochastic Lanczos
quadrature (Ubaru, Chen and Saad 2017). Both stand on :class:`flatlens.algebra.lanczos.Krylov`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.lanczos import Krylov, Product, random_vector

Array = np.ndarray
BLOCK = 8  # start vectors; a repeated eigenvalue is found up to BLOCK times


class TopEigenvalues(NamedTuple):
    """Eigenvalues, descending, with residuals, vectors as rows, and the number of products."""

    values: Float[Tensor, " k"]
    residuals: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n"]
    products: int


def top_eigenvalues(
    product: Product,
    like: Float[Tensor, " n"],
    top: int,
    *,
    rtol: float,
    max_products: int,
    room: int,
    seed: int = 0,
) -> TopEigenvalues:
    """Find the ``top`` largest eigenvalues of a symmetric operator.

    Some eigenvalue lies within each residual ||A v - theta v|| of its value. A larger one is missed
    only if the random start vectors have no part along its eigenvector.

    Args:
        product: rows [1, n] -> rows A v.
        like: a vector of the right size, type and device.
        top: number of eigenvalues.
        rtol: every residual should be at most this share of the largest eigenvalue.
        max_products: most products.
        room: basis vectors that fit the memory. A full basis starts anew at its best vectors.
        seed: of the start vectors.

    Returns:
        The eigenvalues, their residuals and vectors.

    >>> A = torch.diag(torch.tensor([5.0, 5.0, 1.0, 0.5, 0.1], dtype=torch.float64))
    >>> result = top_eigenvalues(lambda V: V @ A, A[0], 3, rtol=1e-9, max_products=9, room=9)
    >>> [round(v, 6) for v in result.values.tolist()]
    [5.0, 5.0, 1.0]
    """
    n = len(like)
    top = min(top, n)
    width = min(BLOCK, n)
    start = [random_vector(like[None], seed + k) for k in range(width)]
    room = min(n, max(room, 2 * top, top + width))
    used = 0
    while True:
        space = Krylov(product, start, room)
        while True:
            before = space.steps
            space.extend()
            used += space.steps - before
            theta, coordinates, residuals = (t[0] for t in space.ritz(min(top, space.steps)))
            enough = len(theta) == top or space.steps == n
            small = bool((residuals <= rtol * theta[0].abs()).all())
            full = space.steps + width > space.basis.shape[1] or used + width > max_products
            if (enough and small) or full or space.steps == n:
                break
        vectors = coordinates.mT.to(like) @ space.basis[0, : space.steps]
        if (enough and small) or used + width > max_products or space.steps == n:
            return TopEigenvalues(theta, residuals, vectors, used)
        start = [v[None] for v in vectors]
        width = len(start)


@dataclass(frozen=True)
class SpectralDensity:
    """The density of eigenvalues, estimated from random vectors.

    Attributes:
        nodes: eigenvalues of each vector's Lanczos matrix, one row per random vector.
        weights: how many eigenvalues each node stands for; a row sums to about the size of the
            operator minus the known eigenvalues.
        known: eigenvalues that are counted exactly: the random vectors are orthogonal to theirs.
    """

    nodes: Float[Array, "v m"]
    weights: Float[Array, "v m"]
    known: Float[Array, " k"]

    def sum_of(self, function: Callable[[Array], Array]) -> tuple[float, float]:
        """Estimate the sum of a function over all eigenvalues, with its standard error.

        The error is that of the random vectors. The quadrature itself is exact for polynomials of
        degree below twice the number of Lanczos steps.
        """
        values = np.where(self.weights > 0, function(self.nodes) * self.weights, 0.0).sum(1)
        known = float(function(self.known).sum())
        return known + float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)

    def count_above(self, threshold: float) -> tuple[float, float]:
        """Estimate how many eigenvalues exceed a threshold, with its standard error."""
        return self.sum_of(lambda values: (values > threshold).astype(float))


def spectral_density(
    product: Product,
    like: Float[Tensor, " n"],
    known: TopEigenvalues,
    *,
    vectors: int,
    steps: int,
    seed: int,
) -> SpectralDensity:
    """Estimate the density of the eigenvalues beyond the known ones.

    Draw a vector z of random signs and make it orthogonal to the known eigenvectors. On average z^T
    p(A) z is the sum of p over the other eigenvalues. Lanczos from z turns this into nodes and
    weights.

    Args:
        product: rows [1, n] -> rows A v.
        like: a vector of the right size, type and device.
        known: eigenvalues and vectors that are counted exactly.
        vectors: number of random vectors, at least two.
        steps: Lanczos steps for each.
        seed: of the random vectors.

    Returns:
        Nodes and weights.
    """
    n, Q = len(like), known.vectors
    generator = torch.Generator().manual_seed(seed)
    steps = max(1, min(steps, n - len(Q)))
    nodes, weights = np.zeros((vectors, steps)), np.zeros((vectors, steps))

    def off(v: Tensor) -> Tensor:
        for _ in range(2):
            v = v - (v @ Q.mT) @ Q
        return v

    for row in range(vectors):
        signs = torch.randint(0, 2, (1, n), generator=generator, device="cpu") * 2 - 1
        z = off(signs.to(like))
        size = float(z.double().square().sum())
        if size <= 1e-20 * n:  # the known vectors span everything
            continue
        space = Krylov(lambda v: off(product(off(v))), [z], steps)
        for _ in range(steps):
            space.extend()
            scale = float(space.T[0].abs().max())
            if float(space.fresh[0].double().norm()) <= 64 * torch.finfo(like.dtype).eps * scale:
                break  # an invariant space: the quadrature is exact
        T = space.T[0, : space.steps, : space.steps]
        values, coordinates = torch.linalg.eigh(T)
        nodes[row, : space.steps] = values.clamp(min=0).cpu().numpy()
        weights[row, : space.steps] = size * coordinates[0].square().cpu().numpy()
    return SpectralDensity(nodes, weights, known.values.double().cpu().numpy())
