"""Measurements as files: one JSON file that restores every number bit for bit.

Numbers that a person may want to read are plain JSON. Arrays are written as the base64 text of
their little-endian bytes, with dtype and shape. Only the classes named here are ever rebuilt from a
file, and nothing in a file is executed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from flatlens.algebra.operator_norms import WeightNorms
from flatlens.capture.chain import Chain
from flatlens.errors import FlatlensError, first_line
from flatlens.files.plain_json import dumps, from_plain
from flatlens.files.reading import LARGEST_LINES, read_json
from flatlens.files.replacing import write_whole
from flatlens.inequalities import Bounds, Inequality
from flatlens.probes import (
    FirstLayerProbe,
    InputProbe,
    LayerProbe,
    ParameterProbe,
    Probe,
    Sketch,
)

SCHEMA = 1
HEADER = {"format": "flatlens measurement", "schema": SCHEMA}
CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Probe, InputProbe, LayerProbe, FirstLayerProbe, ParameterProbe),
        *(Sketch, WeightNorms, Chain),
    )
}
DTYPES = {"float64": "<f8", "float32": "<f4", "int64": "<i8", "int32": "<i4", "bool": "|b1"}
T = TypeVar("T")


def encode(value: Any) -> Any:
    """Convert a probe, or a value inside one, to JSON values.

    Args:
        value: a dataclass of ``CLASSES``, an array, a torch dtype, a number, a string, None, or
            lists, tuples and dicts of these.

    Returns:
        Plain data that ``decode`` restores.
    """
    if is_dataclass(value) and type(value).__name__ in CLASSES:
        content = {f.name: encode(getattr(value, f.name)) for f in fields(value)}
        return {"class": type(value).__name__, "fields": content}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).astype(DTYPES[value.dtype.name], copy=False)
        text = base64.b64encode(data.tobytes()).decode("ascii")
        return {"dtype": value.dtype.name, "shape": list(value.shape), "base64": text}
    if isinstance(value, torch.dtype):
        return {"torch dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [encode(entry) for entry in value]}
    if isinstance(value, list):
        return [encode(entry) for entry in value]
    if isinstance(value, float):  # a string that reads "inf" must stay a string
        return {"number": str(float(value))} if not np.isfinite(value) else float(value)
    return value.item() if isinstance(value, np.generic) else value


def decode(value: Any, kind: type[T]) -> T:
    """Restore a value that ``encode`` converted.

    Args:
        value: the plain data.
        kind: the type that it must have.

    Returns:
        The value.

    Raises:
        ValueError: if the data are damaged or of another type.
    """
    restored = _restored(value)
    if not isinstance(restored, kind):
        raise ValueError(f"a {kind.__name__} is needed, not a {type(restored).__name__}")
    return restored


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"class": name, "fields": content}:
            # Missing fields take their default, because an older file may have fewer fields.
            return CLASSES[name](**{key: _restored(entry) for key, entry in content.items()})
        case {"dtype": name, "shape": shape, "base64": text}:
            data = np.frombuffer(base64.b64decode(text, validate=True), DTYPES[name])
            return data.astype(name).reshape(shape)
        case {"torch dtype": name}:
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} is not a dtype")
            return dtype
        case {"dict": pairs}:
            return {_restored(key): _restored(entry) for key, entry in pairs}
        case {"tuple": entries}:
            return tuple(_restored(entry) for entry in entries)
        case {"number": text}:
            return float(text)
    raise ValueError(f"an object with the keys {', '.join(map(str, value))} is unknown")


def decode_numbers(values: Any) -> dict[str, float]:
    """Restore named numbers."""
    return {str(name): float(number) for name, number in from_plain(values).items()}


def decode_bounds(stored: Any) -> Bounds:
    """Restore inequalities; only their numbers may be written as "inf" or "nan"."""
    numbers = ("lhs", "rhs", "slack", "log_lhs", "log_rhs")
    return Bounds(
        Inequality(**{key: from_plain(v) if key in numbers else v for key, v in row.items()})
        for row in stored
    )


def write(path: Any, content: dict[str, Any]) -> Path:
    """Write a JSON file completely or not at all.

    Args:
        path: the file; an existing one is replaced.
        content: a value that ``to_plain`` accepts.

    Returns:
        The path.

    Raises:
        FlatlensError: if the path is not one or cannot be written.
    """
    path = checked_path(path)
    write_whole(path, dumps(content).encode())
    return path


@contextmanager
def opened(path: Any) -> Iterator[dict[str, Any]]:
    """Read a saved measurement; error messages name the file.

    Args:
        path: the file.

    Yields:
        Its content, of a schema that this version of flatlens knows.

    Raises:
        FlatlensError: if the file cannot be read, is no saved measurement, or is damaged.
    """
    path = checked_path(path)
    content = read_json(path, LARGEST_LINES, follow=True)
    if not isinstance(content, dict) or content.get("format") != HEADER["format"]:
        raise FlatlensError(f"{path} is not a saved measurement; write one with m.save(...)")
    schema = content.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise FlatlensError(
            f"{path} has the schema {schema!r}; this version of flatlens reads 1 to {SCHEMA}"
        )
    try:
        yield content
    except (
        *(KeyError, TypeError, ValueError, AttributeError, RecursionError, binascii.Error),
    ) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise FlatlensError(f"{path} is a damaged measurement: {reason}") from error


def checked_path(path: Any) -> Path:
    """Return the argument ``path`` as a Path, or refuse it."""
    if not isinstance(path, (str, Path)) or not str(path):
        raise FlatlensError(f"path={path!r} is not a file name; give a text or a Path")
    if "\0" in str(path):
        raise FlatlensError("path holds a NUL character; give the name of a file")
    return Path(path)
