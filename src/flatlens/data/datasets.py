"""Data sets by name. Options of a data set are written behind its name: `cifar10?classes=0,1`.

    digits               1,797 UCI digits, embedded
    fashion-mnist        70,000 clothes, 28 x 28; shape=flat or image
    cifar10              60,000 colour images, 32 x 32; classes (all)
    npz:PATH             arrays x, y and, if there, x_test, y_test
    folder:PATH          images class/*.png, .jpg, .jpeg, or these in train/ and test/ or val/;
                         size (as they are), channels=3, or 1 for grey
    synthetic:gaussians  a cloud a class; n=1000, dim=20, classes=10, noise=0.25, seed=0;
                         shape=3,32,32 in place of dim makes images
    synthetic:teacher    labels of a random network; n, dim, classes, seed, noise=0, hidden=20

Several options are joined by `&`, several numbers by commas: `synthetic:teacher?n=500&dim=8`,
`folder:photos?size=64,48` (height, width).

The format is one for all: inputs `x` of shape `[n, ...]`, one sample a row; targets `y` either
integer classes `[n]` or float targets `[n]` or `[n, N]`. Pixels are divided by 255.

Published files are looked for in the folder that the environment variable FLATLENS_DATA names,
then in the cache folder, each data set in a folder of its own name (`flatlens data` lists, fetches
and verifies them):

    fashion-mnist/train-images-idx3-ubyte.gz ...        the four official files
    cifar10/cifar-10-batches-bin/data_batch_1.bin ...   the official binary version, or
    cifar10/cifar-10-batches-py/data_batch_1 ...        the python one, which is never executed
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from numpy.typing import NDArray
from torch import Tensor

from flatlens.data import images, synthetic
from flatlens.data.fetch import locate
from flatlens.data.formats import (
    CIFAR_CLASSES,
    read_cifar,
    read_cifar_python,
    read_idx,
    read_npz,
)
from flatlens.errors import FlatlensError

DIGITS_TRAIN = 1_000  # of 1,797; the rest is the test part
KEYS = ("x", "y", "x_test", "y_test")  # the arrays of an npz file
CIFAR10_COUNTS = {"training": 5_000, "test": 1_000}  # images of each class, as published
# a path may have a question mark of its own: only key=value&key=value behind it are options
OPTIONS = re.compile(r"(?P<name>.+?)\?(?P<options>\w+=[^&]*(&\w+=[^&]*)*)")


@dataclass(frozen=True)
class Data:
    """A data set in memory. Without a test part `x_test` and `y_test` have no rows."""

    x_train: Shaped[Tensor, "n ..."]
    y_train: Shaped[Tensor, "n ..."]
    x_test: Shaped[Tensor, "m ..."]
    y_test: Shaped[Tensor, "m ..."]
    classes: int  # number of classes; for float targets the number of target columns


def load(name: str, **options: Any) -> Data:
    """The data set called `name`, as in the table of this module.

    `options` are those of the table: `load("cifar10", classes=(0, 1))` is
    `load("cifar10?classes=0,1")`.

    >>> data = load("digits")
    >>> data.x_train.shape, data.y_test.shape, data.classes
    (torch.Size([1000, 64]), torch.Size([797]), 10)
    >>> load("synthetic:gaussians?n=50&dim=3").x_train.shape
    torch.Size([50, 3])
    """
    found = OPTIONS.fullmatch(name)
    reader = _reader(found["name"] if found else name)
    written = _written(name, reader, found["options"]) if found else {}
    if twice := written.keys() & options.keys():
        raise FlatlensError(f"Data {name!r} is given the option {min(twice)} twice.")
    try:
        inspect.signature(reader).bind(**written, **options)
    except TypeError as error:
        raise FlatlensError(f"Data {name!r} cannot take these options: {error}.") from error
    return reader(**written, **_plain(name, reader, options))


def _reader(name: str) -> Callable[..., Data]:
    kind, _, rest = name.partition(":")
    if name in READERS:
        return READERS[name]
    if kind in PATHS and rest:
        return partial(PATHS[kind], Path(rest))
    if kind == "synthetic" and rest in synthetic.KINDS:
        return _made(synthetic.KINDS[rest])
    known = ", ".join([*READERS, *(f"synthetic:{k}" for k in synthetic.KINDS)])
    hint = "; options are written name?key=value&key=value" if "?" in name else ""
    raise FlatlensError(f"Unknown data {name!r}; use {known}, npz:PATH or folder:PATH{hint}.")


def _written(name: str, reader: Callable[..., Data], text: str) -> dict[str, Any]:
    """Options in a name; the reader's default says what kind of value each one is."""
    defaults = _defaults(reader)
    options: dict[str, Any] = {}
    for key, _, value in (item.partition("=") for item in text.split("&")):
        if key in options:
            raise FlatlensError(f"Data {name!r} is given the option {key} twice.")
        default = defaults.get(key, "")
        try:
            if default is None:
                options[key] = tuple(int(number) for number in value.split(","))
            else:
                options[key] = type(default)(value)
        except ValueError as error:
            raise _unlike(name, key, value, default) from error
    return options


