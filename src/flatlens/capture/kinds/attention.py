"""Attention: Python functions that hide their projections from a ``TorchFunctionMode``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from flatlens.capture.recording import Recording

# A mode sees these Python functions as a whole. They run with the mode still on inside, so that it
# sees the linear layers they call, too.
REENTERED = {F.multi_head_attention_forward}


def note_scores(recording: Recording, func: Any, args: Any, kwargs: Any) -> None:
    """Count the scores of a call of ``scaled_dot_product_attention``."""
    if func is not F.scaled_dot_product_attention:
        return
    query, key = (*args, *(kwargs[name] for name in ("query", "key") if name in kwargs))[:2]
    if not (query.is_nested or key.is_nested):
        recording.scores += query.numel() // max(1, query.shape[-1]) * key.shape[-2]


def reenter(mode: TorchFunctionMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a Python function that a mode sees as a whole, with ``mode`` still on inside."""
    functions: Any = F
    offered = functions.has_torch_function
    functions.has_torch_function = lambda *_: False
    try:
        with mode:
            return func(*args, **kwargs)
    finally:
        functions.has_torch_function = offered
