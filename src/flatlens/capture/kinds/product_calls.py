"""Functions of torch that multiply by a weight, each brought to one or more products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatlens.capture.kinds.broadcast import broadcast
from flatlens.capture.kinds.linear import addmm, call_linear
from flatlens.capture.kinds.products import are_plain, is_product, note_product
from flatlens.capture.labels import Dimensions, Labels, einsum_labels, matmul_labels
from flatlens.capture.recording import Recording

ADDMM = (torch.addmm, Tensor.addmm)
Spelling = tuple[Labels, Labels, Labels]  # labels of both operands and of the result


def multiply(
    recording: Recording,
    a: Tensor,
    b: Tensor,
    spelling: Spelling,
    compute: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Multiply two tensors; with a weight among them the product is a layer."""
    place = is_product(recording, a, b)
    z = None
    if place == 0:
        dimensions = Dimensions(spelling[1], spelling[0], spelling[2])
        z = note_product(recording, b, a, dimensions, lambda x: compute(a, x))
    elif place == 1:
        dimensions = Dimensions(*spelling)
        z = note_product(recording, a, b, dimensions, lambda x: compute(x, b))
    return compute(a, b) if z is None else z


def _tensors(args: Any, kwargs: Any, count: int) -> bool:
    return not kwargs and len(args) == count and all(isinstance(a, Tensor) for a in args)


