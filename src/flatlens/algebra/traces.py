"""A trace and a top eigenvalue from products alone, with an honest error.

Traces take Hutch++ (Meyer, Musco, Musco and Woodruff 2021): a sketch finds the large eigenvalues,
whose part is exact; random signs g estimate the rest, the mean of g^T P A P g with P the projection
off the sketch. Given the sketch these are independent and unbiased: their spread is an honest
error. XTrace (Epperly, Tropp and Webber 2024) is 1.1 to 2 times more accurate at the same cost, but
the error it gives is too small: on Hessians of small networks its 95 % intervals held the trace in
79 to 94 % of 400 repeats, those of Hutch++ in 93 to 96 %.
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
FEWEST = 8  # terms whose scatter is believed: two or three may agree by chance
LIMIT = 2000  # products at most, however small rtol is
Rows = Float[Tensor, "k P"]
Products = Callable[[Tensor], Tensor]  # rows v -> rows A v


@dataclass(frozen=True)
class Estimate:
    """A number and how well it is known.

    ``se`` is its standard error, from ``dof`` + 1 independent values (a Student interval has that
    many degrees of freedom); 0 where the number is exact up to rounding, NaN where nothing tells
    it. ``converged`` is False where a limit stopped the work before the accuracy asked for, and
    ``note`` says so: ``float`` then refuses, ``.value`` is still what was found.
    """

    value: float
    se: float = 0.0
    per_layer: dict[str, float] | None = None
    per_layer_se: dict[str, float] | None = None
    dof: int = 0
    passes: int = 0  # what it cost: Hessian products, or forward and backward passes
    converged: bool = True
    note: str = ""
    residual: float | None = None  # distance to the Gauss-Newton form (Lemmas B.1 and E.2)
    certificate: float | None = None  # an eigenvalue lies within this of the value
    samples: Array | None = field(default=None, repr=False)  # where the value is their mean
    history: list[tuple[int, Array]] = field(default_factory=list, repr=False)  # passes, samples

    def __float__(self) -> float:
        if not self.converged:
            raise FlatlensError(f"{self.note}; take .value for what was found nevertheless")
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
    """Tr A of a symmetric A of sum(sizes) rows, and its split over the blocks named in ``sizes``.

    ``directions`` products are spent, a third each on the sketch, its exact part and the rest; with
    ``rtol`` more on the rest until the relative standard error is met or ``limit`` is reached.
    Where all of A costs no more than that, it is taken column by column, and the error is 0.

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
    k = min(directions // 3, (directions - 2) // 2, at_once)  # two at least are left for the rest
    Q, fixed = like.new_zeros(0, P), torch.zeros(len(sizes), dtype=torch.float64, device="cpu")
    if k > 0:
        Q = torch.linalg.qr(products(signs(k)).mT).Q.mT
        fixed = _split(_known(Q, products(Q)), sizes).sum(0)
    terms, used, goal = fixed.new_zeros(0, len(sizes)), 2 * k, directions
    while True:
        while used < goal:
            g = signs(min(goal - used, at_once))
            terms = torch.cat([terms, _split(g * _off(Q, products(_off(Q, g))), sizes)])
            used += len(g)
        m = len(terms)
        values, errors = fixed + terms.mean(0), terms.std(0) / m**0.5
        value, se = float(values.sum()), float(terms.sum(1).std()) / m**0.5
        # Rounding is an error, too, where nothing is left to chance.
        se = max(se, 4 * torch.finfo(like.dtype).eps * float(values.abs().sum()))
        target = float("inf") if rtol is None else rtol * abs(value)
        converged = se <= target and (rtol is None or m >= FEWEST)
        if converged or used >= limit:
            break
        # So many more, were the error to fall as it should; it is looked at again on the way.
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


class _Signs:
    """Random rows of +1 and -1, the same on every device."""

    def __init__(self, size: int, like: Tensor, seed: int) -> None:
        self.size, self.like = size, like
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, k: int) -> Rows:
        # Eight signs a byte: to draw one by one would take longer than their products.
        shape = (k, -(-self.size // 8))
        drawn = torch.randint(256, shape, generator=self.generator, dtype=torch.uint8, device="cpu")
        bits = torch.from_numpy(np.unpackbits(drawn.numpy(), axis=1, count=self.size))
        return bits.to(self.like).mul_(2).sub_(1)


def _split(terms: Rows, sizes: dict[str, int]) -> Float[Tensor, "k s"]:
    """The sum of each row over each block, float64."""
    terms_by_block = terms.split(list(sizes.values()), 1)
    return torch.stack([part.sum(1, dtype=torch.float64) for part in terms_by_block], 1).cpu()


def _off(Q: Float[Tensor, "q P"], v: Rows) -> Rows:
    """v without its part in the rows of Q."""
    return v - (v @ Q.mT) @ Q


def _known(Q: Rows, AQ: Rows) -> Rows:
    """Terms whose sum is the diagonal of A - P A P, P = 1 - Q^T Q.

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
    """The largest eigenvalue of a symmetric A by Lanczos, with the residual of its vector.

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
