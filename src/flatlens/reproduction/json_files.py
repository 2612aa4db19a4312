"""Read and write the JSON files of a reproduction, complete or not at all.

Reading refuses a damaged file with one sentence that names the file, the line and the field. Every
file that `flatlens report` and `flatlens reproduce --from` read back passes through here.
"""

from __future__ import annotations

import gzip
import json
import math
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.files.replacing import replacing

LARGEST_FILE = 200_000_000  # bytes of a plain JSON file
LARGEST_LINE = 10_000_000  # bytes of one line of records
LARGEST_TOTAL = 4_000_000_000  # bytes of all records after decompression
LONGEST_INTEGER = 18  # digits; any such integer fits into 64 bits
DEEPEST = 8  # lists and objects inside one another


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


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        FlatlensError: if the file is missing, too large, damaged or nested too deeply.
    """
    require_regular(path, "JSON")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise FlatlensError(f"{path} is larger than {LARGEST_FILE:,} bytes; it is not ours.")
        content = path.read_bytes()
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    return parse_json(content, f"{path} is damaged")


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a gzipped file of JSON lines; yield the number of each line and its object.

    Raises:
        FlatlensError: if the file is missing or damaged; the sentence names the line.
    """
    require_regular(path, "records")
    number, total = 0, 0
    try:
        with gzip.open(path, "rb") as file:
            while line := file.readline(LARGEST_LINE + 1):
                number, total = number + 1, total + len(line)
                if len(line) > LARGEST_LINE or total > LARGEST_TOTAL:
                    raise FlatlensError(f"Line {number} of {path} is too long to be a record.")
                record = parse_json(line, f"Line {number} of {path} is damaged")
                if not isinstance(record, dict):
                    raise FlatlensError(f"Line {number} of {path} is not a JSON object.")
                yield number, record
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        where = f" after line {number}" if number else ""
        raise FlatlensError(f"Cannot read records from {path}{where}: {reason}.") from error


def parse_json(content: bytes, problem: str) -> Any:
    """Parse JSON, and refuse what is damaged, nested too deeply or has a huge integer.

    Args:
        content: UTF-8 text.
        problem: beginning of the sentence of a refusal, such as "Line 3 of FILE is damaged".
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_int=_integer)
        nested = depth(value) > DEEPEST
    except RecursionError:
        nested = True
    except ValueError as error:  # also of the decoding
        reason = " ".join(str(error).split())
        raise FlatlensError(f"{problem}: {reason}.") from None
    if nested:
        raise FlatlensError(f"{problem}: it is nested more than {DEEPEST} levels deep.")
    return value


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > LONGEST_INTEGER:
        raise ValueError(f"an integer has {len(digits.lstrip('-'))} digits")
    return int(digits)


def depth(value: Any) -> int:
    """Return how many lists and objects are inside one another.

    >>> depth({"a": [1, [2]]})
    3
    """
    deepest, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        deepest += 1
        level = [v for each in level for v in (each.values() if isinstance(each, dict) else each)]
    return deepest


def require_regular(path: Path, what: str) -> None:
    """Refuse a missing file, a folder, a FIFO and a device: opening a FIFO would wait for ever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise FlatlensError(f"Cannot read {what} from {path}: {reason}.") from error
    if not stat.S_ISREG(mode):
        raise FlatlensError(f"Cannot read {what} from {path}: it is not a regular file.")


def is_number(value: Any, *, low: int | float = -math.inf, whole: bool = False) -> bool:
    """Return whether a value is a finite number of at least `low`, and an integer if `whole`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value >= low and (not whole or value == int(value))


def refuse_field(where: str, field: str, value: Any, expected: str) -> FlatlensError:
    """Return the error for a field with a wrong value, such as "Line 3 of FILE".

    >>> refuse_field("Line 3 of r.gz", "step", "x", "a whole number")
    FlatlensError("Line 3 of r.gz has 'x' for 'step'; a whole number is expected.")
    """
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return FlatlensError(f"{where} has {shown} for {field!r}; {expected} is expected.")