def _plain(name: str, reader: Callable[..., Data], options: dict[str, Any]) -> dict[str, Any]:
    """Options from Python, TOML or JSON, each of the kind that the reader's default says."""
    defaults = _defaults(reader)
    plain: dict[str, Any] = {}
    for key, value in options.items():
        default = defaults[key]
        try:
            plain[key] = _like(default, value)
        except (TypeError, ValueError) as error:
            raise _unlike(name, key, value, default) from error
    return plain


def _like(default: Any, value: Any) -> Any:
    """None stands for whole numbers, one or several."""
    if default is None and value is not None:
        many = value if isinstance(value, Collection) and len(value) else (value,)
        return tuple(map(operator.index, many))
    if type(default) is int:
        return operator.index(value)
    if isinstance(value, str) != isinstance(default, str):
        raise TypeError(value)
    return value if default is None else type(default)(value)


def _unlike(name: str, key: str, value: Any, default: Any) -> FlatlensError:
    kinds = {int: "a whole number", float: "a number", str: "a word"}
    kind = kinds.get(type(default), "whole numbers")
    return FlatlensError(f"Data {name!r}: {key} takes {kind}, not {value!r}.")


def digits() -> Data:
    """The 1,797 UCI digits, 8 x 8 pixels in [0, 1], flattened: 1,000 to train, 797 to test.

    The split is a fixed permutation stored in the file, so it never depends on a generator.
    """
    source = resources.files("flatlens.data") / "digits.npz"
    with source.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        x, y, order = file["x"], file["y"], file["order"]
    pixels = torch.from_numpy(x[order].astype(np.float32) / 16)
    labels = torch.from_numpy(y[order].astype(np.int64))
    k = DIGITS_TRAIN
    return Data(pixels[:k], labels[:k], pixels[k:], labels[k:], classes=10)


def fashion_mnist(shape: str = "flat") -> Data:
    """FashionMNIST (Xiao et al., 2017): 60,000 to train, 10,000 to test, pixels / 255.

    `shape` is "flat" (784 inputs, what the paper's MLP reads) or "image" (1 x 28 x 28).
    """
    if shape not in ("flat", "image"):
        raise FlatlensError(f"Unknown shape {shape!r} of fashion-mnist; use flat or image.")
    x, y, x_test, y_test = locate("fashion-mnist")
    train, test = _idx_pair(x, y, shape), _idx_pair(x_test, y_test, shape)
    return Data(*train, *test, classes=10)


def _idx_pair(images: Path, labels: Path, shape: str) -> tuple[Tensor, Tensor]:
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.shape[1:] != (28, 28):
        raise FlatlensError(f"{images} holds images of {x.shape[1]} x {x.shape[2]} pixels, not 28.")
    if len(x) != len(y):
        raise FlatlensError(f"{labels} has {len(y)} labels for the {len(x)} images of {images}.")
    if y.max() > 9:
        raise FlatlensError(f"{labels} has the label {y.max()}, but the classes are 0 to 9.")
    return _pixels(x.reshape(len(x), *((784,) if shape == "flat" else (1, 28, 28)))), _labels(y)


