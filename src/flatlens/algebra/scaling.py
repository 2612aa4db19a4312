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
from jaxtyping import Bool, Float
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
    C = (W / (2 * lam)) ** 2
    # A row whose curvature or weight is all zero sends its scale to infinity or zero at no cost.
    rows, columns = np.ones(len(H), bool), np.ones(H.shape[1], bool)
    for _ in range(sum(H.shape)):
        before = rows.sum() + columns.sum()
        rows &= (H @ columns > 0) & (C @ columns > 0)
        columns &= (rows @ H > 0) & (rows @ C > 0)
        if rows.sum() + columns.sum() in (before, sum(H.shape)):
            break
    if not rows.any() or not columns.any():
        return Minimum(0.0, np.zeros(len(H)), np.zeros(H.shape[1]))
    kept = torch.from_numpy(rows), torch.from_numpy(columns)
    return _alternate(torch.from_numpy(H), torch.from_numpy(C), *kept, steps)


def _alternate(
    H: Float[Tensor, "k j"],
    C: Float[Tensor, "k j"],
    rows: Bool[Tensor, " k"],
    columns: Bool[Tensor, " j"],
    steps: int,
) -> Minimum:
    t, value = columns.to(H), float("inf")
    for _ in range(steps):
        s = torch.where(rows, ((C @ _inverse(t)) / (H @ t)).sqrt(), 0.0)
        P, R = s @ H, _inverse(s) @ C
        t = torch.where(columns, (R / P).sqrt(), 0.0)
        last, value = value, float(2 * (P * R).sqrt() @ columns.to(H))
        if last - value <= 1e-13 * value:
            break
    return Minimum(value, s.numpy(), t.numpy())


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for what dropped out."""
    return torch.where(scale > 0, 1 / scale, 0.0)
