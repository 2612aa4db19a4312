"""`config.json`: which run a folder holds, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.files.reading import parse_json, read_bytes, shown
from flatlens.files.replacing import write_whole
from flatlens.files.schema import Field, checked
from flatlens.runs.layout import FORMAT
from flatlens.runs.provenance import provenance

SCHEMA = {
    "config": Field((dict,), required=True),
    "provenance": Field((dict,)),
    "format": Field((int,), low=1),
}


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config with the provenance of this process."""
    content = {"format": FORMAT, "config": dict(config), "provenance": provenance()}
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def read_content(path: Path) -> dict[str, Any]:
    """Return all of `config.json`: `config`, and `provenance` and `format` where they are stored.

    Raises:
        FlatlensError: if the file is missing, damaged, or of a later version of flatlens.
    """
    try:
        content = checked(parse_json(read_bytes(path), str(path)), SCHEMA, str(path))
    except FlatlensError as error:
        reason = str(error).rstrip(".")
        raise FlatlensError(f"{path} is missing or damaged ({reason}); restore it.") from error
    if content.get("format", 1) > FORMAT:
        raise FlatlensError(
            f"{path} has format {content['format']}, but this flatlens reads up to {FORMAT}; "
            "install a newer flatlens."
        )
    return content


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a run.

    Raises:
        FlatlensError: if the file is missing, damaged, or of a later version of flatlens.
    """
    return dict(read_content(path)["config"])


def first_difference(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> tuple[str, str, str] | None:
    """Return the first key that differs with both values as text, or None.

    >>> first_difference({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}})
    ('b.c', '2', '3')
    """
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if a == b and (key in old) == (key in new):
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            return first_difference(a, b, f"{prefix}{key}.")
        texts = [shown(side[key]) if key in side else "nothing" for side in (old, new)]
        return prefix + key, texts[0], texts[1]
    return None


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options under dotted names, with tuples for lists: a table can group tuples.

    >>> flattened({"lr": 0.1, "model_options": {"widths": [2, 3]}})
    {'lr': 0.1, 'model_options.widths': (2, 3)}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = _hashable(value)
    return flat


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
