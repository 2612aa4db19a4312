"""Eq. 36: sharpness minimised over one scale per row and column of a weight (Tsuzuku et al.).

min over s, t of  sum_kj H_kj (s_k t_j)^2 + W_kj^2 / (4 lambda^2 (s_k t_j)^2).

Let a = s^2 and b = t^2. Each step has a closed form, a_k = sqrt(R_k / P_k). Here P_k = sum_j H_kj
b_j and R_k = sum_j W_kj^2 / (4 lambda^2 b_j). The problem is convex in (log a, log b), so the steps
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
    """The minimum of Eq. 36, and the s^2 and t^2 where it is taken (0 for what dropped out)."""

    value: float
    row: Float[Array, " o"]
    column: Float[Array, " i"]


def minimise(
    H: Float[Array, "o i"], W: Float[Array, "o i"], lam: float = 1.0, steps: int = 10_000
) -> Minimum:
    """Minimise Eq. 36 by alternating its closed forms until the value is stable to 12 digits.

    Args:
        H: curvature of each entry, not negative.
        W: the weight.
        lam: lambda of Eq. 36.
        steps: most steps to take.

    Returns:
        The minimum and the scales of rows and columns.

    Raises:
        FlatlensError: if an entry of H is negative; then there is no minimum.

    >>> minimise(np.array([[4.0]]), np.array([[3.0]])).value  # sqrt(H) |W| / lambda
    6.0
    """
    if (H < 0).any():
        raise FlatlensError("Eq. 36 has no minimum with negative curvature; give H >= 0")
    C = (W / (2 * lam)) ** 2
    # A row whose curvature or weight is all zero sends its scale to infinity or zero at no cost.
    used_rows, used_columns = np.ones(len(H), bool), np.ones(H.shape[1], bool)
    for _ in range(sum(H.shape)):
        before = used_rows.sum() + used_columns.sum()
        used_rows &= (H @ used_columns > 0) & (C @ used_columns > 0)
        used_columns &= (used_rows @ H > 0) & (used_rows @ C > 0)
        if used_rows.sum() + used_columns.sum() in (before, sum(H.shape)):
            break
    if not used_rows.any() or not used_columns.any():
        return Minimum(0.0, np.zeros(len(H)), np.zeros(H.shape[1]))
    used = torch.from_numpy(used_rows), torch.from_numpy(used_columns)
    return _alternate(torch.from_numpy(H), torch.from_numpy(C), *used, steps)


def _alternate(
    H: Float[Tensor, "k j"],
    C: Float[Tensor, "k j"],
    used_rows: Bool[Tensor, " k"],
    used_columns: Bool[Tensor, " j"],
    steps: int,
) -> Minimum:
    """Alternate between the best s^2 for given t^2 and the best t^2 for given s^2."""
    t, value = used_columns.to(H), float("inf")
    for _ in range(steps):
        s = torch.where(used_rows, ((C @ _inverse(t)) / (H @ t)).sqrt(), 0.0)
        P, R = s @ H, _inverse(s) @ C
        t = torch.where(used_columns, (R / P).sqrt(), 0.0)
        last, value = value, float(2 * (P * R).sqrt() @ used_columns.to(H))
        if last - value <= 1e-13 * value:
            break
    return Minimum(value, s.numpy(), t.numpy())


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, and 0 for a row or column that dropped out."""
    return torch.where(scale > 0, 1 / scale, 0.0)
