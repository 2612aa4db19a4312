"""Load data sets by name. Options are written after the name: `cifar10?classes=0,1`.

    digits               1,797 UCI digits, embedded
    fashion-mnist        70,000 clothes, 28 x 28; shape=flat or image
    cifar10              60,000 colour images, 32 x 32; classes (all)
    npz:PATH             arrays x, y and, if there, x_test, y_test
    folder:PATH          images class/*.png, .jpg, .jpeg, or these in train/ and test/ or val/;
                         size (as they are), channels=3, or 1 for grey
    text:PATH            sequences of tokens, and the token that follows each; tokenizer=bytes, or
                         the name or folder of one of Transformers; length=64
    synthetic:gaussians  a cloud for each class; n=1000, dim=20, classes=10, noise=0.25, seed=0;
                         shape=3,32,32 in place of dim makes images
    synthetic:teacher    labels of a random network; n, dim, classes, seed, noise=0, hidden=20

Every data set takes standardize=true. It shifts and scales the training inputs to mean 0 and
standard deviation 1 (images channel by channel). The test inputs are changed by the same numbers.

Several options are joined by `&`, several numbers by commas: `synthetic:teacher?n=500&dim=8`,
`folder:photos?size=64,48` (height, width).

All data sets have one format: inputs `x` of shape `[n, ...]`, one sample per row. Targets `y` are
integer classes `[n]`, or float targets `[n]` or `[n, N]`. Pixels are divided by 255.

Each published data set has a folder of its own name. It is searched in the folder that the
environment variable FLATLENS_DATA names, then in the cache folder. `flatlens data` lists, fetches
and verifies the files:

    fashion-mnist/train-images-idx3-ubyte.gz ...        the four official files
    cifar10/cifar-10-batches-bin/data_batch_1.bin ...   the official binary version, or
    cifar10/cifar-10-batches-py/data_batch_1 ...        the Python one, which is never executed
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatlens.arguments import no_type_check, typed_arguments
from flatlens.data import images, synthetic
from flatlens.data.arrays import Data, labels, pixels
from flatlens.data.image_sets import cifar10, digits, fashion_mnist
from flatlens.data.npz_files import read_arrays
from flatlens.data.options import defaults_of, from_text, from_values
from flatlens.data.standardize import with_option
from flatlens.data.text import read_text
from flatlens.errors import FlatlensError

__all__ = ["Data", "load"]

# a path may contain a question mark: only key=value&key=value after it are options
OPTIONS = re.compile(r"(?P<name>.+?)\?(?P<options>\w+=[^&]*(&\w+=[^&]*)*)")


@no_type_check
@typed_arguments
def load(name: str, **options: Any) -> Data:
    """Load a data set by name.

    Args:
        name: a name of the table in this module, with or without options after it.
        options: options of the table: `load("cifar10", classes=(0, 1))` is
            `load("cifar10?classes=0,1")`.

    Returns:
        Training and test samples in memory.

    Raises:
        FlatlensError: if the name or an option is unknown, or a file is missing or damaged.

    >>> data = load("digits")
    >>> data.x_train.shape, data.y_test.shape, data.classes
    (torch.Size([1000, 64]), torch.Size([797]), 10)
    >>> load("synthetic:gaussians?n=50&dim=3").x_train.shape
    torch.Size([50, 3])
    """
    match = OPTIONS.fullmatch(name)
    reader = with_option(_reader(match["name"] if match else name))
    written = from_text(name, reader, match["options"]) if match else {}
    if twice := written.keys() & options.keys():
        raise FlatlensError(f"Data {name!r} is given the option {min(twice)} twice.")
    try:
        inspect.signature(reader).bind(**written, **options)
    except TypeError as error:
        raise FlatlensError(f"Data {name!r} cannot take these options: {error}.") from error
    return reader(**written, **from_values(name, reader, options))


def _reader(name: str) -> Callable[..., Data]:
    kind, _, rest = name.partition(":")
    if name in READERS:
        return READERS[name]
    if kind in PATHS and rest:
        return partial(PATHS[kind], Path(rest))
    if kind == "synthetic" and rest in synthetic.KINDS:
        return _synthetic(synthetic.KINDS[rest])
    known = ", ".join([*READERS, *(f"synthetic:{k}" for k in synthetic.KINDS)])
    hint = "; options are written name?key=value&key=value" if "?" in name else ""
    raise FlatlensError(
        f"Unknown data {name!r}; use {known}, npz:PATH, folder:PATH or text:PATH{hint}."
    )


def folder(path: Path, size: int | Sequence[int] | None = None, channels: int = 3) -> Data:
    """Read images from class folders; train/ with test/ or val/ give a test part.

    Args:
        path: the folder.
        size: one number, or height and width, to which all images are scaled.
        channels: 3 for colour, 1 for grey.
    """
    names, (x, y), (x_test, y_test) = images.read(path, size, channels)
    return Data(pixels(x), labels(y), pixels(x_test), labels(y_test), classes=len(names))


def _synthetic(maker: Callable[..., synthetic.Arrays]) -> Callable[..., Data]:
    """Turn a generator of arrays into a reader: half of the samples to train, half to test."""

    @wraps(maker)
    def reader(**options: Any) -> Data:
        arrays, classes_of_samples = maker(**options)
        x, y = torch.from_numpy(arrays.astype(np.float32)), torch.from_numpy(classes_of_samples)
        n = len(x) // 2
        classes = {**defaults_of(maker), **options}["classes"]
        return Data(x[:n], y[:n], x[n:], y[n:], classes=classes)

    return reader


READERS: dict[str, Callable[..., Data]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
}
PATHS: dict[str, Callable[..., Data]] = {
    "npz": read_arrays,
    "folder": folder,
    "text": read_text,
}
