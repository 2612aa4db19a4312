"""The fields of `Config` as options of the command line, each with its help; all are optional.

Names and texts of the options are those of `Config`. An option that the user does not give stays
out, so that options can be laid over a file.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, make_dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from cyclopts import Parameter
from docstring_parser import parse

from flatlens.training.config import Config


def whole_number(_type: Any, tokens: Sequence[Any]) -> int:
    """Convert a word of the command line to an integer; cyclopts alone would round 1.5 to 2.

    Raises:
        ValueError: if the word is no whole number.
    """
    word = tokens[0].value if hasattr(tokens[0], "value") else str(tokens[0])
    if not re.fullmatch(r"[+-]?\d{1,30}", word.replace("_", ""), re.ASCII):
        raise ValueError(f"{word!r} is not a whole number")
    return int(word)


WholeNumber = Annotated[int, Parameter(converter=whole_number)]
LISTS: dict[str, Any] = {"classes": list[WholeNumber], "quantities": list[str]}
TABLES = ("model_options", "data_options")  # --model-options.activation tanh
TEXTS = {p.arg_name: p.description or "" for p in parse(inspect.getdoc(Config) or "").params}


def options(name: str, many: bool = False) -> type:
    """Create a dataclass of the options.

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
        suffix = f" [default: {default}]" if default is not None else ""
        parameter = Parameter(
            help=" ".join(TEXTS[f.name].split()) + suffix,
            negative="",
            consume_multiple=True,
            converter=whole_number if kind is int and not listed else None,
        )
        if listed:
            kind = list[WholeNumber] if kind is int else list[kind]  # type: ignore[valid-type]
        columns.append((f.name, Annotated[kind | None, parameter], None))
    # cyclopts takes a class from the module `types` for a builtin
    namespace = {"__module__": __name__}
    return make_dataclass(name, columns, frozen=True, namespace=namespace)


def _kind(name: str, hint: Any) -> Any:
    if name in TABLES:
        return dict[str, str]
    if name in LISTS:
        return LISTS[name]
    return next((kind for kind in get_args(hint) if kind is not NoneType), hint)


def chosen(given: Any) -> dict[str, Any]:
    """Return the options that a user gave, by the name of the field."""
    values = {f.name: getattr(given, f.name) for f in fields(given)}
    return {
        name: _table(value) if name in TABLES else value
        for name, value in values.items()
        if value is not None
    }


def _table(words: Mapping[str, str]) -> dict[str, Any]:
    """Convert values from JSON where they can be (3, [1, 2], true); others stay text."""
    return {key: _value(word) for key, word in words.items()}


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):  # ValueError also for an integer of 5,000 digits
        return word
