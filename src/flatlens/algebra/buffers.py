"""Memory that is reused from chunk to chunk, for speed alone: any fresh tensor would do.

On a CPU torch takes its memory from the C library. On Linux the C library returns freed memory to
the system: every block above a threshold, and what lies free at the end of its heap. Touching new
memory costs page faults. Both thresholds are raised (mallopt(3)), so that later measurements of the
paper's networks have almost no page faults.

The largest buffers lie above any threshold. numpy allocates them, because it asks the system for
huge pages. The first touch of 64 MiB then takes 10 ms; torch's memory takes 38 ms. Smaller buffers
do without huge pages. When free memory is fragmented, the system has to make huge pages first, and
the first measurement of the paper's LeNet took 200 ms longer. Small buffers are kept for the next
measurement, whatever the C library does.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Hashable
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flatlens import tuning

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Buffers:
    """Uninitialised tensors by key, filled anew for each chunk."""

    _left: ClassVar[list[dict[Hashable, Tensor]]] = []

    def __init__(self) -> None:
        try:
            self._by_key = self._left.pop()  # one step, because threads may measure side by side
        except IndexError:
            self._by_key = {}
            keep_freed_memory()

    def leave(self) -> None:
        """Leave the small buffers for the next measurement."""
        small = {
            key: t
            for key, t in self._by_key.items()
            if t.device.type == "cpu" and t.nbytes < tuning.LARGEST_BUFFER_LEFT_BYTES
        }
        if sum(t.nbytes for t in small.values()) <= tuning.MOST_BUFFER_BYTES_LEFT:
            self._left[:] = [small]

    def get(self, key: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised tensor of ``shape``, the same memory for the same key."""
        size, kind, buffer = prod(shape), (like.dtype, like.device), self._by_key.get(key)
        if buffer is None or buffer.numel() < size or (buffer.dtype, buffer.device) != kind:
            buffer = _allocate(size, like)
            self._by_key[key] = buffer
        return buffer[:size].view(shape)


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library of Linux keep freed memory; do nothing where there is another C library."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, tuning.LARGEST_KEPT_BLOCK_BYTES)
    mallopt(M_TRIM_THRESHOLD, tuning.KEPT_HEAP_BYTES)


def _allocate(size: int, like: Tensor) -> Tensor:
    need = size * like.element_size()
    if like.device.type != "cpu" or need < tuning.LARGEST_KEPT_BLOCK_BYTES:
        return like.new_empty(size)
    memory = np.empty(need + 64, np.uint8)
    start = -memory.ctypes.data % 64  # aligned, as torch's own memory is
    return torch.from_numpy(memory[start : start + need]).view(like.dtype)
