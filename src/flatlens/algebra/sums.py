"""Sums of squares over a batch that keep their digits.

Float32 is enough for most sums. On a CPU the code looks at the sizes to decide. On a device such a
look would make the host wait for the result, so float64 is used at once (``looks.can_look``).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flatlens.algebra import looks

TINY = 1e-8  # below this a derivative is squared in float64: in float32 its square may vanish

HUGE = 1e15  # above this, too: in float32 its square may overflow


def out_of_range(t: Float[Tensor, "b k"]) -> bool:
    """Whether the squares of some sample's entries may vanish or overflow in float32."""
    return looks.unusual(~squares_fit(largest_entry(t)))


def largest_entry(t: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
    """Return the maximum norm of each row, 0 where it has no entries.

    The largest and the smallest entry give it in a tenth of the time that
    `torch.linalg.vector_norm` takes on a CPU.
    """
    values = t.detach()
    if values.numel() == 0:
        return values.new_zeros(len(values))
    return torch.maximum(values.amax(1), -values.amin(1))


def squares_fit(sizes: Tensor) -> Bool[Tensor, ""]:
    """Return whether all sizes are 0, or have squares that float32 holds with all digits."""
    return ((sizes <= HUGE) & ((sizes >= TINY) | (sizes == 0))).all()


def power_of_two(size: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return the power of two that brings a size near 1, in float64; 1 for a size of 0 or inf.

    A product with a power of two has no rounding. For a size of float32 the result is a number of
    float32, too.

    >>> power_of_two(torch.tensor([3.0, 0.0])).tolist()
    [0.25, 1.0]
    """
    usable = (size > 0) & torch.isfinite(size)
    exponent = torch.frexp(torch.where(usable, size.double(), 0.5)).exponent
    largest = 1000 if size.dtype == torch.float64 else 126
    # torch.ldexp takes the power in float32, where 2^200 is infinite.
    return torch.pow(2.0, -exponent.clamp(-largest, largest).double())


def squares(t: Tensor, dim: int) -> Tensor:
    """Sum squares over ``dim``, in float64 where those of float32 may vanish."""
    if t.dtype == torch.float32 and not looks.can_look(t):
        return t.double().square().sum(dim)
    total = t.square().sum(dim)
    sizes = summed(total)
    if t.dtype == torch.float32 and bool(((sizes < TINY**2) | ~torch.isfinite(sizes)).any()):
        return t.double().square().sum(dim)
    return total


def summed(t: Tensor) -> Float[Tensor, " b"]:
    """Sum the entries of each sample, in float64."""
    return t.flatten(1).sum(1, dtype=torch.float64)


def norms(t: Tensor) -> Tensor:
    """Return the norm over the last dimension, in float64 where squares may leave float32."""
    if looks.can_look(t):
        sizes = torch.linalg.vector_norm(t, dim=-1)
        if t.dtype == torch.float64 or (float(sizes.min()) >= TINY and float(sizes.max()) <= HUGE):
            return sizes
    return torch.linalg.vector_norm(t.double(), dim=-1)


def relative(gap: Tensor, whole: Tensor) -> Float[Tensor, " b"]:
    """Return ||gap||_F / ||whole||_F of each sample; 0 / 0 is 0, anything else over 0 is inf."""
    off, size = (t.double().flatten(1).norm(dim=1) for t in (gap, whole))
    return torch.where(off > 0, off / size, 0.0)


def side_by_side(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors along their last dimension. A single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)
