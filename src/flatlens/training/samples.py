"""The samples of a training: the data of a config, and targets as its loss takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

from flatlens.data.arrays import Data
from flatlens.data.datasets import load
from flatlens.errors import FlatlensError, counted
from flatlens.training.config import Config


@dataclass(frozen=True)
class Part:
    """The training part or the test part of a data set.

    Args:
        x: inputs, one sample per row.
        y: labels or float targets as the data set has them.
        targets: targets as the loss takes them.
    """

    x: Shaped[Tensor, "n ..."]
    y: Shaped[Tensor, "n ..."]
    targets: Shaped[Tensor, "n ..."]

    def head(self, n: int | None) -> Part:
        """Return the first n samples, or all of them for None."""
        return Part(self.x[:n], self.y[:n], self.targets[:n])


def load_data(config: Config) -> Data:
    """Load the data of a config, cut to its training size.

    Raises:
        FlatlensError: if the data is missing, or has fewer samples than the config needs.
    """
    if config.classes is not None and "classes" in config.data_options:
        raise FlatlensError("The data is given classes twice: as classes and in data_options.")
    classes = {} if config.classes is None else {"classes": config.classes}
    data = load(config.data, **classes, **config.data_options)
    there, n = len(data.x_train), config.train_size
    if n is not None and n > there:
        raise FlatlensError(
            f"train_size is {n}, but {config.data} has only {counted(there, 'sample')}."
        )
    if config.samples > (n or there):
        raise FlatlensError(
            f"samples is {config.samples}, but there are only {n or there}; "
            f"set samples to {n or there} or fewer."
        )
    _check_finite(config.data, data)
    return Data(data.x_train[:n], data.y_train[:n], data.x_test, data.y_test, data.classes)


def _check_finite(name: str, data: Data) -> None:
    """Refuse NaN and infinities, which would spread through every weight."""
    for part in ("x_train", "y_train", "x_test", "y_test"):
        values = getattr(data, part)
        if values.is_floating_point() and not torch.isfinite(values.sum()):
            bad = ~torch.isfinite(values.reshape(len(values), -1)).all(dim=1)
            if bad.any():  # the sum alone may overflow
                sample = int(bad.nonzero()[0])
                raise FlatlensError(
                    f"Sample {sample} of {part} in {name} is not finite; remove NaN and infinities."
                )


def make_targets(y: Shaped[Tensor, "n ..."], N: int, config: Config) -> Shaped[Tensor, "n ..."]:
    """Return targets as the loss of a config takes them.

    Classes become one-hot rows over all N outputs for the squared losses, whatever the number of
    classes in the data.

    Args:
        y: classes or float targets; there may be no sample.
        N: number of outputs of the network.
        config: the config.

    Raises:
        FlatlensError: if the network has too few outputs, or float targets another number of them.
    """
    if y.is_floating_point():
        y = y.reshape(len(y), math.prod(y.shape[1:]))  # not -1: there may be no sample
        if y.shape[1] != N:
            raise FlatlensError(
                f"The network has {counted(N, 'output')} for targets of {y.shape[1]} columns."
            )
        return y
    if len(y) and int(y.max()) >= N:
        raise FlatlensError(
            f"The data has the class {int(y.max())}, but the network only the outputs 0 to {N - 1}."
        )
    if config.loss == "cross_entropy":
        return y
    return F.one_hot(y, N).to(getattr(torch, config.dtype))
