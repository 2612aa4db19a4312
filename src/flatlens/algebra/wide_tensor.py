"""Half-precision tensors that are widened to float32 where they are used.

A :class:`WideTensor` shows a float16 or bfloat16 tensor as float32. It has no float32 memory: each
operation widens what it reads and forgets it afterwards. Autograd saves the WideTensor itself, so a
backward pass widens the weight of a layer when it comes to that layer. A view of a WideTensor is
a WideTensor.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

HALF = (torch.float16, torch.bfloat16)
SCRATCH_ENTRIES = 1 << 16  # smaller tensors are widened into new memory
ATEN = torch.ops.aten
VIEWS = {
    *(ATEN.detach.default, ATEN.alias.default, ATEN.t.default, ATEN.transpose.int),
    *(ATEN.view.default, ATEN._unsafe_view.default, ATEN.expand.default, ATEN.permute.default),
    *(ATEN.unsqueeze.default, ATEN.squeeze.dim, ATEN.squeeze.default, ATEN.slice.Tensor),
    *(ATEN.select.int, ATEN.split.Tensor, ATEN.split_with_sizes.default, ATEN.unbind.int),
    ATEN.as_strided.default,
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
        if func is ATEN.copy_.default and not isinstance(args[0], WideTensor):
            return func(args[0], _narrow(args[1]), *args[2:], **kwargs)  # it converts by itself
        if func._schema.is_mutable and any(
            isinstance(value, WideTensor) and argument.is_write
            for argument, value in zip(func._schema.arguments, args, strict=False)
        ):
            raise WrittenToError("the model writes to its parameters")
        scratch = _Scratch()
        args, kwargs = pytree.tree_map_only(WideTensor, scratch.widen, (args, kwargs))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, scratch.own, result) if scratch.used else result


class _Memory(threading.local):
    """Float32 memory that operations use one after another, by the place of an argument."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []


class _Scratch:
    """Widens the arguments of one operation, large ones into memory that is used again.

    Allocating new memory each time would take as much memory as a copy of the whole model. Small
    results are allocated between two large ones, so the allocator finds no gap for the next large
    one.
    """

    memory = _Memory()

    def __init__(self) -> None:
        self.used = 0

    def widen(self, t: WideTensor) -> Tensor:
        """Return the values of ``t`` in float32."""
        values = t.half_values
        last = sum((n - 1) * step for n, step in zip(values.shape, values.stride(), strict=True))
        dense = last + 1 == values.numel()  # no gaps, and no entry that is repeated (expand)
        if not dense or values.numel() < SCRATCH_ENTRIES or values.device.type != "cpu":
            return values.float()
        place, self.used, buffers = self.used, self.used + 1, self.memory.buffers
        if place == len(buffers):
            buffers.append(torch.empty(0))
        if buffers[place].numel() < values.numel():
            buffers[place] = torch.empty(0)  # free the small one before the large one is there
            buffers[place] = torch.empty(values.numel(), device="cpu", dtype=torch.float32)
        wide = buffers[place].as_strided(values.shape, values.stride(), 0)
        return wide.copy_(values)

    def own(self, result: Tensor) -> Tensor:
        """Return a result in memory of its own, which the next operation does not overwrite."""
        addresses = [b.untyped_storage().data_ptr() for b in self.memory.buffers[: self.used]]
        shared = result.untyped_storage().data_ptr() in addresses
        return result.clone() if shared else result


def free_scratch() -> None:
    """Free the memory that operations widened their arguments in."""
    _Scratch.memory.buffers.clear()


def _narrow(t: WideTensor) -> Tensor:
    return t.half_values


def shown_wide(t: Tensor) -> Tensor:
    """Show a half-precision tensor as float32 without a copy, and without its graph.

    Other tensors are returned as they are.

    >>> shown_wide(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return WideTensor(t.detach()) if t.dtype in HALF else t


def stored(t: Tensor) -> Tensor:
    """Return the tensor that owns the memory: the narrow one of a WideTensor, or ``t`` itself."""
    return t.half_values if isinstance(t, WideTensor) else t


def bytes_of(t: Tensor) -> Any:
    """Return the values of a tensor as a buffer of bytes, without widening them."""
    if isinstance(t, WideTensor):
        return t.half_values.detach().cpu().contiguous().view(torch.int16).numpy().data
    return t.detach().cpu().contiguous().numpy().data
