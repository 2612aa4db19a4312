"""Convert values to strict JSON and back; JSON has no infinity, no NaN and no numpy types.

Non-finite floats are written as the strings "inf", "-inf" and "nan", so that every JSON reader
accepts the file. Numpy scalars become Python numbers, arrays become nested lists. Finite floats are
written with ``repr``, which gives back the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from flatlens.errors import FlatlensError

NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_plain(value: Any) -> Any:
    """Convert a value to one that strict JSON can hold.

    Args:
        value: numbers, strings, None, numpy scalars and arrays, and mappings, lists and tuples of
            these. The keys of a mapping are strings.

    Returns:
        The same value made of dict, list, str, int, float, bool and None, where each infinity or
        NaN is one of the strings "inf", "-inf" and "nan".

    Raises:
        FlatlensError: if a value or a key has no form in JSON.

    Example:
        >>> import numpy as np
        >>> to_plain({"slack": float("inf"), "norms": np.array([1.5, np.nan])})
        {'slack': 'inf', 'norms': [1.5, 'nan']}
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise FlatlensError(f"The key {key!r} is not a string and cannot be a JSON key.")
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    if type(value).__module__ == "numpy":  # its scalars and arrays, without an import of numpy
        return to_plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise FlatlensError(f"A value of type {type(value).__name__} cannot be written as JSON.")


def from_plain(value: Any) -> Any:
    """Convert the strings "inf", "-inf" and "nan" back to floats, in lists and dicts too.

    Apply it to numbers only, because a text that happens to be "nan" would become a number.

    Args:
        value: the result of ``json.loads`` for a value of ``to_plain``.

    Returns:
        The value with its floats restored. Tuples and arrays come back as lists.

    Example:
        >>> from_plain({"slack": "inf", "norms": [1.5, "-inf"]})
        {'slack': inf, 'norms': [1.5, -inf]}
    """
    if isinstance(value, dict):
        return {key: from_plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [from_plain(entry) for entry in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def dumps(value: Any, **options: Any) -> str:
    """Write a value as strict JSON.

    Args:
        value: as for ``to_plain``.
        options: as for ``json.dumps``, for example ``indent=2``.

    Returns:
        The text.

    Raises:
        FlatlensError: if a value or a key has no form in JSON.

    Example:
        >>> dumps({"rhs": float("inf")})
        '{"rhs": "inf"}'
    """
    return json.dumps(to_plain(value), allow_nan=False, **options)


def restored(value: Any) -> Any:
    """Return the number that "inf", "-inf" or "nan" stands for; other values stay.

    >>> restored("-inf"), restored("relu"), restored(2)
    (-inf, 'relu', 2)
    """
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def as_json(value: Any, name: str) -> Any:
    """Return a value as it reads back from JSON: with lists for tuples, strings for infinities.

    Args:
        value: the value to convert.
        name: a name of the value, for the message.

    Raises:
        FlatlensError: if JSON cannot hold the value.

    >>> as_json({"widths": (2, 3)}, "The config")
    {'widths': [2, 3]}
    """
    try:
        return json.loads(dumps(value))
    except RecursionError:
        raise FlatlensError(f"{name} is nested too deeply for JSON.") from None
    except (TypeError, ValueError) as error:
        raise FlatlensError(f"{name} is not plain JSON: {error}.") from None
