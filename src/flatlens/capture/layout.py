"""Layouts: where a tensor keeps its samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The position of samples in a tensor: dimension ``dim`` has size batch x ``repeat``.

    ``inner`` says that the sample is the fast index of a flattened dimension, so that its entries
    are t0s0, t0s1, t1s0, ... for tokens t and samples s.
    """

    dim: int = 0
    repeat: int = 1
    inner: bool = False

    def fits(self, t: Tensor, batch: int) -> bool:
        """Whether ``t`` can have this layout with ``batch`` samples."""
        return t.dim() > self.dim and t.shape[self.dim] == batch * self.repeat

    def split(self, t: Tensor, batch: int) -> Tensor:
        """Return ``t`` with the samples as its first dimension."""
        if self.repeat == 1:
            return t.movedim(self.dim, 0)
        sizes = (self.repeat, batch) if self.inner else (batch, self.repeat)
        return t.unflatten(self.dim, sizes).movedim(self.dim + self.inner, 0)


def split(t: Tensor, layout: Layout | None, batch: int) -> Tensor:
    """Return ``t`` as [batch, ...]. Without a layout the batch is one sample that owns all of t."""
    return t.unsqueeze(0) if layout is None else layout.split(t, batch)


def find_layout(single: Tensor, pair: Tensor) -> Layout | None:
    """Find the layout under which the first sample of ``pair`` equals ``single``.

    Returns None where no layout or more than one layout fits. Such samples are measured one at a
    time.
    """
    grown = [d for d in range(single.dim()) if single.shape[d] != pair.shape[d]]
    if single.dim() != pair.dim() or len(grown) != 1:
        return None
    dim, repeat = grown[0], single.shape[grown[0]]
    if pair.shape[dim] != 2 * repeat:
        return None
    fitting = []
    for inner in (False, True) if repeat > 1 else (False,):
        layout = Layout(dim, repeat, inner)
        if close(layout.split(pair, 2)[0], layout.split(single, 1)[0]):
            fitting.append(layout)
    return fitting[0] if len(fitting) == 1 else None


def close(a: Tensor, b: Tensor, precision: torch.dtype | None = None) -> bool:
    """Whether two tensors are equal up to the rounding that another batch size causes.

    Args:
        a: a tensor.
        b: the tensor to compare with.
        precision: the precision that both were computed in; None stands for that of ``a``.
    """
    return a.shape == b.shape and bool(closeness(a, b, precision))


def closeness(a: Tensor, b: Tensor, precision: torch.dtype | None = None) -> Bool[Tensor, ""]:
    """Return the result of ``close`` for tensors of one shape as a tensor, which is not read."""
    a, b = a.detach(), b.detach()
    if not b.numel():
        return torch.ones((), dtype=torch.bool, device=b.device)
    limits = torch.finfo(precision or a.dtype)
    # In half precision another batch size uses other kernels, which change the last two or three
    # bits.
    tolerance = {64: 1e-8, 32: 1e-3}.get(limits.bits, 8 * limits.eps)
    return ((a - b).abs() <= tolerance * b.abs().max()).all()
