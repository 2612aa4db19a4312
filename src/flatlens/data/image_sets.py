"""The image data sets with names: the embedded digits, FashionMNIST and CIFAR-10.

Files of the last two are found by :mod:`flatlens.data.places`:

    fashion-mnist/train-images-idx3-ubyte.gz ...        the four official files
    cifar10/cifar-10-batches-bin/data_batch_1.bin ...   the official binary version, or
    cifar10/cifar-10-batches-py/data_batch_1 ...        the Python one, which is never executed
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatlens.data.arrays import Data, labels, pixels
from flatlens.data.formats import CIFAR_CLASSES, read_cifar, read_cifar_python, read_idx
from flatlens.data.places import locate
from flatlens.errors import FlatlensError

DIGITS_TRAIN = 1_000  # of 1,797; the rest is the test part
CIFAR10_COUNTS = {"training": 5_000, "test": 1_000}  # images of each class, as published


def digits() -> Data:
    """Load the 1,797 UCI digits, 8 x 8 pixels in [0, 1], flattened: 1,000 to train, 797 to test.

    The split is a fixed permutation stored in the file. It does not depend on a generator.
    """
    source = resources.files("flatlens.data") / "digits.npz"
    with source.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        x, y, order = file["x"], file["y"], file["order"]
    inputs = torch.from_numpy(x[order].astype(np.float32) / 16)
    targets = torch.from_numpy(y[order].astype(np.int64))
    k = DIGITS_TRAIN
    return Data(inputs[:k], targets[:k], inputs[k:], targets[k:], classes=10)


def fashion_mnist(shape: str = "flat") -> Data:
    """Load FashionMNIST (Xiao et al., 2017): 60,000 to train, 10,000 to test, pixels / 255.

    Args:
        shape: "flat" (784 inputs, as the paper's MLP reads them) or "image" (1 x 28 x 28).

    Raises:
        FlatlensError: if the files are missing or damaged.
    """
    if shape not in ("flat", "image"):
        raise FlatlensError(f"Unknown shape {shape!r} of fashion-mnist; use flat or image.")
    x, y, x_test, y_test = locate("fashion-mnist")
    train, test = _idx_pair(x, y, shape), _idx_pair(x_test, y_test, shape)
    return Data(*train, *test, classes=10)


def _idx_pair(image_file: Path, label_file: Path, shape: str) -> tuple[Tensor, Tensor]:
    x, y = read_idx(image_file, 3), read_idx(label_file, 1)
    if x.shape[1:] != (28, 28):
        raise FlatlensError(
            f"{image_file} holds images of {x.shape[1]} x {x.shape[2]} pixels, not 28 x 28."
        )
    if len(x) != len(y):
        raise FlatlensError(
            f"{label_file} has {len(y)} labels for the {len(x)} images of {image_file}."
        )
    if y.max() > 9:
        raise FlatlensError(f"{label_file} has the label {y.max()}, but the classes are 0 to 9.")
    return pixels(x.reshape(len(x), *((784,) if shape == "flat" else (1, 28, 28)))), labels(y)


def cifar10(classes: int | Sequence[int] | None = None) -> Data:
    """Load CIFAR-10 (Krizhevsky, 2009): 3 x 32 x 32 pixels / 255, 50,000 to train, 10,000 to test.

    Args:
        classes: keep only the images of these classes, in the published order. Targets are still
            class indices among ten, so a network has ten outputs, as in the paper.

    Raises:
        FlatlensError: if files are missing or damaged. The files may lack other classes, but
            every chosen class must be complete.
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
    batches = []
    reader = read_cifar if files[0].suffix == ".bin" else read_cifar_python
    for images, classes in map(reader, files):
        is_wanted = np.isin(classes, wanted)
        batches.append((images[is_wanted], classes[is_wanted]))
    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    counts = np.bincount(y, minlength=CIFAR_CLASSES)
    for label in wanted:
        if counts[label] != CIFAR10_COUNTS[part]:
            raise FlatlensError(
                f"{files[0].parent} is incomplete: its {part} files hold {counts[label]} images of "
                f"class {label} instead of {CIFAR10_COUNTS[part]}."
            )
    return pixels(x), labels(y)
