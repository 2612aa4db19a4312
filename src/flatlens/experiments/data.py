"""Data sets by name: `digits` (embedded) and `npz:PATH` (anyone's arrays).

The format is one for all: inputs `x` of shape `[n, ...]`, one sample a row; targets `y` either
integer classes `[n]` or float targets `[n]` or `[n, N]`.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from flatlens.errors import FlatlensError

DIGITS_TRAIN = 1_000  # of 1,797; the rest is the test part
KEYS = ("x", "y", "x_test", "y_test")  # the arrays of an npz file


@dataclass(frozen=True)
class Data:
    """A data set in memory. Without a test part `x_test` and `y_test` have no rows."""

    x_train: Shaped[Tensor, "n ..."]
    y_train: Shaped[Tensor, "n ..."]
    x_test: Shaped[Tensor, "m ..."]
    y_test: Shaped[Tensor, "m ..."]
    classes: int  # number of classes; for float targets the number of target columns


def load(name: str) -> Data:
    """The data set called `name`: `digits` or `npz:PATH`.

    >>> data = load("digits")
    >>> data.x_train.shape, data.y_test.shape, data.classes
    (torch.Size([1000, 64]), torch.Size([797]), 10)
    """
    if name == "digits":
        return digits()
    kind, colon, path = name.partition(":")
    if kind == "npz" and colon and path:
        return npz(Path(path))
    raise FlatlensError(f"Unknown data {name!r}; use digits or npz:PATH.")


def digits() -> Data:
    """The 1,797 UCI digits, 8 x 8 pixels in [0, 1], flattened: 1,000 to train, 797 to test.

    The split is a fixed permutation stored in the file, so it never depends on a generator.
    """
    source = resources.files("flatlens.experiments") / "digits.npz"
    with source.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        x, y, order = file["x"], file["y"], file["order"]
    pixels = torch.from_numpy(x[order].astype(np.float32) / 16)
    labels = torch.from_numpy(y[order].astype(np.int64))
    k = DIGITS_TRAIN
    return Data(pixels[:k], labels[:k], pixels[k:], labels[k:], classes=10)


def npz(path: Path) -> Data:
    """Arrays `x`, `y` and, if there, `x_test`, `y_test` of a NumPy `.npz` file.

    Float arrays keep their precision, integers become int64 (class labels, token ids); nothing
    is scaled. Pickled objects are never loaded.
    """
    arrays = _read(path)
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


def _read(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise FlatlensError(f"{path} is a single array; save it with numpy.savez(x=, y=).")
            return {key: file[key] for key in KEYS if key in file.files}
    except FlatlensError:
        raise
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if "Object arrays" in str(error):
            why = "it holds arrays of Python objects, which are never loaded; save numbers"
        else:
            why = "it is not a NumPy .npz file"
        raise FlatlensError(f"Cannot read {path}: {why}.") from error


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
