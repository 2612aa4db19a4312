"""The patch that a convolution's kernel reads at each position (im2col), in any dimension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """The geometry of a convolution. Every tuple has one entry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (left, right)
    dilation: tuple[int, ...]
    groups: int
    pad_mode: str = "constant"  # how the layer pads its own input

    @property
    def pads(self) -> bool:
        """Whether there is any padding."""
        return any(p for pair in self.padding for p in pair)

    def padded(self, x: Tensor) -> Tensor:
        """Pad an input as the layer does."""
        return F.pad(x, flat_pads(self.padding), self.pad_mode) if self.pads else x


def flat_pads(pads: tuple[tuple[int, int], ...]) -> list[int]:
    """Return pairs of pads in the order of ``F.pad``: last dimension first."""
    return [v for pair in reversed(pads) for v in pair]


def patches(
    x: Float[Tensor, "k c *space"],
    kernel: tuple[int, ...],
    geometry: Geometry,
    positions: tuple[int, ...],
    into: Callable[[tuple[int, ...]], Tensor] | None = None,
) -> Float[Tensor, "k g i t"]:
    """Unfold ``x`` into the patch that the kernel sees at each position.

    Args:
        x: images.
        kernel: size of the kernel.
        geometry: how the kernel visits the images.
        positions: number of positions along each spatial dimension.
        into: gives the memory for a shape. By default the memory is fresh.

    Returns:
        Patches by image, group, entry of the patch and position.
    """
    x = geometry.padded(x)
    reach = [
        (t - 1) * s + (k - 1) * d + 1
        for t, s, k, d in zip(positions, geometry.stride, kernel, geometry.dilation, strict=True)
    ]
    # A transposed convolution with output padding may look past the end: those entries are zero.
    short = [max(0, r - size) for r, size in zip(reach, x.shape[2:], strict=True)]
    if any(short):
        x = F.pad(x, flat_pads(tuple((0, s) for s in short)))
    space = x.stride()[2:]
    windows = x.as_strided(
        (*x.shape[:2], *kernel, *positions),
        (
            *x.stride()[:2],
            *(s * d for s, d in zip(space, geometry.dilation, strict=True)),
            *(s * d for s, d in zip(space, geometry.stride, strict=True)),
        ),
    )
    unfolded = windows if into is None else into(tuple(windows.shape)).copy_(windows)
    return unfolded.reshape(x.shape[0], geometry.groups, -1, prod(positions))


def count_reads(
    image: torch.Size,
    kernel: tuple[int, ...],
    geometry: Geometry,
    positions: tuple[int, ...],
    device: torch.device,
) -> tuple[int, int]:
    """Count how often one entry of the input occurs over all patches: at least, and at most.

    The derivative of the sum of all patches by an entry is the number of patches that it is in.
    Counting by this derivative is right for every stride, dilation and padding mode.
    """
    with torch.enable_grad():
        x = torch.zeros(1, *image, device=device, requires_grad=True)
        counts = torch.autograd.grad(patches(x, kernel, geometry, positions).sum(), x)[0]
    fewest, most = torch.stack([counts.min(), counts.max()]).tolist()  # the host waits once
    return round(fewest), round(most)
