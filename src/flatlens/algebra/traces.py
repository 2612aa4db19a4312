"""A trace and a top eigenvalue from products alone, with an honest error.

Traces take Hutch++ (Meyer, Musco, Musco and Woodruff 2021). A sketch finds the large eigenvalues,
and their part of the trace is exact. Random signs g estimate the rest, the mean of g^T P A P g,
where P projects off the sketch. Given the sketch, these values are independent and unbiased, so
their spread is an honest error.

XTrace (Epperly, Tropp and Webber 2024) is 1.1 to 2 times more accurate at the same cost, but the
error that it gives is too small. The table shows how often 95 % intervals held the true trace of
Hessians of small networks, in 400 repeats.

| estimator | coverage of 95 % intervals |
| --------- | -------------------------- |
| Hutch++   | 93 to 96 %                 |
| XTrace    | 79 to 94 %                 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.lanczos import top_eigenvalue
from flatlens.errors import FlatlensError

VECTORS = 1 << 30  # bytes that the vectors of an estimate may take
Array = np.ndarray
FEWEST = 8  # fewest terms that give a standard error: two or three may agree by chance
LIMIT = 2000  # products at most, however small rtol is
Rows = Float[Tensor, "k P"]
Products = Callable[[Tensor], Tensor]  # rows v -> rows A v


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error.

    ``float`` returns the value, and raises if the estimate has not converged.

    Attributes:
        value: the estimate.
        se: its standard error. It is 0 if the value is exact up to rounding, and NaN if it is
            unknown.
        per_layer: the part of each parameter or layer, by name.
        per_layer_se: the standard errors of these parts.
        dof: degrees of freedom of a Student interval, from ``dof`` + 1 independent values.
        passes: the cost in products with the Hessian, or in forward and backward passes.
        converged: False if a limit stopped the work before the requested accuracy.
        note: what the user should know, such as why the estimate has not converged.
        residual: distance to the Gauss-Newton form (Lemmas B.1 and E.2).
        certificate: for an eigenvalue, a distance from the value within which one lies.
        samples: one number per sample, if the value is their mean.
        history: pairs of passes so far and numbers per sample.
    """

    value: float
    se: float = 0.0
    per_layer: dict[str, float] | None = None
    per_layer_se: dict[str, float] | None = None
    dof: int = 0
    passes: int = 0
    converged: bool = True
    note: str = ""
    residual: float | None = None
    certificate: float | None = None
    samples: Array | None = field(default=None, repr=False)
    history: list[tuple[int, Array]] = field(default_factory=list, repr=False)

    def __float__(self) -> float:
        if not self.converged:
            raise FlatlensError(f"{self.note}; use .value for the estimate so far")
        return self.value


# -- traces --------------------------------------------------------------------------------------


