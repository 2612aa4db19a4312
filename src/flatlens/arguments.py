"""Checks of the arguments of public functions: a wrong type is refused in one sentence."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from flatlens.errors import FlatlensError

F = TypeVar("F", bound=Callable[..., Any])


def no_type_check(function: F) -> F:
    """Exempt a public function from the type checker that the tests put around the package.

    The function checks its own arguments, and users see its sentence instead of the type checker's.
    The checker looks for a decorator of this name. Unlike ``typing.no_type_check`` it leaves the
    annotations to mypy and to editors.
    """
    return function


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of some words."""
    if not isinstance(value, str) or value not in choices:
        raise FlatlensError(
            f"{name}={short_repr(value)} is unknown; use one of {', '.join(choices)}"
        )


def check_integer(name: str, value: Any, least: int | None = None) -> None:
    """Refuse a value that is not an integer, or below ``least``; None is accepted."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise FlatlensError(f"{name}={short_repr(value)} is not an integer; give a whole number")
    if least is not None and value < least:
        raise FlatlensError(f"{name}={value} is too small; give {least} or more")


def check_positive(name: str, value: Any, what: str) -> None:
    """Refuse a value that is not a positive finite number; None is accepted."""
    if value is None:
        return
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise FlatlensError(f"{name}={short_repr(value)} is not {what}; give a number above 0")


def check_flag(name: str, value: Any) -> None:
    """Refuse a value that is not True or False."""
    if not isinstance(value, bool):
        raise FlatlensError(f"{name}={short_repr(value)} is not a flag; give True or False")


def check_instance(name: str, value: Any, kind: type, advice: str) -> None:
    """Refuse a value of another type, with advice on what to give."""
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
    if not whole or value < least:
        raise FlatlensError(f"{name}={value!r} is not a whole number of at least {least}")
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
    if isinstance(value, bool) or not is_number or math.isnan(value):
        raise FlatlensError(f"{name}={value!r} is not a number")
    return float(value)


def short_repr(value: Any, limit: int = 60) -> str:
    """Show a value in a message, in at most ``limit`` characters and one line.

    >>> short_repr([1, 2]), short_repr("x" * 100, limit=10)
    ('[1, 2]', "'xxxxxx...")
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