def cifar10(classes: int | Sequence[int] | None = None) -> Data:
    """CIFAR-10 (Krizhevsky, 2009): 3 x 32 x 32 pixels / 255, 50,000 to train, 10,000 to test.

    `classes=(0, 1)` keeps the images of these classes, in the published order. Targets stay class
    indices among ten, so that a network has ten outputs whatever the choice, as in the paper.
    A copy cut to some classes serves them; every class asked for must be complete.
    """
    classes = (classes,) if isinstance(classes, int) else classes
    wanted = sorted(set(range(CIFAR_CLASSES) if classes is None else classes))
    if not wanted or not set(wanted) <= set(range(CIFAR_CLASSES)):
        raise FlatlensError(f"Classes of cifar10 are numbers from 0 to 9, not {classes!r}.")
    files = locate("cifar10")
    train = _cifar_part(files[:-1], wanted, "training")
    test = _cifar_part(files[-1:], wanted, "test")
    return Data(*train, *test, classes=CIFAR_CLASSES)


def _cifar_part(files: list[Path], wanted: list[int], part: str) -> tuple[Tensor, Tensor]:
    kept = []
    reader = read_cifar if files[0].suffix == ".bin" else read_cifar_python
    for pixels, labels in map(reader, files):
        choice = np.isin(labels, wanted)
        kept.append((pixels[choice], labels[choice]))
    x, y = (np.concatenate(arrays) for arrays in zip(*kept, strict=True))
    counts = np.bincount(y, minlength=CIFAR_CLASSES)
    for label in wanted:
        if counts[label] != CIFAR10_COUNTS[part]:
            raise FlatlensError(
                f"{files[0].parent} is incomplete: its {part} files hold {counts[label]} images of "
                f"class {label} instead of {CIFAR10_COUNTS[part]}."
            )
    return _pixels(x), _labels(y)


def _pixels(x: UInt8[np.ndarray, "n ..."]) -> Float[Tensor, "n ..."]:
    return torch.from_numpy(x.astype(np.float32)).div_(255)


def _labels(y: Int[np.ndarray, " n"] | UInt8[np.ndarray, " n"]) -> Int[Tensor, " n"]:
    return torch.from_numpy(y.astype(np.int64))


def npz(path: Path) -> Data:
    """Arrays `x`, `y` and, if there, `x_test`, `y_test` of a NumPy `.npz` file.

    Float arrays keep their precision, integers become int64 (class labels, token ids); nothing
    is scaled. Pickled objects are never loaded.
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


def folder(path: Path, size: int | Sequence[int] | None = None, channels: int = 3) -> Data:
    """Images in folders of their classes; a test part where there are train/ and test/ or val/.

    `size` (one number, or height and width) brings all to one size.
    """
    names, (x, y), (x_test, y_test) = images.read(path, size, channels)
    return Data(_pixels(x), _labels(y), _pixels(x_test), _labels(y_test), classes=len(names))


def _made(maker: Callable[..., synthetic.Arrays]) -> Callable[..., Data]:
    """A maker of arrays as a reader: one half to train, the other to test."""

    @wraps(maker)
    def reader(**options: Any) -> Data:
        arrays, labels = maker(**options)
        x, y = torch.from_numpy(arrays.astype(np.float32)), torch.from_numpy(labels)
        n = len(x) // 2
        classes = {**_defaults(maker), **options}["classes"]
        return Data(x[:n], y[:n], x[n:], y[n:], classes=classes)

    return reader


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {key: p.default for key, p in inspect.signature(function).parameters.items()}


READERS: dict[str, Callable[..., Data]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
}
PATHS: dict[str, Callable[..., Data]] = {"npz": npz, "folder": folder}
