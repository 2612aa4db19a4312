"""Options of data sets: from the text behind a name, or from values of any origin."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection
from typing import Any

from flatlens.data.arrays import Data
from flatlens.errors import FlatlensError
from flatlens.files.reading import shown

FLAGS = {"true": True, "false": False}


def from_text(name: str, reader: Callable[..., Data], text: str) -> dict[str, Any]:
    """Parse the options in the name of a data set, such as `n=500&dim=8`.

    The default of the reader's parameter decides the type of each value.

    Raises:
        FlatlensError: if an option is given twice or has the wrong type.
    """
    defaults = defaults_of(reader)
    options: dict[str, Any] = {}
    for key, _, value in (item.partition("=") for item in text.split("&")):
        if key in options:
            raise FlatlensError(f"Data {name!r} is given the option {key} twice.")
        default = defaults.get(key, "")
        try:
            if isinstance(default, bool):
                options[key] = FLAGS[value]
            elif default is None:
                options[key] = tuple(int(number) for number in value.split(","))
            else:
                options[key] = type(default)(value)
        except (ValueError, KeyError) as error:
            raise _wrong_kind(name, key, value, default) from error
    return options


def from_values(name: str, reader: Callable[..., Data], options: dict[str, Any]) -> dict[str, Any]:
    """Convert options from Python, TOML or JSON to the types of the reader's defaults.

    Raises:
        FlatlensError: if an option has the wrong type.
    """
    defaults = defaults_of(reader)
    converted: dict[str, Any] = {}
    for key, value in options.items():
        default = defaults[key]
        try:
            converted[key] = _converted(default, value)
        except (TypeError, ValueError, OverflowError) as error:
            raise _wrong_kind(name, key, value, default) from error
    return converted


def _converted(default: Any, value: Any) -> Any:
    """Convert a value to the type of a default; the default None takes one or more integers."""
    if default is None and value is not None:
        many = value if isinstance(value, Collection) and len(value) else (value,)
        return tuple(map(operator.index, many))
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise TypeError(value)
        return value
    if type(default) is int:
        return operator.index(value)
    if isinstance(value, str) != isinstance(default, str):
        raise TypeError(value)
    return value if default is None else type(default)(value)


def _wrong_kind(name: str, key: str, value: Any, default: Any) -> FlatlensError:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
    kind = kinds.get(type(default), "whole numbers")
    return FlatlensError(f"Data {name!r}: {key} takes {kind}, not {shown(value)}.")


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the default of each parameter of a function."""
    return {key: p.default for key, p in inspect.signature(function).parameters.items()}
