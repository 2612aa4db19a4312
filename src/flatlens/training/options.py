"""The fields of `Config` as options of the command line, each with its help; all are optional.

The fields and their help texts come from `Config` alone. An option that the user does not give is
left out, so that options can override a file.
"""

from __future__ import annotations

import inspect
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields, make_dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from cyclopts import Parameter
from docstring_parser import parse

from flatlens.training.config import Config


def whole_number(_: Any, tokens: Sequence[Any]) -> int:
    """Read a whole number; cyclopts itself would round 1.5 to 2.

    Args:
        tokens: the words of the option, each with the text in ``value``.
    """
    word = str(tokens[0].value)
    try:
        return int(word)
    except ValueError:
        try:
            number = float(word)  # 1e3 is a whole number too
        except ValueError:
            number = math.nan
        if not number.is_integer():
            raise ValueError(f"{textwrap.shorten(word, 40)!r} is not a whole number.") from None
        return int(number)


Whole = Annotated[int, Parameter(converter=whole_number)]
LISTS: dict[str, Any] = {"classes": list[Whole], "quantities": list[str]}
TABLES = ("model_options", "data_options")  # --model-options.activation tanh
TEXTS = {p.arg_name: p.description or "" for p in parse(inspect.getdoc(Config) or "").params}


def options(name: str, many: bool = False) -> type:
    """Make a dataclass of the options.

    Args:
        name: name of the class.
        many: whether each option takes several values, for a grid.
    """
    hints = get_type_hints(Config)
    columns = []
    for f in fields(Config):
        kind = _kind(f.name, hints[f.name])
        listed = many and f.name not in TABLES and f.name not in LISTS
        default = f.default if isinstance(f.default, str | int | float) else None
        shown = f" [default: {default}]" if default is not None else ""
        parameter = Parameter(
            help=" ".join(TEXTS[f.name].split()) + shown, negative="", consume_multiple=True
        )
        if listed:
            kind = list[kind]  # type: ignore[valid-type]
        columns.append((f.name, Annotated[kind | None, parameter], None))
    # cyclopts takes a class from the module `types` for a builtin
    namespace = {"__module__": __name__}
    return make_dataclass(name, columns, frozen=True, namespace=namespace)


def _kind(name: str, hint: Any) -> Any:
    """Return the type of a single value of an option."""
    if name in TABLES:
        return dict[str, str]
    if name in LISTS:
        return LISTS[name]
    kind = next((kind for kind in get_args(hint) if kind is not NoneType), hint)
    return Whole if kind is int else kind


def chosen(given: Any) -> dict[str, Any]:
    """Return the options that the user gave, by the name of the field."""
    values = {f.name: getattr(given, f.name) for f in fields(given)}
    return {
        name: _table(value) if name in TABLES else value
        for name, value in values.items()
        if value is not None
    }


def _table(words: Mapping[str, str]) -> dict[str, Any]:
    """Read values as JSON where they are JSON (3, [1, 2], true), else as text."""
    return {key: _value(word) for key, word in words.items()}


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word
