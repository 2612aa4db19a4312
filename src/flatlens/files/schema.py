"""Check that a value read from a file has the fields and types that it should have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.files.reading import shown


@dataclass(frozen=True)
class Field:
    """One field of a JSON object.

    Args:
        kinds: types that the field may have. A bool counts as an int only if bool is listed.
        required: whether the field must be there.
        low: smallest number that is allowed.
        high: largest number that is allowed.
    """

    kinds: tuple[type, ...]
    required: bool = False
    low: int | float = -math.inf
    high: int | float = math.inf

    def fault(self, value: Any) -> str | None:
        """Return what is wrong with a value, or None."""
        if not isinstance(value, self.kinds) or (
            isinstance(value, bool) and bool not in self.kinds
        ):
            return f"must be {_words(self.kinds)}"
        if isinstance(value, int | float) and not self.low <= value <= self.high:
            return f"must be a number from {self.low:g} to {self.high:g}"
        return None


Schema = Mapping[str, Field]


def checked(value: Any, schema: Schema, where: str, others: Field | None = None) -> dict[str, Any]:
    """Return a JSON object whose fields have been checked.

    Args:
        value: the value that was read.
        schema: the known fields.
        where: the file and line that it comes from, for the message.
        others: what every other field must be. None allows anything.

    Raises:
        FlatlensError: if the value is no object, or a field is missing or has a wrong value. The
            message names the field.

    >>> checked({"records": 3}, {"records": Field((int,), required=True, low=0)}, "done")
    {'records': 3}
    """
    if not isinstance(value, dict):
        raise FlatlensError(f"{where} is damaged: it is {shown(value)} instead of an object.")
    for name, field in schema.items():
        if field.required and name not in value:
            raise FlatlensError(f"{where} is damaged: the field {name!r} is missing.")
    for name, item in value.items():
        field_of_item = schema.get(name, others)
        fault = None if field_of_item is None else field_of_item.fault(item)
        if fault is not None:
            raise FlatlensError(
                f"{where} is damaged: the field {shown(name)} is {shown(item)}, but it {fault}."
            )
    return value


def _words(kinds: tuple[type, ...]) -> str:
    names = {
        int: "a whole number", float: "a number", str: "a text", bool: "true or false",
        dict: "an object", list: "a list", type(None): "null",
    }  # fmt: skip
    return " or ".join(names[kind] for kind in kinds)
