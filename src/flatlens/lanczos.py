"""The largest singular values of many operators at once, from products with A A^T alone.

All samples of a batch take each step together, each with a vector of its own. Full
orthogonalisation; the coefficients are float64. A value comes with the residual of its Ritz pair:
some eigenvalue of A A^T lies within that of theta, and Ritz values never exceed the largest. From
one start a singular value that occurs several times is seen once: the largest is right, but what
follows it may be further down the list (equal tokens, each with an output of its own).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

CHECK_EVERY = 2


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
    top, last = min(top, n), min(max_steps, n)
    eps = torch.finfo(start.dtype).eps
    basis = start.new_zeros(b, last + 1, n)
    basis[:, 0] = start / start.norm(dim=1, keepdim=True)
    T = torch.zeros(b, last + 1, last + 1, dtype=torch.float64, device=start.device)
    generator = torch.Generator().manual_seed(0)
    restarts = torch.zeros(b, device=start.device)
    for step in range(1, last + 1):
        v = basis[:, step - 1]
        w = gram(v)
        T[:, step - 1, step - 1] = (v.double() * w.double()).sum(1)
        known = basis[:, :step]
        for _ in range(2):  # once leaves rounding that grows from step to step
            w = w - (known.mT @ (known @ w[..., None])).squeeze(-1)
        beta = w.double().norm(dim=1)
        # Where only rounding is left the basis spans an invariant space, which holds each
        # eigenvalue once: a new random vector finds the next copy of a multiple one.
        broken = beta <= 64 * eps * T.abs().amax((1, 2))
        beta = torch.where(broken, 0.0, beta)
        if step >= top and (step % CHECK_EVERY == 0 or step == last or bool(broken.any())):
            values, vectors = torch.linalg.eigh(T[:, :step, :step])
            theta = values[:, -top:].flip(-1).clamp(min=0)
            residual = beta[:, None] * vectors[:, -1, -top:].flip(-1).abs() * (step < n)
            converged = residual <= (tolerance + 64 * eps) * theta[:, :1]
            copies = (restarts == 0) & ~broken | (restarts >= top - 1)
            converged &= (copies | (step == n))[:, None]
            if bool(converged.all()) or step == last:
                break
        if bool(broken.any()):
            restarts += broken
            fresh = torch.randn(b, n, generator=generator, dtype=torch.float64).to(w)
            for _ in range(2):
                fresh = fresh - (known.mT @ (known @ fresh[..., None])).squeeze(-1)
            w = torch.where(broken[:, None], fresh, w)
        T[:, step, step - 1] = T[:, step - 1, step] = beta
        basis[:, step] = w / w.norm(dim=1, keepdim=True)
    return Top(theta.sqrt(), converged, step)
