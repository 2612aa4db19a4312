"""Check that a value read from a file has the fields and types that it should have."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
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
        low: smallest number that is allowed; NaN and infinities are refused then.
        high: largest number that is allowed; NaN and infinities are refused then.
        whole: whether a number must be whole, as 3 and 3.0 are.
        words: the only texts that are allowed. None allows any text.
        empty: whether an empty text is allowed.
    """

    kinds: tuple[type, ...]
    required: bool = False
    low: int | float = -math.inf
    high: int | float = math.inf
    whole: bool = False
    words: Collection[str] | None = None
    empty: bool = True

    def fault(self, value: Any) -> str | None:
        """Return what is wrong with a value, or None."""
        if not isinstance(value, self.kinds) or (
            isinstance(value, bool) and bool not in self.kinds
        ):
            return f"must be {_words(self.kinds, self.whole)}"
        if isinstance(value, str):
            return self._fault_of_text(value)
        return self._fault_of_number(value) if isinstance(value, int | float) else None

    def _fault_of_text(self, value: str) -> str | None:
        if self.words is not None and value not in self.words:
            numbers = [k for k in (float, int) if k in self.kinds][:1]
            return f"must be {' or '.join([*(NAMES[k] for k in numbers), *self.words])}"
        return "must not be empty" if not value and not self.empty else None

    def _fault_of_number(self, value: int | float) -> str | None:
        limited = self.whole or math.isfinite(self.low) or math.isfinite(self.high)
        if not limited:
            return None
        whole = math.isfinite(value) and (not self.whole or value == int(value))
        if whole and self.low <= value <= self.high:
            return None
        kind = "a whole number" if self.whole else "a finite number"
        limits = {"of at least": self.low, "of at most": self.high}
        words = [f"{which} {limit:g}" for which, limit in limits.items() if math.isfinite(limit)]
        return " ".join(["must be", kind, " and ".join(words)]).rstrip()


Schema = Mapping[str, Field]
NAMES: dict[type, str] = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false",
    dict: "an object", list: "a list", type(None): "null",
}  # fmt: skip


def checked(
    value: Any,
    schema: Schema,
    where: str,
    others: Field | Callable[[str], Field | None] | None = None,
) -> dict[str, Any]:
    """Return a JSON object whose fields have been checked.

    Args:
        value: the value that was read.
        schema: the known fields.
        where: the file and line that it comes from, for the message.
        others: the check of all other fields: a Field, or a function of the name. None, or a
            function that returns None, allows any value.

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
        other = others(name) if callable(others) else others
        field_of_item = schema.get(name, other)
        fault = None if field_of_item is None else field_of_item.fault(item)
        if fault is not None:
            raise FlatlensError(
                f"{where} is damaged: the field {shown(name)} is {shown(item)}, but it {fault}."
            )
    return value


def is_number(value: Any, *, low: int | float = -math.inf, whole: bool = False) -> bool:
    """Return whether a value is a finite number of at least `low`, and an integer if `whole`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value >= low and (not whole or value == int(value))


def _words(kinds: tuple[type, ...], whole: bool = False) -> str:
    """Return the names of some types; "a number" includes whole numbers."""
    dropped = float if whole else int
    listed = [kind for kind in kinds if kind is not dropped or not {int, float} <= {*kinds}]
    return " or ".join(NAMES[kind] for kind in listed)
