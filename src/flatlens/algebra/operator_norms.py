"""Norms of a layer's weight: of the whole map, of its kernel, and Frobenius.

The operator norm of a dense layer is the spectral norm of its weight. That of a convolution is the
norm of the map from one whole image to one whole image, which depends on the image size, stride,
padding and dilation. Small operators are decomposed exactly. Large ones take Lanczos on C^T C from
random starts. It gives a value from below and an upper end, which fails with a probability of at
most 1e-9 (``certified_norm``). The upper end is what enters a bound.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flatlens.algebra.certified_norm import RISK, largest_eigenvalue
from flatlens.algebra.sums import power_of_two
from flatlens.algebra.wide_tensor import bytes_of

EXACT_SIZE = 64  # operators with a side up to this are decomposed exactly
MAX_STEPS = 400
WIDTH = 0.1  # of the upper end of ||C||^2: an inequality needs a true upper end, not its digits
MOST_REMEMBERED = 10_000
# Sizes of weights that are not scaled.
IN_RANGE = {torch.float32: (1e-5, 1e5), torch.float64: (1e-60, 1e60)}


class Norm(NamedTuple):
    """A norm, the relative distance to its upper end, and the risk that it is larger than that."""

    value: float
    slack: float = 0.0
    risk: float = 0.0

    @property
    def upper(self) -> float:
        """The upper end of the norm."""
        return self.value * (1 + self.slack)


@dataclass(frozen=True)
class WeightNorms:
    """Three norms of one layer.

    Attributes:
        operator: norm of the map from input to output; NaN where it was not asked for.
        kernel: spectral norm of the flattened kernel.
        frobenius: Frobenius norm of the weight.
        slack: relative distance from ``operator`` to its upper end, which is the norm times 1 +
            slack.
        kernel_slack: relative distance from ``kernel`` to its upper end.
        risk: 0 where the norms were computed in full. Where an iteration gave one, it is the
            probability, over its random starts, that the norm is larger than its upper end.
    """

    operator: float
    kernel: float
    frobenius: float
    slack: float = 0.0
    kernel_slack: float = 0.0
    risk: float = 0.0

    @classmethod
    def largest(cls, several: Iterable[WeightNorms]) -> WeightNorms:
        """Return the largest of each number, for a layer whose samples use different weights."""
        return cls(*(max(numbers) for numbers in zip(*map(astuple, several), strict=True)))

    def slack_of(self, norm: str) -> float:
        """Return the relative distance of one norm to its upper end."""
        return {"operator": self.slack, "kernel": self.kernel_slack}.get(norm, 0.0)


@runtime_checkable
class HasNorms(Protocol):
    """The interface that a layer needs for its norms."""

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


def weight_norms(layer: HasNorms, operator: bool = True) -> WeightNorms:
    """Return the norms of a layer's weight; those of the same weight are remembered.

    A weight is recognised by its entries, not by its tensor: a write through ``.data`` leaves no
    other trace.

    Args:
        layer: the layer.
        operator: whether the operator norm is asked for, which may take an iteration.
    """
    W = layer.matrix
    frobenius = float(torch.linalg.vector_norm(W, dtype=torch.float64))
    entries = zlib.crc32(bytes_of(layer.weight))
    key = (W.dtype, W.shape, layer.way, layer.in_shape[1:], frobenius, entries, operator)
    if key not in _remembered:
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = _norms(layer, frobenius, operator)
    return _remembered[key]


def _norms(layer: HasNorms, frobenius: float, operator: bool) -> WeightNorms:
    """Compute the norms of a weight; a small or large one is scaled first.

    Lanczos takes the squares of C^T C v, fourth powers of the weight.
    """
    dtype, scale = layer.weight.dtype, 1.0
    size = float(layer.weight.detach().abs().max())
    smallest, largest = IN_RANGE[dtype]
    if not smallest <= size <= largest:
        scale = float(power_of_two(torch.tensor(size, dtype=dtype, device="cpu")))
        weight = (layer.weight.detach().double() * scale).to(dtype)
        layer = replace(layer, weight=weight)  # type: ignore[type-var]
        frobenius = float(torch.linalg.vector_norm(layer.matrix, dtype=torch.float64)) / scale
    kernels = [matrix_norm(w) for w in layer.matrix]
    kernel = max(kernels)
    kernel_slack = max(norm.slack for norm in kernels)
    of_map = layer.operator_norm(kernel) if operator else Norm(math.nan)
    return WeightNorms(
        of_map.value / scale,
        kernel.value / scale,
        frobenius,
        slack=max(of_map.slack, kernel_slack),
        kernel_slack=kernel_slack,
        risk=max(norm.risk for norm in (of_map, *kernels)),
    )


def matrix_norm(W: Tensor) -> Norm:
    """Return ||W||_2."""
    if min(W.shape) <= EXACT_SIZE:
        W = W.double()
        gram = W @ W.mT if W.shape[0] <= W.shape[1] else W.mT @ W
        return Norm(float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt()))
    return norm_by_products(lambda v: (v @ W.mT) @ W, W[0])


def norm_by_products(gram: Callable[[Tensor], Tensor], like: Tensor) -> Norm:
    """Return ||C||_2 from rows v -> rows C^T C v on vectors like ``like``.

    >>> W = torch.diag(torch.linspace(1, 2, 200, dtype=torch.float64))
    >>> norm = norm_by_products(lambda v: v @ W @ W, W[0])
    >>> round(norm.value, 6), norm.upper >= 2
    (2.0, True)
    """
    tolerance = 2e-7 if like.dtype == torch.float64 else 4e-3
    top = largest_eigenvalue(gram, like, max_steps=MAX_STEPS, residual=tolerance, width=WIDTH)
    if top.value <= 0.0:
        return Norm(0.0)
    rounding = 8 * torch.finfo(like.dtype).eps
    return Norm(top.value**0.5, (top.upper / top.value) ** 0.5 - 1 + rounding, RISK)
