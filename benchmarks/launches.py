"""Count the operator calls of a measurement, and the places where the host waits for a device.

On an accelerator every operator call is one kernel launch or a few, and the host runs ahead of the
device. A *synchronisation* makes it wait: a number, a truth value or a size is read from a tensor,
or a tensor is copied to the CPU. Both can be counted without an accelerator, because the CPU runs
the same operators.

    with Counter() as counter:
        fl.measure(model, x)
    print(counter.launches, counter.synchronisations)

What a CPU does not show are copies inside one operator. Factorisations (`linalg_eigh`, `svdvals`)
wait for an error code on most devices, so they are counted by themselves.
"""

from __future__ import annotations

import os
import sys
from collections import Counter as Tally
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result is a number of the host, or has a size that depends on values.
WAITING = {
    "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "nonzero_static",
    "unique_consecutive", "unique_dim", "_unique", "_unique2", "repeat_interleave.Tensor",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# Operators that only look at memory in another way launch nothing.
FREE = {
    "view", "_unsafe_view", "alias", "detach", "t", "transpose", "permute", "expand", "select",
    "slice", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "as_strided",
    "diagonal", "unfold", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "lift_fresh", "_reshape_alias", "is_same_size", "sym_size", "set_",
    "resize_", "real", "view_as_real",
}  # fmt: skip
NORMS = {"linalg_vector_norm"}  # a sum, which waits for nothing
COPIES = {Tensor.cpu, Tensor.tolist}


class Counter(TorchDispatchMode):
    """Counts operator calls, factorisations and synchronisations inside a ``with`` block.

    Args:
        inside: a function of flatlens (its code object); what happens below it counts as `inside`.

    Attributes:
        operators: calls by operator.
        waits: synchronisations by operator and the line of flatlens that caused them.
        inside_waits: those of them that happened below the function ``inside``.
        inside_launches: operator calls below the function ``inside``.
    """

    def __init__(self, inside: CodeType | None = None) -> None:
        super().__init__()
        self.inside = inside
        self.operators: Tally[str] = Tally()
        self.waits: Tally[tuple[str, str]] = Tally()
        self.inside_waits: Tally[tuple[str, str]] = Tally()
        self.inside_launches = 0
        self._copies = _Copies(self)

    def __enter__(self) -> Counter:
        self._copies.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.operators[name] += 1
        if name in WAITING or str(func).removeprefix("aten.") in WAITING or by_mask(name, args):
            self.note(name)
        if self.inside is not None and name not in FREE and caller(self.inside):
            self.inside_launches += 1
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        """Count one synchronisation."""
        place = (name, line_of_flatlens())
        self.waits[place] += 1
        if self.inside is not None and caller(self.inside):
            self.inside_waits[place] += 1

    @property
    def launches(self) -> int:
        """Calls of operators that do some work."""
        return sum(count for name, count in self.operators.items() if name not in FREE)

    @property
    def factorisations(self) -> int:
        """Calls of eigh, svd, qr and their kind."""
        return sum(
            count
            for name, count in self.operators.items()
            if "linalg_" in name and name not in NORMS
        )

    @property
    def synchronisations(self) -> int:
        """How often the host waits, without factorisations."""
        return sum(self.waits.values())


class _Copies(TorchFunctionMode):
    """Notes copies to the CPU, which a CPU does not dispatch."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COPIES or (func is Tensor.to and to_cpu(args[1:], kwargs)):
            self.counter.note(func.__name__)
        return func(*args, **kwargs)


def to_cpu(args: Any, kwargs: Any) -> bool:
    """Whether `Tensor.to` was asked for the CPU by name."""
    return any(isinstance(a, str) and a == "cpu" for a in (*args, *kwargs.values()))


def by_mask(name: str, args: Any) -> bool:
    """Whether an operator indexes by a mask, which needs the number of entries that are true."""
    if name not in INDEXING:
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def frames() -> Iterator[FrameType]:
    """Frames of the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller(code: CodeType) -> bool:
    """Whether a function is on the stack."""
    return any(frame.f_code is code for frame in frames())


def line_of_flatlens() -> str:
    """File, line and function of flatlens that are running."""
    for frame in frames():
        path = frame.f_code.co_filename
        if f"{os.sep}flatlens{os.sep}" in path:
            name = path.rsplit(f"{os.sep}flatlens{os.sep}", 1)[1]
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
    return "outside flatlens"
