"""Check the arguments of public functions; a wrong type raises with one sentence."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from flatlens.errors import FlatlensError

F = TypeVar("F", bound=Callable[..., Any])
LARGEST = 2**63 - 1  # largest integer of torch and NumPy


def no_type_check(function: F) -> F:
    """Exempt a public function from the type checker of the tests.

    The function checks its own arguments, so users see its message instead of the type checker's.
    The checker looks for a decorator of this name. Unlike ``typing.no_type_check`` this decorator
    keeps the annotations for mypy and editors.
    """
    return function


def typed_arguments(function: F) -> F:
    """Raise for arguments of a wrong type, with one sentence that names the argument.

    The types come from the annotations. NumPy numbers count as numbers; a bool and NaN do not.
    ``Any`` and shapes of tensors are not checked. Write ``no_type_check`` above this decorator, so
    that its check runs and not that of the tests.

    >>> @typed_arguments
    ... def halve(number: float) -> float:
    ...     return number / 2
    >>> halve("3")
    Traceback (most recent call last):
    flatlens.errors.FlatlensError: number='3' is not a number
    """
    signature = inspect.signature(function)
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise FlatlensError(
                f"{function.__name__} cannot be called with these arguments: {error}; it takes "
                f"{', '.join(signature.parameters)}"
            ) from None
        if not hints:
            hints.update(_hints(function))
        for name, value in given.arguments.items():
            if name in hints and not _fits(value, hints[name]):
                raise FlatlensError(f"{name}={short_repr(value)} is not {_described(hints[name])}")
            if name in hints and Path in get_args(hints[name]) and value is not None:
                _check_path(name, os.fspath(value))
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _check_path(name: str, value: str) -> None:
    """Raise for a path that no file system can have."""
    if "\0" in value:
        raise FlatlensError(f"{name}={short_repr(value)} contains a NUL character; remove it")
    if any(len(os.fsencode(part)) > 255 for part in Path(value).parts):
        raise FlatlensError(f"{name}={short_repr(value)} has a part of more than 255 bytes")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations that can be resolved; names of missing libraries cannot."""
    hints = {}
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for name, parameter in inspect.signature(function).parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        hint = parameter.annotation
        try:
            hint = eval(hint, scope) if isinstance(hint, str) else hint
        except (NameError, AttributeError, TypeError):
            continue
        if hint is not parameter.empty and not variadic:
            hints[name] = hint
    return hints


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if hint is None or hint is types.NoneType:
        return value is None
    if hint in (int, float):
        abstract: Any = numbers.Integral if hint is int else numbers.Real
        number = isinstance(value, abstract) and not isinstance(value, bool | np.bool_)
        # a number of 400 digits overflows in any computation, and NaN spreads through it
        limit = LARGEST if hint is int or isinstance(value, int) else math.inf
        return number and bool(abs(value) <= limit)
    if hint is Path:
        return isinstance(value, os.PathLike)
    if origin in (Sequence, Collection, Iterable, list, tuple, set):
        kind = origin if origin in (Collection, Iterable, set) else Sequence
        listed = isinstance(value, kind | np.ndarray) and not isinstance(value, str | bytes)
        # a check of its elements would exhaust a generator
        elements = inner[:1] if listed and isinstance(value, Sequence) else ()
        return listed and all(_fits(element, kind) for kind in elements for element in value)
    if origin in (Mapping, dict):
        return isinstance(value, Mapping)
    if origin in (Callable, type):
        return callable(value)
    plain = isinstance(hint, type) and hint is not Any and hint.__module__ != "jaxtyping"
    return isinstance(value, hint) if plain else True


