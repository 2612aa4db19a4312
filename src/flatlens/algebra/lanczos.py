"""The Lanczos iteration that finds extreme eigenvalues from products alone.

:class:`Krylov` extends a Krylov space block by block, for many operators at once. Two users read
it: ``top_singular`` (singular values of every sample's Jacobian) and ``top_eigenvalue`` (a
Hessian). Each value comes with the residual of its Ritz pair: some eigenvalue lies within the
residual of the Ritz value, and Ritz values never exceed the largest eigenvalue. The norm of a layer
needs an upper end as well, and no basis: see ``certified_norm``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flatlens.algebra import looks

Product = Callable[[Tensor], Tensor]


class Krylov:
    """The Krylov space of b symmetric operators of size n, grown from a block of start vectors.

    Every new vector is orthogonalised against all earlier ones. The coefficients are float64.

    Attributes:
        basis: orthonormal vectors by operator, [b, room, n]; the first ``steps`` are in use.
        T: the operator in this basis, [b, room, room].
        steps: number of basis vectors in use.
        last_block: where the last block begins.
        fresh: what the operator adds to the space beyond the basis, one vector per last block's.
    """

    def __init__(self, product: Product, start: list[Float[Tensor, "b n"]], room: int) -> None:
        b, n = start[0].shape
        self.product = product
        self.basis = start[0].new_zeros(b, min(max(room, len(start)), n), n)
        width = self.basis.shape[1]
        self.T = start[0].new_zeros(b, width, width, dtype=torch.float64)
        self.steps, self.last_block, self.fresh = 0, 0, list(start)

    def extend(self) -> None:
        """Add a block: orthonormalise the fresh vectors and multiply them by the operator."""
        n = self.basis.shape[2]
        eps = torch.finfo(self.basis.dtype).eps
        noise = 64 * eps * self.T.abs().amax((1, 2))
        self.last_block, self.steps = self.steps, min(self.steps + len(self.fresh), n)
        for j in range(self.last_block, self.steps):
            v = _orthogonal(self.fresh[j - self.last_block], self.basis[:, :j])
            # Where only rounding is left the basis spans an invariant space; a random vector leads
            # out of it.
            lost = v.double().norm(dim=1) <= noise
            if not looks.can_look(lost) or bool(lost.any()):
                other = _orthogonal(random_vector(v, n + j), self.basis[:, :j])
                v = torch.where(lost[:, None], other, v)
            wide = v.double()  # in float32 the norm of a small or large vector is 0 or infinite
            self.basis[:, j] = wide / wide.norm(dim=1, keepdim=True)
        known = self.basis[:, : self.steps]
        for j in range(self.last_block, self.steps):
            w = self.product(self.basis[:, j])
            coefficients = (known.double() @ w.double()[..., None]).squeeze(-1)
            self.T[:, j, : self.steps] = self.T[:, : self.steps, j] = coefficients
            self.fresh[j - self.last_block] = _orthogonal(w, known)

    def ritz(self, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ``top`` largest Ritz values (descending), their vectors and residuals.

        The vectors are coordinates in the basis, [b, steps, top].
        """
        values, vectors = torch.linalg.eigh(self.T[:, : self.steps, : self.steps])
        vectors = vectors[..., -top:].flip(-1)
        fresh = torch.stack(self.fresh[: self.steps - self.last_block], 2).double()
        residual = (fresh @ vectors[:, self.last_block :]).norm(dim=1)
        complete = self.steps == self.basis.shape[2]
        return values[:, -top:].flip(-1), vectors, residual * (not complete)


class Top(NamedTuple):
    """Singular values, descending, and whether each met the tolerance.

    The square of some singular value lies within ``residual`` of the square of the value.
    """

    values: Float[Tensor, "b k"]
    converged: Bool[Tensor, "b k"]
    steps: int
    residual: Float[Tensor, "b k"]


