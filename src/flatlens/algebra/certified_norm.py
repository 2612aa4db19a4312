"""The largest eigenvalue of a positive operator from products alone, with a proven upper end.

Lanczos from a random start approaches the largest eigenvalue lambda_1 from below. The upper bound
rests on one fact: a random start is almost never nearly orthogonal to the eigenvector of lambda_1.

- A start v has the mass w = <v, u_1>^2 at lambda_1. Let p_0, ..., p_k be the orthonormal
  polynomials of the first k steps. No measure with the same moments has a larger mass at a point
  lambda than the Christoffel function 1 / sum_j p_j(lambda)^2. So w <= 1 / sum_j p_j(lambda_1)^2.
- A uniform unit vector in d dimensions has a coordinate whose density is at most sqrt(d / 2 pi).
  The masses of R independent starts therefore add up to s or less with a probability of at most
  (d s / 2)^(R/2) / Gamma(R/2 + 1).

Choose s so that this is :data:`RISK`. A value lambda above the Ritz values at which the Christoffel
functions of all runs add up to less than s is then no eigenvalue, except with that probability.
Above the largest Ritz value the sum falls, so the point where it comes down to s is an upper end.
Two runs need fewer steps than one: s is about 1e-18 / d with one start and 1e-9 / d with two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

RISK = 1e-9  # probability, over the random starts, that an upper end is too small
RUNS = 2  # independent starts; more of them cost more per step and need fewer steps
CHECKS = (16, 8)  # the first step at which the values are looked at, and the steps between looks
LARGE = 1e100  # a sum of squares above this leaves no mass
Array = np.ndarray


class LargestEigenvalue(NamedTuple):
    """The largest Ritz value, the residual of its pair, and the upper end of the eigenvalue."""

    value: float
    residual: float
    upper: float


def largest_eigenvalue(
    gram: Callable[[Float[Tensor, "r n"]], Float[Tensor, "r n"]],
    like: Float[Tensor, " n"],
    *,
    max_steps: int,
    residual: float,
    width: float,
) -> LargestEigenvalue:
    """Find the largest eigenvalue of a positive semi-definite operator, with an upper end.

    No basis is kept: each vector is made orthogonal to the last two. Orthogonality to earlier ones
    is lost only after a value has converged to the root of the precision, and the iteration ends
    before that.

    Args:
        gram: rows v -> rows C^T C v.
        like: a vector of the right size, type and device.
        max_steps: most products with each start.
        residual: the residual of the largest Ritz value that suffices, relative to the value.
        width: the relative distance to the upper end that suffices.

    Returns:
        The value, and an upper end that holds with a probability of 1 - :data:`RISK`.

    >>> d = torch.linspace(0, 1, 500, dtype=torch.float64)
    >>> top = largest_eigenvalue(lambda v: d * v, d, max_steps=80, residual=1e-3, width=0.05)
    >>> 0.999 < top.value <= 1 <= top.upper < 1.05
    True
    """
    size = len(like)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(RUNS, size, generator=generator, dtype=torch.float64, device="cpu")
    v = (start / start.norm(dim=1, keepdim=True)).to(like)
    before, beta = torch.zeros_like(v), v.new_zeros(RUNS, 1)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    last = min(max_steps, size)
    for step in range(1, last + 1):
        w = gram(v)
        alpha = (v * w).sum(1, keepdim=True)
        w = w - alpha * v - beta * before
        beta = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        diagonal.append(alpha)
        beside.append(beta)
        if step == last or (step >= CHECKS[0] and (step - CHECKS[0]) % CHECKS[1] == 0):
            table = torch.stack([torch.cat(diagonal, 1), torch.cat(beside, 1)])
            alphas, betas = table.double().cpu().numpy()
            seen = _Iteration(alphas, betas, torch.finfo(like.dtype).eps)
            value, left = seen.largest()
            if value <= 0.0:
                return LargestEigenvalue(0.0, 0.0, 0.0)
            close = left <= residual * value and seen.excludes(value * (1 + width), size)
            if close or step == last:
                return LargestEigenvalue(value, left, seen.upper(value, size))
        before, v = v, w / beta
    raise AssertionError("an operator has at least one dimension")


class _Iteration:
    """The coefficients of R runs of k steps.

    Args:
        diagonal: alpha_1 ... alpha_k by run, [R, k].
        beside: beta_1 ... beta_k by run, [R, k].
        eps: precision of the products.
    """

    def __init__(self, diagonal: Array, beside: Array, eps: float) -> None:
        self.diagonal, self.beside = diagonal.copy(), beside.copy()
        # Where only rounding is left a run spans an invariant space: what follows is noise.
        scale = np.fmax.accumulate(np.nan_to_num(diagonal), axis=1)
        ended = np.logical_or.accumulate(~(beside > 64 * eps * scale), axis=1)
        self.beside[ended] = 0.0
        self.diagonal[:, 1:][ended[:, :-1]] = 0.0

    def largest(self) -> tuple[float, float]:
        """Return the largest Ritz value of all runs and the residual of its pair."""
        k = self.diagonal.shape[1]
        T = np.zeros((len(self.diagonal), k, k))
        steps = np.arange(k)
        T[:, steps, steps] = self.diagonal
        T[:, steps[1:], steps[:-1]] = self.beside[:, :-1]
        values, vectors = np.linalg.eigh(T)  # reads the lower triangle
        run = int(values[:, -1].argmax())
        return float(values[run, -1]), float(self.beside[run, -1] * abs(vectors[run, -1, -1]))

    def mass(self, point: float) -> float:
        """Return the largest total mass that the runs can have at a point.

        Plain numbers: for so few terms they are faster than arrays.
        """
        total_mass = 0.0
        for diagonal, beside in zip(self.diagonal.tolist(), self.beside.tolist(), strict=True):
            previous, current, total, beta_before = 0.0, 1.0, 1.0, 0.0
            for alpha, beta in zip(diagonal, beside, strict=True):
                if beta == 0.0 or total > LARGE:
                    total = math.inf
                    break
                following = ((point - alpha) * current - beta_before * previous) / beta
                previous, current, beta_before = current, following, beta
                total += following * following
            total_mass += 1 / total
        return total_mass

    def excludes(self, point: float, size: int) -> bool:
        """Whether no eigenvalue lies at this point or above it."""
        return self.mass(point) < least_mass(len(self.diagonal), size)

    def upper(self, value: float, size: int) -> float:
        """Return a point above ``value`` at and beyond which no eigenvalue lies."""
        low, high = value, 2 * value
        while not self.excludes(high, size):
            low, high = high, 2 * high
            if high == math.inf:
                return math.inf
        while high - low > 0.02 * (high - value) and high - value > 1e-9 * value:
            middle = (low + high) / 2
            low, high = (low, middle) if self.excludes(middle, size) else (middle, high)
        return high


def least_mass(runs: int, size: int) -> float:
    """Return the total mass at one eigenvector that all starts have but for a chance of `RISK`."""
    return 2 / size * (RISK * math.gamma(runs / 2 + 1)) ** (2 / runs)
