"""The largest singular values of many operators at once, from products with A A^T alone.

All samples of a batch take each step together, each with vectors of its own. To find the ``top``
largest values, as many vectors start (block Lanczos): from one alone, a value that occurs several
times (equal tokens, each with an output of its own) would be seen once. Full orthogonalisation; the
coefficients are float64. A value comes with the residual of its Ritz pair: some eigenvalue of A A^T
lies within that of theta, and Ritz values never exceed the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Top(NamedTuple):
    """Singular values, descending, and whether each met the tolerance."""

    values: Float[Tensor, "b k"]
    converged: Bool[Tensor, "b k"]
    steps: int


def top_singular(
    gram: Callable[[Tensor], Tensor],
    start: Float[Tensor, "b n"],
    top: int = 1,
    tolerance: float = 1e-4,
    max_steps: int = 100,
) -> Top:
    """The ``top`` largest singular values of b operators from v -> A A^T v on [b, n].

    ``tolerance`` bounds the residual relative to theta = sigma^2, so that sigma is off by half of
    it at most (and, as a rule, by its square).

    >>> A = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64)).expand(2, 8, 8)
    >>> v = torch.linspace(1, 2, 8, dtype=torch.float64).expand(2, 8)
    >>> found = top_singular(lambda v: (A @ (A.mT @ v[..., None]))[..., 0], v, top=2)
    >>> found.values[0].round(decimals=6).tolist(), bool(found.converged.all())
    ([8.0, 7.0], True)
    """
    b, n = start.shape
    top, eps = min(top, n), torch.finfo(start.dtype).eps
    basis = start.new_zeros(b, min(max(max_steps, top), n), n)
    T = start.new_zeros(b, basis.shape[1], basis.shape[1], dtype=torch.float64)
    fresh = [start, *(_random(start, seed) for seed in range(1, top))]
    steps = 0
    while True:
        noise = 64 * eps * T.abs().amax((1, 2))
        first, steps = steps, min(steps + top, n)
        for j in range(first, steps):
            v = _off(fresh[j - first], basis[:, :j])
            # Where only rounding is left the basis spans an invariant space; a random vector leads
            # out of it.
            lost = v.double().norm(dim=1) <= noise
            if bool(lost.any()):
                v = torch.where(lost[:, None], _off(_random(v, n + j), basis[:, :j]), v)
            basis[:, j] = v / v.norm(dim=1, keepdim=True)
        known = basis[:, :steps]
        for j in range(first, steps):
            w = gram(basis[:, j])
            T[:, j, :steps] = T[:, :steps, j] = (known.double() @ w.double()[..., None]).squeeze(-1)
            fresh[j - first] = _off(w, known)
        values, vectors = torch.linalg.eigh(T[:, :steps, :steps])
        theta = values[:, -top:].flip(-1).clamp(min=0)
        left = torch.stack(fresh[: steps - first], 2).double() @ vectors[:, first:, -top:].flip(-1)
        residual = left.norm(dim=1) * (steps < n)
        converged = residual <= (tolerance + 64 * eps) * theta[:, :1]
        if bool(converged.all()) or steps == n or min(steps + top, n) > max_steps:
            return Top(theta.sqrt(), converged, steps)


def _off(v: Float[Tensor, "b n"], known: Float[Tensor, "b k n"]) -> Float[Tensor, "b n"]:
    """v without its part along ``known``; once leaves rounding that grows from step to step."""
    for _ in range(2):
        v = v - (known.mT @ (known @ v[..., None])).squeeze(-1)
    return v


def _random(like: Float[Tensor, "b n"], seed: int) -> Float[Tensor, "b n"]:
    """A random vector, the same for each sample: neighbours in a batch change nothing."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(like.shape[1], generator=generator, dtype=torch.float64)
    return v.to(like).expand_as(like)
