"""Singular values per sample, in float64 and with an honest rank.

The N x N Gram matrix is cheap and, from float32 entries, exact to float64 rounding. But it squares
the condition number, so it loses the digits of relative singular values below 1e-4. The Jacobian
itself is then decomposed, unless the lost values are below the rank tolerance anyway. It is also
decomposed where the squares leave the range of float64.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flatlens import tuning
from flatlens.algebra.looks import unusual

GRAM_LIMIT = 1e-8  # smallest trusted eigenvalue of a Gram matrix, relative to the largest
SMALLEST_GRAM, LARGEST_GRAM = 1e-280, 1e280  # traces of a Gram matrix that has all its digits


def rank_tolerance(dtype: torch.dtype, height: int, width: int) -> float:
    """Return the fraction of the largest singular value below which a value counts as zero.

    In half precision eps max(n, m) may exceed 1. Rounding of all entries there changes A by at most
    eps ||A||_F in the Frobenius norm, which is at most eps sqrt(min(n, m)) of the largest value.

    >>> rank_tolerance(torch.float64, 3, 4) == 4 * 2**-52
    True
    >>> rank_tolerance(torch.bfloat16, 4, 400)
    0.015625
    """
    limits = torch.finfo(dtype)
    if limits.bits < 32:
        return limits.eps * float(min(height, width) ** 0.5)
    return limits.eps * max(height, width)


def singular_values(
    A: Float[Tensor, "b n m"], precision: torch.dtype | None = None
) -> tuple[Float[Tensor, "b r"], Int[Tensor, " b"]]:
    """Return all min(n, m) singular values of each matrix, descending, and the rank.

    Args:
        A: the matrices.
        precision: the precision that their entries were computed in, by which small values count
            as zero; None stands for that of ``A``.

    >>> s, rank = singular_values(torch.tensor([[[3.0, 0.0], [0.0, 0.0]]]))
    >>> s.tolist(), rank.tolist()
    ([[3.0, 0.0]], [1])
    """
    height, width = A.shape[1:]
    tolerance = rank_tolerance(precision or A.dtype, height, width)
    block = max(1, tuning.SPECTRUM_BLOCK_ENTRIES // (height * width))
    gram = torch.cat([_gram(part) for part in A.split(block)])
    outside = _out_of_range(gram)
    gram.masked_fill_(outside[:, None, None], 0.0)
    values = _eigenvalues(gram).flip(-1).clamp(min=0)
    s = values.sqrt()
    poor = outside
    if tolerance**2 < 0.1 * GRAM_LIMIT:
        poor = poor | (values[:, -1] < GRAM_LIMIT * values[:, 0])
    # A factorisation waits for its error code, so that a look beside it costs no further wait.
    factorised = gram.shape[1] > 1
    if bool(poor.any()) if factorised else unusual(poor.any()):
        if bool(outside.any()):
            poor &= ~outside | A.detach().flatten(1).any(1)
        s[poor] = torch.linalg.svdvals(A[poor].double())  # LAPACK brings A itself into range
    s = torch.where(s < tolerance * s[:, :1], 0.0, s)
    return s, (s > 0).sum(-1)


def largest_singular_value(
    A: Float[Tensor, "b n m"],
) -> tuple[Float[Tensor, "b r"], Int[Tensor, " b"]]:
    """Return the largest singular value of each matrix; the others are NaN and the rank is -1.

    The largest one has all its digits in the Gram matrix, unless its square leaves float64.

    >>> largest_singular_value(torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]))[0].tolist()
    [[3.0, nan]]
    """
    height, width = A.shape[1:]
    block = max(1, tuning.SPECTRUM_BLOCK_ENTRIES // (height * width))
    squares = _eigenvalues(torch.cat([_gram(part) for part in A.split(block)]))[:, -1]
    top = squares.clamp(min=0).sqrt()
    if A.dtype == torch.float64:
        poor = (squares < 1e-280) | (squares > 1e280)
        if bool(poor.any()):
            top[poor] = torch.linalg.svdvals(A[poor])[:, 0]
    s = top.new_full((len(A), min(height, width)), torch.nan)
    s[:, 0] = top
    return s, torch.full_like(top, -1, dtype=torch.int64)


def _gram(A: Float[Tensor, "b n m"]) -> Float[Tensor, "b r r"]:
    """The smaller one of A A^T and A^T A, float64."""
    long = 2 if A.shape[1] <= A.shape[2] else 1
    total = A.new_zeros(len(A), *[min(A.shape[1:])] * 2, dtype=torch.float64)
    for part in A.split(max(1, tuning.SPECTRUM_BLOCK_ENTRIES * A.shape[long] // A.numel()), long):
        wide = part.double() if long == 2 else part.double().mT
        total.baddbmm_(wide, wide.mT)
    return total


def _eigenvalues(gram: Float[Tensor, "b r r"]) -> Float[Tensor, "b r"]:
    """The eigenvalues of each Gram matrix, ascending. A 1 x 1 matrix is its own eigenvalue."""
    return gram[:, 0] if gram.shape[1] == 1 else torch.linalg.eigvalsh(gram)


def _out_of_range(gram: Float[Tensor, "b r r"]) -> Bool[Tensor, " b"]:
    """Which Gram matrices have entries that float64 does not hold with all digits."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return ~((trace >= SMALLEST_GRAM) & (trace <= LARGEST_GRAM))


def spectral_norm(A: Float[Tensor, "b n m"]) -> Float[Tensor, " b"]:
    """The largest singular value of each matrix, float64."""
    return singular_values(A)[0][:, 0]
