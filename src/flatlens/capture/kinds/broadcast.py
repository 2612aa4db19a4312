"""Parameters that meet a result in a broadcast: one copy per sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatlens.capture.kinds.embedding import looked_up, rows_per_sample
from flatlens.capture.recording import Recording

BROADCASTS = {
    *("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "where", "lerp"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__"),
    *("__itruediv__", "rsub", "addcmul"),
}
EXPANDS = {"expand", "expand_as", "repeat"}


def broadcast(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an elementwise function with one copy per sample of each parameter among ``args``."""
    trainable = recording.parameters.trainable
    if not any(trainable(a) or looked_up(recording, a) for a in args):
        return func(*args, **kwargs)
    shape = torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, Tensor)))
    event = recording.new_event(shape)
    arguments = []
    for a in args:
        if trainable(a):
            a = recording.per_sample(a, shape, event)
        elif looked_up(recording, a):
            a = rows_per_sample(recording, a, shape, event)
        arguments.append(a)
    return func(*arguments, **kwargs)


def expand(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``expand`` or ``repeat`` of a parameter with one copy per sample."""
    if not recording.parameters.trainable(args[0]):
        return func(*args, **kwargs)
    p, result = args[0], func(*args, **kwargs)
    sizes = zip(reversed(p.shape), reversed(result.shape), strict=False)
    if any(s not in (1, r) for s, r in sizes):  # a true repeat, not a broadcast
        return result
    count = len(recording.copies)
    copies = recording.per_sample(p, result.shape, recording.new_event(result.shape))
    if len(recording.copies) == count:
        return result
    expanded = copies.expand(result.shape)
    return expanded.clone() if func.__name__ == "repeat" else expanded


BY_NAME = {**dict.fromkeys(BROADCASTS, broadcast), **dict.fromkeys(EXPANDS, expand)}
