"""A data set in memory, and the conversion of stored bytes to tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor


@dataclass(frozen=True)
class Data:
    """A data set in memory. Without a test part `x_test` and `y_test` have no rows.

    Args:
        x_train: inputs to train on, one sample per row.
        y_train: classes `[n]`, or float targets `[n]` or `[n, N]`.
        x_test: inputs to test on.
        y_test: their targets.
        classes: number of classes; for float targets the number of target columns.
    """

    x_train: Shaped[Tensor, "n ..."]
    y_train: Shaped[Tensor, "n ..."]
    x_test: Shaped[Tensor, "m ..."]
    y_test: Shaped[Tensor, "m ..."]
    classes: int


def pixels(x: UInt8[np.ndarray, "n ..."]) -> Float[Tensor, "n ..."]:
    """Convert bytes to float32 numbers from 0 to 1."""
    return torch.from_numpy(x.astype(np.float32)).div_(255)


def labels(y: Int[np.ndarray, " n"] | UInt8[np.ndarray, " n"]) -> Int[Tensor, " n"]:
    """Convert class numbers to int64."""
    return torch.from_numpy(y.astype(np.int64))