def _described(hint: Any) -> str:
    """Describe the type of an annotation in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _joined(list(dict.fromkeys(map(_described, inner))))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (Sequence, Collection, Iterable, list, tuple, set):
        return f"a list of {_described_several(inner[0])}" if inner else "a list"
    words = {
        int: "a whole number", float: "a number", str: "a text", bool: "True or False",
        Path: "a path", types.NoneType: "None", Mapping: "a mapping", dict: "a mapping",
        Callable: "a function", type: "a class",
    }  # fmt: skip
    name = getattr(hint, "__name__", str(hint))
    known = {"Module": "torch.nn.Module", "Tensor": "torch.Tensor"}  # torch is not imported here
    article = "an" if name[0] in "AEIOU" else "a"
    return words.get(origin or hint) or f"{article} {known.get(name, name)}"


def _described_several(hint: Any) -> str:
    """Describe the elements of a list in words, such as "texts or whole numbers"."""
    if get_origin(hint) in (Union, types.UnionType):
        return _joined(list(dict.fromkeys(map(_described_several, get_args(hint)))))
    article, _, noun = _described(hint).partition(" ")
    if article not in ("a", "an"):
        return _described(hint)
    noun, _, rest = noun.partition(" of ")
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch")) else f"{noun}s"
    return f"{plural} of {rest}" if rest else plural


def _joined(words: list[str]) -> str:
    """Join alternatives as in "a, b or c"; "a number" includes whole numbers."""
    words = [word for word in words if word != "a whole number" or "a number" not in words]
    if len(words) == 1:
        return words[0]
    comma = "," if any(" or " in word for word in words) else ""
    return f"{', '.join(words[:-1])}{comma} or {words[-1]}"


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise if a value is not one of some words."""
    if not isinstance(value, str) or value not in choices:
        raise FlatlensError(
            f"{name}={short_repr(value)} is unknown; use one of {', '.join(choices)}"
        )


def check_integer(
    name: str, value: Any, least: int | None = None, *, optional: bool = True
) -> None:
    """Raise if a value is not an integer of 64 bits, or is below ``least``.

    None is accepted if the argument is optional.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise FlatlensError(f"{name}={short_repr(value)} is not an integer; give a whole number")
    if least is not None and value < least:
        raise FlatlensError(f"{name}={short_repr(value)} is too small; give {least} or more")
    if abs(int(value)) > LARGEST:
        raise FlatlensError(f"{name} is an integer beyond 64 bits; give a smaller number")


def check_positive(name: str, value: Any, what: str) -> None:
    """Raise if a value is not a positive finite number; None is accepted."""
    if value is None:
        return
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not _is_finite(value) or value <= 0:
        raise FlatlensError(f"{name}={short_repr(value)} is not {what}; give a number above 0")


def check_flag(name: str, value: Any) -> None:
    """Raise if a value is not True or False."""
    if not isinstance(value, bool):
        raise FlatlensError(f"{name}={short_repr(value)} is not a flag; give True or False")


def check_instance(name: str, value: Any, kind: type, advice: str) -> None:
    """Raise if a value has another type; the message says what to give."""
    if not isinstance(value, kind):
        given = "None" if value is None else f"a value of type {type(value).__name__}"
        raise FlatlensError(f"{name} is {given}; {advice}")


def whole_number(name: str, value: Any, least: int) -> int:
    """Return a whole number, or refuse the argument.

    Args:
        name: name of the argument, for the message.
        value: what the caller gave; bools are refused.
        least: smallest value allowed.

    Returns:
        The value as an ``int``.

    Raises:
        FlatlensError: if the value is not a whole number, or is below ``least``.

    Example:
        >>> whole_number("n", 5, least=1)
        5
    """
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not least <= value <= LARGEST:
        raise FlatlensError(f"{name}={short_repr(value)} is not a whole number of at least {least}")
    return int(value)


def real_number(name: str, value: Any) -> float:
    """Return a real number that is not NaN, or refuse the argument.

    Args:
        name: name of the argument, for the message.
        value: what the caller gave; bools are refused.

    Returns:
        The value as a ``float``.

    Raises:
        FlatlensError: if the value is not a number, or is NaN.

    Example:
        >>> real_number("threshold", 0.1)
        0.1
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not is_number or not abs(value) <= math.inf:
        raise FlatlensError(f"{name}={short_repr(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise FlatlensError(f"{name} is a number beyond the floats; give a smaller one") from None


def _is_finite(value: Any) -> bool:
    """Return whether a number is finite as a float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of 400 digits
        return False


def short_repr(value: Any, limit: int = 60) -> str:
    """Show a value in a message, in at most ``limit`` characters and one line.

    >>> short_repr([1, 2]), short_repr("x" * 100, limit=10)
    ('[1, 2]', "'xxxxxx...")
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # anyone's object; integers of 5,000 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
