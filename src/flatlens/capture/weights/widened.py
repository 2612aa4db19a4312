"""Show the half-precision parameters of a model as float32, without a copy of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from flatlens.algebra.wide_tensor import HALF, WideTensor, free_scratch
from flatlens.capture.weights.swap import swapped

NOTE = "half-precision parameters: widened to float32 layer by layer where they are used"


@contextlib.contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Show the half-precision parameters and buffers of a model as float32.

    Buffers and plain attributes are small and are copied.
    """

    def wide(p: Tensor) -> Tensor | None:
        if p.dtype not in HALF:
            return None
        return nn.Parameter(WideTensor(p.detach()), requires_grad=p.requires_grad)

    buffers = [
        (registry, name, t)
        for module in model.modules()
        for registry in (module._buffers, module.__dict__)
        for name, t in registry.items()
        if isinstance(t, Tensor) and t.dtype in HALF
    ]
    with swapped(model, wide):
        try:
            for registry, name, t in buffers:
                registry[name] = t.detach().float()
            yield
        finally:
            for registry, name, t in buffers:
                registry[name] = t
            free_scratch()
