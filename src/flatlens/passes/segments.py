"""Segments: the numbers of samples that have the same columns, and how segments are aligned."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatlens.probes import (
    REQUIRED,
    UNKNOWN_VALUES,
    Array,
    FirstLayerProbe,
    InputProbe,
    LayerProbe,
    ParameterProbe,
    declared,
)

Key = tuple[str | int, ...]
Shapes = tuple[tuple[Key, torch.Size], ...]
Arrays = dict[Key, dict[str, Array]]  # {owner: {name: array over samples}}
OWNERS = {
    "input": InputProbe,
    "layer": LayerProbe,
    "first": FirstLayerProbe,
    "parameter": ParameterProbe,
}
COLUMNS = {owner: declared(kind) for owner, kind in OWNERS.items()}
WHOLE_NUMBERS = ("rank", "rank_through", "slot")


class Segment:
    """The numbers of samples that have the same columns.

    They are stored in few large tables. Hundreds of small tensors, allocated beside the large ones
    of a chunk, would fragment the heap.

    Attributes:
        room: expected number of samples, for which a new table allocates memory.
    """

    def __init__(self, shapes: Shapes, room: int) -> None:
        self.shapes, self.room = shapes, room
        self._tables: list[Tensor] = []
        self._filled = 0  # rows of the last table
        self._spans: list[tuple[int, int]] = []  # first sample and number of samples
        self._n = 0

    def add(self, start: int, columns: list[Tensor]) -> None:
        """Add the columns of a chunk whose first sample is ``start``."""
        block = torch.cat([column.reshape(len(column), -1).double() for column in columns], 1)
        samples = len(block)
        if not self._tables or self._filled + samples > len(self._tables[-1]):
            self._trim()
            room = max(self.room, self._n, samples)
            self._tables.append(block.new_empty(room, block.shape[1]))
            self._filled = 0
        self._tables[-1][self._filled : self._filled + samples] = block
        self._filled += samples
        self._spans.append((start, samples))
        self._n += samples

    def _trim(self) -> None:
        """Cut off the rows of the last table that are not filled."""
        if self._tables:
            self._tables[-1] = self._tables[-1][: self._filled]

    def samples(self) -> Array:
        """Return the indices of its samples."""
        return np.concatenate([np.arange(start, start + k) for start, k in self._spans])

    def arrays(self) -> Arrays:
        """Return the columns of its samples."""
        self._trim()
        tables, start = self._tables, 0
        table = (tables[0] if len(tables) == 1 else torch.cat(tables)).cpu().numpy()
        arrays: Arrays = {}
        for key, shape in self.shapes:
            values = table[:, start : start + shape.numel()].reshape(len(table), *shape)
            start += shape.numel()
            *owner, name = key if len(key) > 1 else (*key, "")
            values = values.astype(np.int64) if name in WHOLE_NUMBERS else values
            arrays.setdefault(tuple(owner), {})[str(name)] = values
        return arrays


def aligned(segments: list[tuple[Array, Arrays]], n: int) -> Arrays:
    """Join segments; a sample without a column gets the neutral value of that column.

    Args:
        segments: the segments, each with its samples and columns.
        n: number of all samples.
    """
    together: Arrays = {}
    for owner in dict.fromkeys(owner for _, arrays in segments for owner in arrays):
        having = [(samples, arrays[owner]) for samples, arrays in segments if owner in arrays]
        together[owner] = _aligned_owner(str(owner[0]), having, n)
    return together


def _aligned_owner(
    kind: str, segments: list[tuple[Array, dict[str, Array]]], n: int
) -> dict[str, Array]:
    names = dict.fromkeys(name for _, arrays in segments for name in arrays)
    columns = {}
    for name in names:
        pieces = []
        for samples, arrays in segments:
            filled = arrays if name in arrays else complete(kind, arrays, len(samples))
            pieces.append((samples, filled[name]))
        declaration = COLUMNS.get(kind, {}).get(name)
        columns[name] = filled_up(pieces, n, 0.0 if declaration is None else declaration.absent)
    if kind == "layer":
        columns["used"] = filled_up([(k, np.ones(len(k))) for k, _ in segments], n, 0.0)
    return columns


def filled_up(pieces: list[tuple[Array, Array]], n: int, absent: float) -> Array:
    """Build one array of all samples from arrays of some samples, as wide as the widest.

    >>> filled_up([(np.array([1]), np.array([[5.0]])), (np.array([0]), np.ones((1, 2)))], 3, 0.0)
    array([[1., 1.],
           [5., 0.],
           [0., 0.]])
    """
    shape = np.max([values.shape[1:] for _, values in pieces], axis=0).astype(int)
    whole = np.full((n, *shape), absent).astype(pieces[0][1].dtype)
    for samples, values in pieces:
        places = (samples, slice(values.shape[1])) if values.ndim == 2 else (samples,)
        whole[places] = values
    return whole


def complete(owner: str, arrays: dict[str, Array], n: int) -> dict[str, Any]:
    """Fill in the columns that a pass did not measure with their declared default."""
    filled: dict[str, Any] = dict(arrays)
    for name, declaration in COLUMNS[owner].items():
        if name in filled or not declaration.samples:
            continue
        missing = declaration.missing
        if missing == REQUIRED:
            raise AssertionError(f"the pass did not measure the column {name} of {owner}")
        if missing == UNKNOWN_VALUES:
            filled[name] = np.full((n, 1), np.nan)
        elif isinstance(missing, str):
            filled[name] = filled[missing]
        else:
            kind = np.int64 if name in WHOLE_NUMBERS else np.float64
            filled[name] = None if missing is None else np.full(n, missing, kind)
    return filled
