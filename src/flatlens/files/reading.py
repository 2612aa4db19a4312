"""Read files that a crash, a disk or a stranger may have changed.

Every reader here accepts a regular file of limited size and returns plain values of limited depth.
Otherwise it raises a FlatlensError that names the file, the line and the reason. It never waits for
a pipe or a device. It follows a link only with ``follow=True``, which is for files that the user
named. `flatlens.files.schema` checks the values.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError

DEEPEST = 32  # levels of lists and objects inside each other
LONGEST_INTEGER = 19  # digits of a 64-bit integer, the largest of NumPy, pandas and torch
LARGEST_TEXT = 16 << 20  # bytes of a config or TOML file
LARGEST_TABLE = 200 << 20  # bytes of a JSON file with numbers per layer or per sample
LARGEST_LINES = 4 << 30  # bytes of a file of records, unpacked
LARGEST_LINE = 64 << 20  # bytes of one record
BLOCK = 1 << 20  # bytes read at a time


def read_bytes(path: Path, limit: int = LARGEST_TEXT, *, follow: bool = False) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file to read.
        limit: largest size in bytes that is read.
        follow: whether `path` may be a symbolic link.

    Raises:
        FlatlensError: if the file is missing, no regular file, too large or unreadable.
    """
    with opened(path, follow) as handle, os.fdopen(handle, "rb", closefd=False) as stream:
        size = os.fstat(handle).st_size
        if size > limit:
            raise FlatlensError(
                f"{path} has {size:,} bytes, more than the {limit:,} that are read; check that it "
                "is the right file."
            )
        try:
            return stream.read(limit + 1)
        except OSError as error:
            raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error


@contextlib.contextmanager
def opened(path: Path, follow: bool = False) -> Iterator[int]:
    """Open a regular file for reading, without waiting for a pipe.

    Args:
        path: the file to open.
        follow: whether `path` may be a symbolic link.

    Raises:
        FlatlensError: if the file is missing, unreadable or not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)  # the second for Windows
    flags |= getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    try:
        if path.is_symlink() and not follow:
            raise FlatlensError(f"{path} is a symbolic link, which is not followed; copy the file.")
        handle = os.open(path, flags)
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:  # a NUL character in the path
        if isinstance(error, FlatlensError):
            raise
        raise FlatlensError(f"Cannot read {str(path)!r}: {error}.") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise FlatlensError(f"{path} is not a regular file; nothing is read from it.")
        yield handle
    finally:
        os.close(handle)


def read_json(path: Path, limit: int = LARGEST_TEXT, *, follow: bool = False) -> Any:
    """Return the value in a JSON file.

    Args:
        path: the file to read.
        limit: largest size in bytes that is read.
        follow: whether `path` may be a symbolic link.

    Raises:
        FlatlensError: if the file cannot be read or is not JSON of moderate depth and size.
    """
    return parse_json(read_bytes(path, limit, follow=follow), str(path))


def parse_json(content: bytes | str, where: str) -> Any:
    """Return the value of a JSON text.

    Args:
        content: the text.
        where: the file and line that it comes from, for the message.

    Raises:
        FlatlensError: if the text is no JSON, too deep, or holds an integer beyond 64 bits.

    >>> parse_json('{"step": 3}', "records.jsonl")
    {'step': 3}
    """
    try:
        value = json.loads(content, parse_int=_integer)
    except _TooLongError as error:
        raise FlatlensError(f"{where} is damaged: it has an integer of {error} digits.") from None
    except RecursionError:
        raise FlatlensError(f"{where} is damaged: it is nested too deeply.") from None
    except json.JSONDecodeError as error:
        place = f" at line {error.lineno}, column {error.colno}" if error.lineno > 1 else ""
        raise FlatlensError(f"{where} is damaged: it is not JSON ({error.msg}{place}).") from None
    except ValueError:  # bytes that are not UTF-8
        raise FlatlensError(f"{where} is damaged: it is not UTF-8 text.") from None
    _check_depth(value, where)
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file as a dict.

    Raises:
        FlatlensError: if the file cannot be read or is not TOML of moderate depth and size.
    """
    content = read_bytes(path, follow=True)  # the user named the file
    try:
        tables = tomllib.loads(content.decode("utf-8"), parse_float=float)
    except RecursionError:
        raise FlatlensError(f"{path} is nested too deeply.") from None
    except ValueError as error:  # also bytes that are not UTF-8, and integers of 5,000 digits
        raise FlatlensError(f"{path} is not TOML: {_short(error)}.") from error
    _check_depth(tables, str(path))
    return tables


