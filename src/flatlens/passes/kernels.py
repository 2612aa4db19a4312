"""Choose the kernels of attention for a sketch.

The plain kernel of ``scaled_dot_product_attention`` has second derivatives, which give the products
of Lanczos without error. It stores one score for each pair of tokens. The fused kernels store no
scores and have first derivatives only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

MOST_SCORE_BYTES = 1 << 30  # more memory for scores is not worth exact products
COPIES = 4  # tensors of the size of the scores that a second derivative stores


@dataclass(frozen=True)
class Kernels:
    """Which kernels attention runs.

    Attributes:
        plain: whether the plain kernel replaces the fused ones.
        why: a note for the user if the fused kernels stay, else "".
    """

    plain: bool = True
    why: str = ""

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Run attention by the chosen kernels."""
        if not self.plain:
            yield
            return
        with sdpa_kernel(SDPBackend.MATH):
            yield


PLAIN = Kernels()


def choose_kernels(
    scores: int, dtype: torch.dtype, samples: int, memory: int | None = None
) -> Kernels:
    """Choose the plain kernel, unless it is switched off or its scores take too much memory.

    Args:
        scores: entries of the scores of one sample, over all calls of attention.
        dtype: the precision of the network.
        samples: samples at a time.
        memory: bytes that the measurement may use; None allows ``MOST_SCORE_BYTES`` for scores.

    Returns:
        The kernels, with the reason if the fused ones stay.

    >>> choose_kernels(100, torch.float32, 8)
    Kernels(plain=True, why='')
    >>> choose_kernels(2**20, torch.float32, 8, memory=2**20).plain
    False
    """
    if not scores:
        return PLAIN
    if not torch.backends.cuda.math_sdp_enabled():
        return Kernels(False, "attention keeps its own kernel: the plain kernel is switched off")
    size = COPIES * scores * (torch.finfo(dtype).bits // 8) * samples
    limit = MOST_SCORE_BYTES if memory is None else memory
    if size <= limit:
        return PLAIN
    return Kernels(
        False,
        f"attention keeps its own kernel: scores of the plain one need about {size:,} bytes, "
        f"more than {limit:,}",
    )
