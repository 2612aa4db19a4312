"""Bilinear layers: z_k = x1^T W_k x2 + b_k, a linear map of each argument.

W x1 is a linear layer with the matrix [k j, i], and z is its product with x2. W x2 is a linear
layer with the matrix [k i, j], and z is its product with x1. Both layers are recorded, and both
have the gradient of the one parameter W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatlens.capture.kinds.broadcast import broadcast
from flatlens.capture.kinds.products import Product, behind, is_product
from flatlens.capture.labels import Dimensions
from flatlens.capture.recording import Recording


def _bilinear(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("input1", "input2", "weight", "bias"), args, strict=False)) | kwargs
    x1, x2, weight = named["input1"], named["input2"], named["weight"]
    places = [is_product(recording, x, weight) for x in (x1, x2)]
    if places != [1, 1] or 0 in (x1.numel(), x2.numel(), weight.numel()):
        return func(*args, **kwargs)
    z = _note_both(recording, x1, x2, weight)
    if named.get("bias") is None:
        return z
    return broadcast(recording, torch.add, (z, named["bias"]), {})


def _note_both(recording: Recording, x1: Tensor, x2: Tensor, weight: Tensor) -> Tensor:
    """Record the layer W x1 with the factor x2, and the layer W x2 with the factor x1."""
    (alias1, total1), (alias2, total2) = recording.alias(x1), recording.alias(x2)
    z = torch.bilinear(alias1, alias2, weight, None)
    parameter, view = behind(recording, weight)
    k, i, j = 0, 1, 2
    free = tuple(range(3, 2 + x1.dim()))
    given = z
    for x, alias, total, other, mine, theirs in (
        (x1, alias1, total1, x2, i, j),
        (x2, alias2, total2, x1, j, i),
    ):
        dimensions = Dimensions((*free, mine), (k, i, j), (*free, k, theirs))
        beside = (other.detach().clone(), (*free, theirs), (*free, k))
        shape = torch.Size((*z.shape, other.shape[-1]))
        layer = Product(parameter, x.shape, shape, dimensions, view, beside)
        given = recording.add_call(layer, x, alias, total, z)
    return given


HANDLERS = {torch.bilinear: _bilinear}