def top_singular(
    gram: Product,
    start: Float[Tensor, "b n"],
    top: int = 1,
    tolerance: float = 1e-4,
    max_steps: int = 100,
) -> Top:
    """Find the ``top`` largest singular values of b operators from v -> A A^T v on [b, n].

    The iteration starts from ``top`` vectors. From a single vector it would find a repeated value
    only once. Values repeat, for example, where equal tokens each have an output of their own.

    Args:
        gram: the product with A A^T, for all operators at once.
        start: a start vector for each operator.
        top: number of singular values.
        tolerance: largest residual, relative to sigma_1^2. Then sigma is off by at most half of it,
            and as a rule by its square.
        max_steps: most products.

    Returns:
        The values, whether each converged, the number of products, and the residuals.

    >>> A = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64)).expand(2, 8, 8)
    >>> v = torch.linspace(1, 2, 8, dtype=torch.float64).expand(2, 8)
    >>> result = top_singular(lambda v: (A @ (A.mT @ v[..., None]))[..., 0], v, top=2)
    >>> result.values[0].round(decimals=6).tolist(), bool(result.converged.all())
    ([8.0, 7.0], True)
    """
    n, eps = start.shape[1], torch.finfo(start.dtype).eps
    top = min(top, n)
    block = [start, *(random_vector(start, seed) for seed in range(1, top))]
    space = Krylov(gram, block, max_steps)
    while True:
        space.extend()
        theta, _, residual = space.ritz(top)
        theta = theta.clamp(min=0)
        converged = residual <= (tolerance + 64 * eps) * theta[:, :1]
        out_of_steps = min(space.steps + top, n) > max_steps
        if bool(converged.all()) or space.steps == n or out_of_steps:
            return Top(theta.sqrt(), converged, space.steps, residual)


class TopEigenvalue(NamedTuple):
    """An eigenvalue with its certificate: an eigenvalue lies within ``residual`` of ``value``."""

    value: float
    residual: float
    converged: bool
    products: int


def top_eigenvalue(
    product: Product, start: Float[Tensor, " n"], *, rtol: float, max_products: int, room: int
) -> TopEigenvalue:
    """Find the largest eigenvalue of one symmetric operator, with the residual of its vector.

    With a unit vector v and theta = v^T A v, an eigenvalue lies within ||A v - theta v|| of theta.
    It is the largest one unless the random start has no part along the largest one's vector.

    Args:
        product: rows [k, n] -> rows A v.
        start: the start vector.
        rtol: the residual must be at most this share of |theta|.
        max_products: most products.
        room: basis vectors that fit the memory. A full basis starts anew at its best vector.

    >>> A = torch.diag(torch.tensor([-5.0, 1.0, 3.0], dtype=torch.float64))
    >>> start = torch.ones(3, dtype=torch.float64)
    >>> result = top_eigenvalue(lambda V: V @ A, start, rtol=1e-6, max_products=9, room=9)
    >>> round(result.value, 9), result.converged
    (3.0, True)
    """
    eps = torch.finfo(start.dtype).eps
    v, used = start, 0
    value, residual, converged = 0.0, float("inf"), False
    while used < max_products and not converged:
        space = Krylov(product, [v.unsqueeze(0)], min(room, max_products))
        while True:
            space.extend()
            used += 1
            theta, vectors, left = space.ritz(1)
            size = float(
                torch.linalg.eigvalsh(space.T[0, : space.steps, : space.steps]).abs().max()
            )
            invariant = float(space.fresh[0].norm()) <= 64 * eps * size
            small = float(left) <= 0.5 * rtol * abs(float(theta))
            full = space.steps == space.basis.shape[1] or used >= max_products
            if invariant or small or full:
                break
        v = vectors[0, :, 0].to(start) @ space.basis[0, : space.steps]
        v = v / v.norm()
        Av = product(v.unsqueeze(0))[0]
        used += 1
        value = float(v @ Av)
        residual = float((Av - value * v).norm())
        rounding = 64 * eps * size  # below which the largest is zero
        converged = residual <= rtol * abs(value) or max(residual, abs(value)) <= rounding
    return TopEigenvalue(value, residual, converged, used)


def _orthogonal(v: Float[Tensor, "b n"], known: Float[Tensor, "b k n"]) -> Float[Tensor, "b n"]:
    """Remove from v its part along ``known``, twice: once leaves rounding that grows by steps."""
    for _ in range(2):
        v = v - (known.mT @ (known @ v[..., None])).squeeze(-1)
    return v


def random_vector(like: Float[Tensor, "b n"], seed: int) -> Float[Tensor, "b n"]:
    """Draw a random vector, the same for each sample: neighbours in a batch change nothing."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(like.shape[1], generator=generator, dtype=torch.float64, device="cpu")
    return v.to(like).expand_as(like)
