"""Checks of the arguments of public functions, each with one sentence that names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from flatlens.errors import FlatlensError

Function = TypeVar("Function", bound=Callable[..., Any])


def no_type_check(function: Function) -> Function:
    """Exempt a public function from the type checks that the tests put around the package.

    The function checks its arguments itself, and users read its own message. The import hook of
    jaxtyping knows the decorator by this name. ``typing.no_type_check`` would also hide the
    annotations from mypy.

    >>> no_type_check(len) is len
    True
    """
    return function


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
