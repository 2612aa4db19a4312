"""Data sets in NumPy's npz files: arrays x, y and, if there, x_test, y_test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from flatlens.data.arrays import Data
from flatlens.data.formats import read_npz
from flatlens.errors import FlatlensError

KEYS = ("x", "y", "x_test", "y_test")


def read_arrays(path: Path) -> Data:
    """Read a data set from a NumPy `.npz` file.

    Float arrays keep their precision. Integers become int64 (class labels, token ids). Nothing is
    scaled. Pickled objects are never loaded.

    Args:
        path: a file with arrays `x`, `y` and, for a test part, `x_test`, `y_test`.

    Raises:
        FlatlensError: if an array is missing, or shapes or types do not fit together.
    """
    arrays = read_npz(path, KEYS)
    has_test = "x_test" in arrays or "y_test" in arrays
    needed = KEYS if has_test else KEYS[:2]
    if missing := [key for key in needed if key not in arrays]:
        raise FlatlensError(
            f"{path} has no array {' and no '.join(missing)}; "
            "x and y are needed, x_test and y_test come as a pair."
        )
    x, y = _pair(path, arrays, "x", "y")
    if len(x) == 0:
        raise FlatlensError(f"{path} holds no samples: x has shape {list(x.shape)}.")
    if not has_test:
        return Data(x, y, x[:0], y[:0], classes=_classes(path, y))
    x_test, y_test = _pair(path, arrays, "x_test", "y_test")
    if x_test.shape[1:] != x.shape[1:] or y_test.shape[1:] != y.shape[1:]:
        raise FlatlensError(
            f"{path}: one test sample has shape {list(x_test.shape[1:])} with target "
            f"{list(y_test.shape[1:])}, one training sample {list(x.shape[1:])} with target "
            f"{list(y.shape[1:])}."
        )
    if x_test.is_floating_point() != x.is_floating_point() or (
        y_test.is_floating_point() != y.is_floating_point()
    ):
        raise FlatlensError(f"{path}: training and test arrays mix integers and floats.")
    return Data(x, y, x_test, y_test, classes=_classes(path, torch.cat([y, y_test])))


def _pair(
    path: Path, arrays: dict[str, NDArray[np.generic]], x_key: str, y_key: str
) -> tuple[Shaped[Tensor, "n ..."], Shaped[Tensor, "n ..."]]:
    x, y = (_tensor(path, key, arrays[key]) for key in (x_key, y_key))
    if x.ndim < 2 or y.ndim not in (1, 2) or len(x) != len(y):
        raise FlatlensError(
            f"{path}: {x_key} must be [n, ...] and {y_key} [n] or [n, N] with the same n, "
            f"but their shapes are {list(x.shape)} and {list(y.shape)}."
        )
    if y.ndim == 2 and not y.is_floating_point():
        raise FlatlensError(f"{path}: integer {y_key} are classes and must have shape [n].")
    return x, y


def _tensor(path: Path, key: str, array: NDArray[np.generic]) -> Tensor:
    if array.dtype.kind == "f" and array.dtype.itemsize <= 8:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64))
    raise FlatlensError(f"{path}: {key} has dtype {array.dtype}; use floats or integers.")


def _classes(path: Path, y: Int[Tensor, " n"] | Float[Tensor, "n ..."]) -> int:
    if y.is_floating_point():
        return y.shape[1] if y.ndim == 2 else 1
    if int(y.min()) < 0:
        raise FlatlensError(f"{path}: class labels count from 0, but the smallest is {y.min()}.")
    return int(y.max()) + 1
