"""Random output directions, which belong to a sample and do not depend on its chunk."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from flatlens.algebra.wide_tensor import HALF
from flatlens.capture.inputs import Inputs
from flatlens.losses import RootProducts


class SampleStreams:
    """One stream of random numbers for each sample, seeded by the sample's content.

    Attributes:
        seed: the seed of all streams.
        start: the index of the first sample of the batch.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.start = 0
        self._seeds: list[list[int]] = []  # of each sample of the batch
        self._seen: Counter[int] = Counter()  # tells equal samples apart

    def expect(self, inputs: Inputs, start: int) -> None:
        """Hash the samples of a batch. On a device all samples are copied to the host at once."""
        on_host = [t.detach().cpu() for t in inputs.tensors]
        self.start, self._seeds = start, []
        for i in range(inputs.n):
            digest = hashlib.blake2b(digest_size=8)
            for t in on_host:
                flat = t[i].contiguous().reshape(-1)
                # A sample in half precision has the same directions as its values in float32.
                flat = flat.float() if flat.dtype in HALF else flat
                digest.update(flat.view(torch.uint8).numpy().tobytes())
            key = int.from_bytes(digest.digest(), "big")
            self._seeds.append([self.seed, key, self._seen[key]])
            self._seen[key] += 1

    def of(self, samples: slice) -> list[np.random.Generator]:
        """Return a fresh stream for each of some samples of the batch."""
        places = slice(samples.start - self.start, samples.stop - self.start)
        return [np.random.default_rng(seeds) for seeds in self._seeds[places]]


class Signs:
    """Random directions of +-1 for each sample.

    Args:
        f: the outputs, [b, N].
        streams: a stream of random numbers per sample.
        root: products with a root R of a loss, where R^T f is measured; else None.
    """

    def __init__(
        self, f: Tensor, streams: list[np.random.Generator], root: RootProducts | None
    ) -> None:
        self.f, self.streams, self.root = f, streams, root
        self.width = f.shape[1] if root is None else root.width

    def next(self) -> Tensor:
        """Draw one direction for each sample, [b, width]."""
        drawn = [stream.integers(0, 2, self.width, dtype=np.int8) for stream in self.streams]
        return torch.from_numpy(2 * np.stack(drawn) - 1).to(self.f)

    def skip(self, count: int) -> None:
        """Draw and discard directions, so that later directions stay the same."""
        for _ in range(count):
            self.next()

    def to_outputs(self, v: Tensor) -> Tensor:
        """Return R v, the direction in the space of the outputs."""
        return v if self.root is None else self.root.times(v)

    def from_outputs(self, w: Tensor) -> Tensor:
        """Return R^T w, back from the space of the outputs."""
        return w if self.root is None else self.root.transposed_times(w)
