"""Eq. 36: sharpness minimised over one scale per row and column of a weight (Tsuzuku et al.).

min over s, t of  sum_kj H_kj (s_k t_j)^2 + W_kj^2 / (4 lambda^2 (s_k t_j)^2).

With a = s^2, b = t^2 each step has a closed form, a_k = sqrt(R_k / P_k) with P_k = sum_j H_kj b_j
and R_k = sum_j W_kj^2 / (4 lambda^2 b_j). The problem is convex in (log a, log b), so the steps
converge to the minimum. Rows or columns without weight or without curvature drop out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.errors import FlatlensError
from flatlens.probes import Array


@dataclass(frozen=True)
class Minimum:
    """The minimum of Eq. 36 and where it is: s^2 and t^2 (0 for what dropped out)."""

    value: float
    row: Float[Array, " o"]
    column: Float[Array, " i"]


def minimise(
    H: Float[Array, "o i"], W: Float[Array, "o i"], lam: float = 1.0, steps: int = 10_000
) -> Minimum:
    """Alternate the closed forms until the value stands still to twelve digits.

    >>> minimise(np.array([[4.0]]), np.array([[3.0]])).value  # sqrt(H) |W| / lambda
    6.0
    """
    if (H < 0).any():
        raise FlatlensError("Eq. 36 has no minimum with negative curvature; give H >= 0")
    C = W**2 / (4 * lam**2)
    # A row whose curvature or weight is all zero sends its scale to infinity or zero at no cost.
    rows, columns = np.ones(len(H), bool), np.ones(H.shape[1], bool)
    for _ in range(sum(H.shape)):
        before = rows.sum() + columns.sum()
        rows &= (H[:, columns].sum(1) > 0) & (C[:, columns].sum(1) > 0)
        columns &= (H[rows].sum(0) > 0) & (C[rows].sum(0) > 0)
        if rows.sum() + columns.sum() == before:
            break
    a, b = np.zeros(len(H)), np.zeros(H.shape[1])
    if not rows.any() or not columns.any():
        return Minimum(0.0, a, b)
    kept = np.ix_(rows, columns)
    s, t, value = _alternate(torch.from_numpy(H[kept]), torch.from_numpy(C[kept]), steps)
    a[rows], b[columns] = s, t
    return Minimum(value, a, b)


def _alternate(
    H: Float[Tensor, "k j"], C: Float[Tensor, "k j"], steps: int
) -> tuple[Float[Array, " k"], Float[Array, " j"], float]:
    t, value = torch.ones_like(H[0]), float("inf")
    for _ in range(steps):
        s = ((C @ (1 / t)) / (H @ t)).sqrt()
        P, R = s @ H, (1 / s) @ C
        t = (R / P).sqrt()
        last, value = value, float(2 * (P * R).sqrt().sum())
        if last - value <= 1e-13 * value:
            break
    return s.numpy(), t.numpy(), value
