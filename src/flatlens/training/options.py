"""The fields of `Config` as options of the command line, each with its help, none of them needed.

There is one list of fields and one text for each: those of `Config`. What a user leaves out stays
out, so that options can be laid over a file.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from cyclopts import Parameter
from docstring_parser import parse

from flatlens.training.config import Config

LISTS: dict[str, type] = {"classes": list[int], "quantities": list[str]}
TABLES = ("model_options", "data_options")  # --model-options.activation tanh
TEXTS = {p.arg_name: p.description or "" for p in parse(inspect.getdoc(Config) or "").params}


def options(name: str, many: bool = False) -> type:
    """A dataclass of the options; with `many` each takes several values, for a grid."""
    hints = get_type_hints(Config)
    columns = []
    for f in fields(Config):
        one = _one(f.name, hints[f.name])
        listed = many and f.name not in TABLES and f.name not in LISTS
        default = f.default if isinstance(f.default, str | int | float) else None
        told = f" [default: {default}]" if default is not None else ""
        parameter = Parameter(
            help=" ".join(TEXTS[f.name].split()) + told, negative="", consume_multiple=True
        )
        kind = list[one] if listed else one  # type: ignore[valid-type]
        columns.append((f.name, Annotated[kind | None, parameter], None))
    # cyclopts takes a class from the module `types` for a builtin
    namespace = {"__module__": __name__}
    return make_dataclass(name, columns, frozen=True, namespace=namespace)


def _one(name: str, hint: Any) -> Any:
    if name in TABLES:
        return dict[str, str]
    if name in LISTS:
        return LISTS[name]
    return next((kind for kind in get_args(hint) if kind is not NoneType), hint)


def chosen(given: Any) -> dict[str, Any]:
    """The options that a user gave, by the name of the field."""
    values = {f.name: getattr(given, f.name) for f in fields(given)}
    return {
        name: _table(value) if name in TABLES else value
        for name, value in values.items()
        if value is not None
    }


def _table(words: Mapping[str, str]) -> dict[str, Any]:
    """Values are JSON where they can be (3, [1, 2], true), else text."""
    return {key: _value(word) for key, word in words.items()}


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word