def trace(
    products: Products,
    sizes: dict[str, int],
    like: Tensor,
    *,
    directions: int,
    rtol: float | None,
    limit: int,
    seed: int,
) -> Estimate:
    """Estimate the trace of a symmetric matrix A by Hutch++, and its split over named blocks.

    A third of the products goes to the sketch, a third to its exact part, a third to the rest.
    Where computing all of A costs no more, A is taken column by column, and the error is 0.

    Args:
        products: rows v -> rows A v.
        sizes: number of rows of each block of A, by name. A has sum(sizes) rows.
        like: a tensor of the right type and device.
        directions: number of products.
        rtol: relative standard error to reach with further products; None takes no further ones.
        limit: most products with ``rtol``.
        seed: of the random signs.

    Returns:
        The trace with its standard error, and both for each block.

    Raises:
        FlatlensError: if ``directions`` is below 2 or ``rtol`` is not positive.

    >>> A = torch.diag(torch.arange(5.0))
    >>> e = trace(lambda V: V @ A, {"a": 2, "b": 3}, A[0], directions=9, rtol=None, limit=9, seed=0)
    >>> e.value, e.per_layer, e.se
    (10.0, {'a': 1.0, 'b': 9.0}, 0.0)
    """
    if directions < 2 or (rtol is not None and rtol <= 0):
        raise FlatlensError(
            f"directions={directions}, rtol={rtol}: a standard error needs two directions or more, "
            "and a relative error above 0 to meet"
        )
    P, limit = sum(sizes.values()), max(limit, directions)
    at_once = max(1, VECTORS // (4 * P * like.element_size()))
    if directions >= P:
        return _column_by_column(products, sizes, like, at_once, P)
    signs = _Signs(P, like, seed)
    k = min(directions // 3, (directions - 2) // 2, at_once)  # at least two are left for the rest
    Q, exact_part = _sketch(products, signs, k, sizes)
    terms, used, goal = exact_part.new_zeros(0, len(sizes)), 2 * k, directions
    while True:
        while used < goal:
            g = signs(min(goal - used, at_once))
            terms = torch.cat([terms, _split(g * _off(Q, products(_off(Q, g))), sizes)])
            used += len(g)
        m = len(terms)
        values, errors = exact_part + terms.mean(0), terms.std(0) / m**0.5
        value, se = float(values.sum()), float(terms.sum(1).std()) / m**0.5
        # Where nothing is random, rounding is still an error.
        se = max(se, 4 * torch.finfo(like.dtype).eps * float(values.abs().sum()))
        target = float("inf") if rtol is None else rtol * abs(value)
        converged = se <= target and (rtol is None or m >= FEWEST)
        if converged or used >= limit:
            break
        # Directions still needed if the error falls as 1 / sqrt(m). The loop checks it again.
        wanted = max(FEWEST - m, m * ((se / target) ** 2 - 1)) if target else float("inf")
        if min(wanted, limit - used) >= P:
            return _column_by_column(products, sizes, like, at_once, used + P)
        goal = min(limit, used + round(min(max(wanted, 2), max(m, FEWEST - m))))
    return Estimate(
        value,
        se,
        per_layer=dict(zip(sizes, values.tolist(), strict=True)),
        per_layer_se=dict(zip(sizes, errors.tolist(), strict=True)),
        dof=m - 1,
        passes=used,
        converged=converged,
        note="" if converged else f"rtol={rtol} was not met with {used} directions (the limit)",
    )


def _sketch(
    products: Products, signs: _Signs, k: int, sizes: dict[str, int]
) -> tuple[Float[Tensor, "k P"], Float[Tensor, " s"]]:
    """Sketch A with k random vectors.

    Returns:
        An orthonormal basis of the sketch as rows Q, and its exact part of the trace by block.
    """
    if k == 0:
        empty = signs.like.new_zeros(0, signs.size)
        return empty, torch.zeros(len(sizes), dtype=torch.float64, device="cpu")
    Q = torch.linalg.qr(products(signs(k)).mT).Q.mT
    return Q, _split(_known(Q, products(Q)), sizes).sum(0)


class _Signs:
    """Random rows of +1 and -1, the same on every device."""

    def __init__(self, size: int, like: Tensor, seed: int) -> None:
        self.size, self.like = size, like
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, k: int) -> Rows:
        # Draw eight signs as one byte: drawing them one by one takes longer than their products.
        shape = (k, -(-self.size // 8))
        drawn = torch.randint(256, shape, generator=self.generator, dtype=torch.uint8, device="cpu")
        bits = torch.from_numpy(np.unpackbits(drawn.numpy(), axis=1, count=self.size))
        return bits.to(self.like).mul_(2).sub_(1)


def _split(terms: Rows, sizes: dict[str, int]) -> Float[Tensor, "k s"]:
    """Sum each row over each block, in float64."""
    terms_by_block = terms.split(list(sizes.values()), 1)
    return torch.stack([part.sum(1, dtype=torch.float64) for part in terms_by_block], 1).cpu()


def _off(Q: Float[Tensor, "q P"], v: Rows) -> Rows:
    """Return v without its part in the rows of Q."""
    return v - (v @ Q.mT) @ Q


def _known(Q: Rows, AQ: Rows) -> Rows:
    """Return terms whose sum is the diagonal of A - P A P, P = 1 - Q^T Q.

    A - P A P = Q^T (Q A) + (A Q^T) Q - Q^T (Q A Q^T) Q, and its trace is that of Q A Q^T.
    """
    return Q * (2 * AQ - (AQ @ Q.mT) @ Q)


def _column_by_column(
    products: Products, sizes: dict[str, int], like: Tensor, at_once: int, passes: int
) -> Estimate:
    P = sum(sizes.values())
    total = torch.zeros(len(sizes), dtype=torch.float64, device="cpu")
    for s in range(0, P, at_once):
        e = like.new_zeros(min(at_once, P - s), P)
        e[:, s : s + len(e)].fill_diagonal_(1)
        total += _split(e * products(e), sizes).sum(0)
    split = dict(zip(sizes, total.tolist(), strict=True))
    return Estimate(float(total.sum()), 0.0, split, dict.fromkeys(sizes, 0.0), passes=passes)


# -- the top eigenvalue --------------------------------------------------------------------------


def eigenvalue(
    products: Products, like: Tensor, size: int, *, rtol: float, max_iter: int, seed: int
) -> Estimate:
    """Find the largest eigenvalue of a symmetric A by Lanczos, with the residual of its vector.

    The residual is the ``certificate``, which must be at most ``rtol`` |theta|.

    >>> A = torch.diag(torch.tensor([-5.0, 1.0, 3.0], dtype=torch.float64))
    >>> round(eigenvalue(lambda V: V @ A, A[0], 3, rtol=1e-6, max_iter=9, seed=0).value, 9)
    3.0
    """
    start = torch.randn(
        size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu"
    )
    room = min(size, max(8, VECTORS // (size * like.element_size())))
    top = top_eigenvalue(products, start.to(like), rtol=rtol, max_products=max_iter, room=room)
    note = (
        f"the top eigenvalue has not converged in {top.products} products: an eigenvalue lies "
        f"within {top.residual:.2g} of {top.value:.6g}, and the largest may be larger; raise "
        "max_iter"
    )
    return Estimate(
        top.value,
        passes=top.products,
        converged=top.converged,
        note="" if top.converged else note,
        certificate=top.residual,
    )
