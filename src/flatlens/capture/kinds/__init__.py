"""Kinds of layers: one file each, and the table that says which function belongs to which.

A handler is called in place of a torch function, with the recording, the function and its
arguments. It computes the function's result and notes what the measurement needs. A new kind of
layer is a new file with a ``HANDLERS`` table and one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatlens.capture.kinds import (
    bilinear,
    broadcast,
    convolution,
    embedding,
    normalisation,
    product_calls,
    recurrent,
    transposed_convolution,
)

Handler = Callable[..., Any]

HANDLERS: dict[Any, Handler] = {
    **convolution.HANDLERS,
    **transposed_convolution.HANDLERS,
    **embedding.HANDLERS,
    **normalisation.HANDLERS,
    **product_calls.HANDLERS,
    **bilinear.HANDLERS,
    **recurrent.HANDLERS,
}
BY_NAME: dict[str, Handler] = broadcast.BY_NAME
