"""Write the JSON and text files of a reproduction, complete or not at all.

They are read back with `flatlens.files.reading`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.files.replacing import replacing


def json_value(value: Any, *, text: bool = False, digits: int | None = None) -> Any:
    """Replace a float that JSON does not have.

    Args:
        value: any value; only floats that are not finite change.
        text: write "inf", "-inf" or "nan" instead of null.
        digits: round to this many significant digits.

    >>> json_value(float("inf")), json_value(float("inf"), text=True), json_value(0.5)
    (None, 'inf', 0.5)
    """
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        return value if digits is None else float(f"{value:.{digits}g}")
    return str(float(value)) if text else None


def write_text(path: Path, text: str) -> Path:
    """Write a text file, complete or not at all, and return its path.

    Raises:
        FlatlensError: if the file cannot be written; the old file stays.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FlatlensError(f"Cannot write {path}: {error.strerror or error}.") from error
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write a value as indented JSON, complete or not at all, and return the path."""
    return write_text(path, json.dumps(value, indent=1) + "\n")
