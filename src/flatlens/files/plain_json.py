"""Values as JSON can hold them.

JSON has no infinities and no NaN. Here they are the strings "inf", "-inf" and "nan", so that any
JSON reader accepts the text and the numbers read back bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from flatlens.errors import FlatlensError

NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def finite(value: Any) -> Any:
    """Replace every infinity and NaN inside a value by its string.

    Args:
        value: a number, a string, or mappings, lists and tuples of them.

    Returns:
        The same value with dicts for mappings and lists for tuples.

    >>> finite({"volume": float("-inf"), "sides": (1.0, float("nan"))})
    {'volume': '-inf', 'sides': [1.0, 'nan']}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))  # float(): NumPy's own text may differ
    return value


def restored(value: Any) -> Any:
    """Replace a string that stands for an infinity or NaN by the number.

    >>> restored("-inf"), restored("relu"), restored(2)
    (-inf, 'relu', 2)
    """
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def as_json(value: Any, name: str) -> Any:
    """Return a value as it reads back from JSON: with lists for tuples, strings for infinities.

    Args:
        value: the value to convert.
        name: what the value is, for the message.

    Raises:
        FlatlensError: if JSON cannot hold the value.

    >>> as_json({"widths": (2, 3)}, "The config")
    {'widths': [2, 3]}
    """
    try:
        return json.loads(json.dumps(finite(value), allow_nan=False))
    except RecursionError:
        raise FlatlensError(f"{name} is nested too deeply for JSON.") from None
    except (TypeError, ValueError) as error:
        raise FlatlensError(f"{name} is not plain JSON: {error}.") from None