def _matmul(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    if not _tensors(args, kwargs, 2) or 0 in (args[0].dim(), args[1].dim()):
        return func(*args, **kwargs)
    a, b = args
    return multiply(recording, a, b, matmul_labels(a.dim(), b.dim()), func)


def _linear(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Record ``F.linear``; with a one-dimensional weight it is a dot product without a bias."""
    named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    if named["weight"].dim() == 1 and named.get("bias") is None:
        return _matmul(recording, torch.matmul, (named["input"], named["weight"]), {})
    return call_linear(recording, **named)


def _reversed_matmul(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Record ``a.__rmatmul__(b)``, which is b @ a."""
    if not _tensors(args, kwargs, 2):
        return func(*args, **kwargs)
    return _matmul(recording, torch.matmul, args[::-1], kwargs)


def _inner(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    if not _tensors(args, kwargs, 2) or 0 in (args[0].dim(), args[1].dim()):
        return func(*args, **kwargs)
    a, b = args
    left_axes = tuple(range(1, a.dim()))
    right_axes = tuple(range(a.dim(), a.dim() + b.dim() - 1))
    spelling = ((*left_axes, 0), (*right_axes, 0), left_axes + right_axes)
    return multiply(recording, a, b, spelling, func)


def _tensordot(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("a", "b", "dims"), args, strict=False)) | kwargs
    a, b, dims = named.get("a"), named.get("b"), named.get("dims", 2)
    if named.get("out") is not None or not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return func(*args, **kwargs)
    dims = dims.tolist() if isinstance(dims, Tensor) else dims
    if isinstance(dims, int):
        dims = (range(a.dim() - dims, a.dim()), range(dims))
    pairs = [tuple(int(d) for d in side) for side in dims]
    left = [d % a.dim() for d in pairs[0]]
    right = [d % b.dim() for d in pairs[1]]
    left_axes, right_axes = list(range(a.dim())), list(range(a.dim(), a.dim() + b.dim()))
    for i, j in zip(left, right, strict=True):
        right_axes[j] = left_axes[i]
    result = [d for k, d in enumerate(left_axes) if k not in left]
    result += [d for k, d in enumerate(right_axes) if k not in right]
    spelling = (tuple(left_axes), tuple(right_axes), tuple(result))
    return multiply(recording, a, b, spelling, lambda a, b: torch.tensordot(a, b, pairs))


def _multi_dot(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Record a chain of matrices, multiplied from left to right."""
    operands = args[0] if args else kwargs.get("tensors", ())
    if len(args) != 1 or kwargs or len(operands) < 2:
        return func(*args, **kwargs)
    result = operands[0]
    for factor in operands[1:]:
        result = _matmul(recording, torch.matmul, (result, factor), {})
    return result


# -- a product and a sum -------------------------------------------------------------------------


def _add_product(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Record ``addmv``, ``baddbmm`` or ``addmm``: a tensor plus the product of two others."""
    place = is_product(recording, *args[1:]) if _tensors(args, kwargs, 3) else None
    if place is None:
        return func(*args, **kwargs)
    if place == 1 and func in ADDMM and recording.parameters.is_parameter(args[2]):
        return addmm(recording, *args)
    product = _matmul(recording, torch.matmul, args[1:], {})
    return broadcast(recording, torch.add, (product, args[0]), {})


# -- einsum --------------------------------------------------------------------------------------


def _einsum(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    operands = _operands(args)
    if kwargs or operands is None or not are_plain(operands[0]):
        return func(*args, **kwargs)
    if not any(recording.parameters.make_weight(t, recording.data) for t in operands[0]):
        return func(*args, **kwargs)
    tensors, labels, result = operands
    return _contracted(recording, list(tensors), list(labels), result)


def _operands(args: Any) -> tuple[list[Tensor], list[Labels], Labels] | None:
    """Return the operands of an einsum, their labels counted from 0, and the result's labels."""
    spelt: tuple[list[Labels], Labels] | None
    if isinstance(args[0], str):
        tensors = list(args[1] if len(args) == 2 and not isinstance(args[1], Tensor) else args[1:])
        spelt = einsum_labels(args[0], tuple(t.dim() for t in tensors))
    else:  # operand, labels, operand, labels, ..., labels of the result
        tensors = list(args[0 : len(args) // 2 * 2 : 2])
        sublists = [tuple(labels) for labels in args[1::2]]
        if len(args) % 2 == 0 or any(Ellipsis in labels for labels in (*sublists, args[-1])):
            return None
        spelt = sublists, tuple(args[-1])
    if spelt is None or len(tensors) < 2:
        return None
    numbers = {
        label: k for k, label in enumerate(sorted({d for labels in spelt[0] for d in labels}))
    }
    if len(numbers) > 40 or any(len(set(labels)) < len(labels) for labels in spelt[0]):
        return None
    operands, result = spelt
    return (
        tensors,
        [tuple(numbers[d] for d in labels) for labels in operands],
        tuple(numbers[d] for d in result),
    )


def _contracted(
    recording: Recording, tensors: list[Tensor], labels: list[Labels], result: Labels
) -> Tensor:
    """Contract the operands pair by pair, from the first one that is no weight."""
    weights = [recording.parameters.make_weight(t, recording.data) for t in tensors]
    start = weights.index(False) if False in weights else 0
    value, have = tensors.pop(start), labels.pop(start)
    while tensors:
        shares = [bool(set(have) & set(other)) for other in labels]
        place = shares.index(True) if True in shares else 0
        factor, theirs = tensors.pop(place), labels.pop(place)
        needed = {*result, *(d for other in labels for d in other)}
        value, have = _summed(value, have, needed | set(theirs))
        together = dict.fromkeys((*have, *theirs))
        left = result if not tensors else tuple(d for d in together if d in needed)
        spelling = (have, theirs, left)

        def compute(a: Tensor, b: Tensor, spelling: Spelling = spelling) -> Tensor:
            return torch.einsum(a, list(spelling[0]), b, list(spelling[1]), list(spelling[2]))

        value, have = multiply(recording, value, factor, spelling, compute), left
    return value


def _summed(value: Tensor, labels: Labels, needed: set[int]) -> tuple[Tensor, Labels]:
    """Sum over the dimensions whose labels no other operand and no result has."""
    alone = [k for k, label in enumerate(labels) if label not in needed]
    if not alone:
        return value, labels
    return value.sum(alone), tuple(d for d in labels if d in needed)


HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul), _matmul),
    **dict.fromkeys((torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.mv, Tensor.mv), _matmul),
    **dict.fromkeys((torch.dot, Tensor.dot), _matmul),
    Tensor.__rmatmul__: _reversed_matmul,
    **dict.fromkeys((torch.inner, Tensor.inner), _inner),
    torch.tensordot: _tensordot,
    torch.linalg.multi_dot: _multi_dot,
    **dict.fromkeys((torch.addmv, Tensor.addmv, torch.baddbmm, Tensor.baddbmm), _add_product),
    **dict.fromkeys(ADDMM, _add_product),
    torch.einsum: _einsum,
}