def read_gzip_lines(
    path: Path, limit: int = LARGEST_LINES, *, follow: bool = False
) -> Iterator[bytes]:
    """Yield the lines of a gzip file, without their ends.

    Args:
        path: the file to read.
        limit: largest unpacked size in bytes; a small file can unpack to any size.
        follow: whether `path` may be a symbolic link.

    Raises:
        FlatlensError: if the file is missing, damaged, cut short or too large.
    """
    rest, size, number = b"", 0, 0
    for block in _unpacked(path, follow):
        size += len(block)
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            number += 1
            yield line
        if size > limit or len(rest) > LARGEST_LINE:
            raise FlatlensError(
                f"{path} unpacks to more than is read (line {number + 1}, {size:,} bytes); check "
                "that it is the right file."
            )
    if rest:
        yield rest


def _unpacked(path: Path, follow: bool) -> Iterator[bytes]:
    """Yield the content of a gzip file in blocks."""
    unpacker = zlib.decompressobj(wbits=31)  # gzip, with its checksum
    pending = b""
    with opened(path, follow) as handle, os.fdopen(handle, "rb", closefd=False) as stream:
        try:
            while True:
                pending = pending or unpacker.unconsumed_tail or stream.read(BLOCK)
                block = unpacker.decompress(pending, BLOCK)
                if not block and not pending:
                    raise FlatlensError(f"{path} is cut short: its gzip data has no end.")
                yield block
                pending = b""
                if unpacker.eof:  # several gzip files in a row are one; zeros may follow
                    pending = (unpacker.unused_data or stream.read(BLOCK)).lstrip(b"\0")
                    unpacker = zlib.decompressobj(wbits=31)
                    if not pending:
                        return
        except zlib.error as error:
            raise FlatlensError(f"{path} is damaged or no gzip file: {_short(error)}.") from error
        except OSError as error:
            raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error


def shown(value: object, longest: int = 80) -> str:
    """Return the repr of a value for a message, cut to a moderate length.

    >>> shown([1, 2]), shown(10**5000)
    ('[1, 2]', 'an integer of more than 19 digits')
    """
    if isinstance(value, int) and abs(value) >= 10**LONGEST_INTEGER:
        return f"an integer of more than {LONGEST_INTEGER} digits"
    try:
        text = repr(value)
    except Exception:  # anyone's object; integers of 5,000 digits inside a list
        text = f"a {type(value).__name__}"
    return text if len(text) <= longest else f"{text[:longest]}..."


class _TooLongError(ValueError):
    """Raised for an integer with too many digits; the message is the number of digits."""


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > LONGEST_INTEGER:
        raise _TooLongError(len(digits.lstrip("-")))
    return int(digits)


def _check_depth(value: Any, where: str) -> None:
    """Raise if a value is nested deeper than `DEEPEST` or has an integer beyond 64 bits."""
    level = [value]
    for _ in range(DEEPEST):
        if any(isinstance(item, int) and not -(2**63) <= item < 2**63 for item in level):
            raise FlatlensError(f"{where} has an integer beyond 64 bits.")
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return
    raise FlatlensError(f"{where} is nested too deeply: more than {DEEPEST} levels.")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _short(error: Exception) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return text if len(text) <= 200 else f"{text[:200]}..."
