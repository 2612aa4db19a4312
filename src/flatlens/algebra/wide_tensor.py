"""Half-precision tensors that are widened to float32 where they are used.

A :class:`WideTensor` shows a float16 or bfloat16 tensor as float32. It has no float32 memory: each
operation widens what it reads and forgets it afterwards. Autograd saves the WideTensor itself, so a
backward pass widens the weight of a layer when it comes to that layer. A view of a WideTensor is
a WideTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

HALF = (torch.float16, torch.bfloat16)
ATEN = torch.ops.aten
VIEWS = {
    *(ATEN.detach.default, ATEN.alias.default, ATEN.t.default, ATEN.transpose.int),
    *(ATEN.view.default, ATEN._unsafe_view.default, ATEN.expand.default, ATEN.permute.default),
    *(ATEN.unsqueeze.default, ATEN.squeeze.dim, ATEN.squeeze.default, ATEN.slice.Tensor),
    *(ATEN.select.int, ATEN.split.Tensor, ATEN.split_with_sizes.default, ATEN.unbind.int),
}
ROWS = {ATEN.embedding.default, ATEN.index_select.default, ATEN.index.Tensor}  # take a few entries


class WrittenToError(RuntimeError):
    """The model writes to a parameter, which a WideTensor cannot take."""


class WideTensor(Tensor):
    """A half-precision tensor that takes part in every operation as float32."""

    half_values: Tensor

    @staticmethod
    def __new__(cls, half_values: Tensor) -> WideTensor:
        """Make a float32 tensor without memory, of the size and strides of ``half_values``."""
        return Tensor._make_wrapper_subclass(
            cls,
            half_values.shape,
            strides=half_values.stride(),
            storage_offset=half_values.storage_offset(),
            dtype=torch.float32,
            device=half_values.device,
        )

    def __init__(self, half_values: Tensor) -> None:
        self.half_values = half_values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WideTensor({self.half_values!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on float32 values, or on the narrow values where that is the same."""
        kwargs = kwargs or {}
        if func in VIEWS or (func in ROWS and isinstance(args[0], WideTensor)):
            result = func(*pytree.tree_map_only(WideTensor, _narrow, args), **kwargs)
            shown = WideTensor if func in VIEWS else Tensor.float
            return pytree.tree_map_only(Tensor, shown, result)
        if func._schema.is_mutable and any(
            isinstance(value, WideTensor) and argument.is_write
            for argument, value in zip(func._schema.arguments, args, strict=False)
        ):
            raise WrittenToError("the model writes to its parameters")
        args, kwargs = pytree.tree_map_only(WideTensor, _widen, (args, kwargs))
        return func(*args, **kwargs)


def _narrow(t: WideTensor) -> Tensor:
    return t.half_values


def _widen(t: WideTensor) -> Tensor:
    return t.half_values.float()


def stored(t: Tensor) -> Tensor:
    """Return the tensor that has the memory: the narrow one of a WideTensor, or ``t`` itself."""
    return t.half_values if isinstance(t, WideTensor) else t


def bytes_of(t: Tensor) -> Any:
    """Return the values of a tensor as a buffer of bytes, without widening them."""
    if isinstance(t, WideTensor):
        return t.half_values.detach().cpu().contiguous().view(torch.int16).numpy().data
    return t.detach().cpu().contiguous().numpy().data
