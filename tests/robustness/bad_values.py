"""Wrong values by the type that an annotation, an option or a schema names.

The tests of this folder take their rows from signatures and schemas: every argument, option and
field times the values here that its type does not allow.
"""

from __future__ import annotations

import math
from typing import Any

import torch

HUGE = 10**400
NOT_A_TYPE = object()  # a value that no argument of flatlens takes

# For each type: values that are wrong for it. A union allows what any of its types allows.
WRONG: dict[str, list[Any]] = {
    "int": ["8", "", 2.5, math.nan, math.inf, True, [], {}, b"8", 1j, NOT_A_TYPE],
    "float": ["0.1", "", math.nan, True, [], {}, b"1", 1j, NOT_A_TYPE],
    "bool": ["yes", "", 2, 0.5, [], {}, NOT_A_TYPE],
    "str": [3, 0.5, True, [], {}, b"x", NOT_A_TYPE],
    "Path": [3, 0.5, True, [], {}, NOT_A_TYPE],
    "nn.Module": [3, "net", [], {}, len, NOT_A_TYPE],
    "Mapping": [3, "x", [1], NOT_A_TYPE],
    "Sequence": [3, "x", NOT_A_TYPE],
    "Collection": [3, "x", NOT_A_TYPE],
    "Iterable": [3, NOT_A_TYPE],
    "pd.DataFrame": [3, "x", [], {}, None, NOT_A_TYPE],
    "Figure": [3, "x", [], None, NOT_A_TYPE],
    "torch.Generator": [3, "x", [], NOT_A_TYPE],
    "Config": [3, "x", [], NOT_A_TYPE],
    "Precision": [16, "bf16", "", True, [], {}, torch.bfloat16, NOT_A_TYPE],
}
OUT_OF_RANGE: dict[str, list[Any]] = {
    "int": [-1, -HUGE, HUGE, 10**30],
    "float": [-1.0, math.inf, -math.inf, 1e308, HUGE],
    "str": ["", "no such name", "a\0b", "x" * 300],
    "Path": ["", "a\0b", "no/such/file", "x" * 300],
    "Sequence": [[], [None], [[]]],
    "Mapping": [{}, {3: 1}, {"": None}],
}
OPTIONAL = ("None", "NoneType")


def names_of(annotation: str) -> list[str]:
    """Split an annotation into the names of its types, without what stands in brackets.

    >>> names_of("str | Path | Sequence[str | int] | None")
    ['str', 'Path', 'Sequence', 'None']
    """
    depth, names = 0, [""]
    for letter in annotation:
        depth += (letter == "[") - (letter == "]")
        if letter == "|" and not depth:
            names.append("")
        elif not depth and letter != "]":
            names[-1] += letter
    return [name.strip() for name in names]


def wrong_values(annotation: str) -> list[Any]:
    """Return values whose type is wrong for an annotation; none if one of its types is open."""
    names = names_of(annotation)
    types = [name for name in names if name not in OPTIONAL]
    if not types or not all(name in WRONG for name in types):
        return []
    values = [*WRONG[types[0]], *([] if len(types) < len(names) else [None])]
    others = [WRONG[name] for name in types[1:]]
    return [v for v in values if all(any(v is w or v == w for w in wrong) for wrong in others)]


def odd_values(annotation: str) -> list[Any]:
    """Return values of the right type that are out of range, not finite, empty or huge."""
    return [value for name in names_of(annotation) for value in OUT_OF_RANGE.get(name, [])]


def label(value: Any) -> str:
    """Return a short name of a value for the id of a test."""
    if value is NOT_A_TYPE:
        return "object"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "huge" if value > 0 else "-huge"
    text = repr(value)
    return text if len(text) <= 20 else f"{text[:17]}..."
