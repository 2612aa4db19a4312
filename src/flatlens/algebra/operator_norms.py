"""Norms of a layer's weight: of the whole map, of its kernel, and Frobenius.

The operator norm of a dense layer is the spectral norm of its weight. That of a convolution is the
norm of the map from one whole image to one whole image, which depends on the image size, stride,
padding and dilation. Small operators are decomposed exactly. Large ones take Lanczos on C^T C from
a random start, which gives theta <= ||C||_2 and, with the residual r of its Ritz pair, an
eigenvalue of C^T C within r of theta^2. So ||C||_2 lies between theta and sqrt(theta^2 + r), the
upper end that enters a bound. (That the pair is the top one is as sure as that a random start has a
component along it.)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flatlens.algebra.lanczos import LargestEigenvalue, largest_eigenvalue
from flatlens.algebra.sums import power_of_two

EXACT_SIZE = 64  # operators with a side up to this are decomposed exactly
MAX_STEPS = 400
CHECKS = (12, 6)  # the first step at which Lanczos is looked at, and the steps between looks
MOST_REMEMBERED = 10_000
SMALL, LARGE = 1e-5, 1e5  # sizes of float32 weights that are not scaled


class Norm(NamedTuple):
    """A norm and the relative distance to its upper end."""

    value: float
    slack: float = 0.0

    @property
    def upper(self) -> float:
        """The upper end of the norm."""
        return self.value * (1 + self.slack)


@dataclass(frozen=True)
class WeightNorms:
    """Three norms of one layer. ``slack`` is the relative width of what an iteration left open.

    A norm times 1 + slack is its upper end.
    """

    operator: float
    kernel: float
    frobenius: float
    slack: float = 0.0


@runtime_checkable
class HasNorms(Protocol):
    """What a kind of layer must offer."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def in_shape(self) -> torch.Size: ...

    @property
    def matrix(self) -> Tensor: ...

    @property
    def way(self) -> Hashable: ...

    def operator_norm(self, kernel: Norm) -> Norm: ...


_remembered: dict[tuple[Any, ...], WeightNorms] = {}


def weight_norms(layer: HasNorms) -> WeightNorms:
    """Return all three norms of a layer's weight; those of the same weight are remembered.

    A weight is recognised by its entries, not by its tensor: a write through ``.data`` leaves no
    other trace.
    """
    W = layer.matrix
    frobenius = float(torch.linalg.vector_norm(W, dtype=torch.float64))
    entries = zlib.crc32(layer.weight.detach().cpu().contiguous().numpy().data)
    key = (W.dtype, W.shape, layer.way, layer.in_shape[1:], frobenius, entries)
    if key not in _remembered:
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = _norms(layer, frobenius)
    return _remembered[key]


def _norms(layer: HasNorms, frobenius: float) -> WeightNorms:
    """Compute the norms of a weight; a small or large one of float32 is scaled first.

    Lanczos takes the squares of C^T C v, fourth powers of the weight.
    """
    size, scale = float(torch.linalg.vector_norm(layer.weight.detach(), float("inf"))), 1.0
    if layer.weight.dtype == torch.float32 and not SMALL <= size <= LARGE:
        scale = float(power_of_two(torch.tensor(size)))
        weight = (layer.weight.detach().double() * scale).float()
        layer = replace(layer, weight=weight)  # type: ignore[type-var]
    kernels = [matrix_norm(w) for w in layer.matrix]
    kernel = max(kernels)
    operator = layer.operator_norm(kernel)
    slack = max(operator.slack, *(k.slack for k in kernels))
    return WeightNorms(operator.value / scale, kernel.value / scale, frobenius, slack)


def matrix_norm(W: Tensor) -> Norm:
    """Return ||W||_2."""
    if min(W.shape) <= EXACT_SIZE:
        W = W.double()
        gram = W @ W.mT if W.shape[0] <= W.shape[1] else W.mT @ W
        return Norm(float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt()))
    return norm_by_products(lambda v: W.mT @ (W @ v), W[0])


def norm_by_products(gram: Callable[[Tensor], Tensor], like: Tensor) -> Norm:
    """Return ||C||_2 from v -> C^T C v on vectors like ``like``.

    >>> W = torch.diag(torch.linspace(1, 2, 200, dtype=torch.float64))
    >>> round(norm_by_products(lambda v: W @ (W @ v), W[0]).value, 6)
    2.0
    """
    tolerance = 1e-7 if like.dtype == torch.float64 else 1e-3

    def slack(result: LargestEigenvalue) -> float:
        # r / 2 theta^2 is the relative width in ||C||, and rounding adds its own. Twice that,
        # for among many close values the largest may come last (seen: 1.2 times).
        return result.residual / result.value + 8 * torch.finfo(like.dtype).eps

    result = largest_eigenvalue(
        gram,
        like,
        max_steps=MAX_STEPS,
        checks=CHECKS,
        enough=lambda result: slack(result) <= 2 * tolerance,
    )
    return Norm(0.0) if result.value <= 0.0 else Norm(result.value**0.5, slack(result))
