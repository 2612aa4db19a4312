"""Standardised inputs: the option that every data set has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.data.arrays import Data
from flatlens.errors import FlatlensError

OPTION = "standardize"


def with_option(reader: Callable[..., Data]) -> Callable[..., Data]:
    """Give a reader the option `standardize`."""

    @functools.wraps(reader)
    def read(**options: Any) -> Data:
        wanted = options.pop(OPTION, False)
        data = reader(**options)
        return standardized(data) if wanted else data

    signature = inspect.signature(reader)
    option = inspect.Parameter(OPTION, inspect.Parameter.KEYWORD_ONLY, default=False)
    parameters = [*signature.parameters.values(), option]
    read.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return read


def standardized(data: Data) -> Data:
    """Shift and scale the inputs: the training inputs then have mean 0 and standard deviation 1.

    Images `[n, channels, height, width]` have one mean and one standard deviation for each channel,
    other inputs one for all numbers. The test inputs are shifted and scaled by the same numbers.

    Raises:
        FlatlensError: if the inputs are no floating-point numbers.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> standardized(Data(x, torch.zeros(2), x + 1, torch.zeros(2), classes=1)).x_test.tolist()
    [[0.0], [2.0]]
    """
    x = data.x_train
    if not x.is_floating_point():
        raise FlatlensError(
            f"The option {OPTION} needs inputs of floating-point numbers, but these are {x.dtype}."
        )
    if not len(x):
        return data
    dims = (0, 2, 3) if x.ndim == 4 else tuple(range(x.ndim))
    mean, scale = x.mean(dims, keepdim=True), x.std(dims, correction=0, keepdim=True)
    # a constant channel: rounding makes its mean inexact and its deviation positive
    lowest = x.amin(dims, keepdim=True)
    constant = lowest == x.amax(dims, keepdim=True)
    mean = torch.where(constant, lowest, mean)
    scale = torch.where(constant, torch.ones_like(scale), scale)

    def changed(inputs: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        return (inputs - mean) / scale

    return replace(data, x_train=changed(x), x_test=changed(data.x_test))
