"""User quantities in configs and on the command line, named ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from flatlens.errors import FlatlensError


def own_names(quantities: str | Sequence[str]) -> list[str]:
    """Return the entries that name a function of the user.

    >>> own_names(["sharpness", "mine:rank"]), own_names("default")
    (['mine:rank'], [])
    """
    names = [quantities] if isinstance(quantities, str) else list(quantities)
    return [name for name in names if ":" in name]


def resolved(quantities: Sequence[str]) -> list[str | Callable[..., Any]]:
    """Replace every ``package.module:function`` by the function itself.

    Args:
        quantities: names as for ``measure``, and names of functions of a Probe.

    Returns:
        The argument ``quantities`` of ``measure``.

    Raises:
        FlatlensError: if a module cannot be imported or has no such function.
    """
    return [_function(name) if ":" in name else name for name in quantities]


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    value: Any
    try:
        value = importlib.import_module(module)
        for word in attribute.split("."):
            value = getattr(value, word)
    except (Exception, SystemExit) as error:  # the module is a user's and may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise FlatlensError(
            f"The quantity {name!r} cannot be imported ({reason}); name a function of a Probe as "
            "package.module:function."
        ) from error
    if not callable(value):
        raise FlatlensError(
            f"The quantity {name!r} is a value of type {type(value).__name__}; name a function "
            "that takes a Probe and returns a number, or one number per sample."
        )
    return value
