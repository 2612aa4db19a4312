"""Tensors with a description, in safetensors files: checkpoints and snapshots of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flatlens.errors import FlatlensError, first_line
from flatlens.files.reading import opened, parse_json
from flatlens.files.replacing import write_whole
from flatlens.files.schema import Field, checked

KEY = "flatlens"  # of the description: a single one, because the order of several varies
SCHEMA = {
    "records": Field((int,), required=True, low=0),
    "meta": Field((dict,), required=True),
    "sha256": Field((str,)),  # of the records, since format 2
}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors and the description from which a run resumes.

    Args:
        tensors: tensors by name, on the CPU.
        meta: the description that the writer stored with the tensors.
        records: number of records when it was written.
        checksum: SHA-256 of these records; None for a checkpoint of flatlens 0.1.0.
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    records: int
    checksum: str | None


def write(path: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Replace a safetensors file at one instant.

    Raises:
        FlatlensError: if JSON cannot hold the description, or the disk refuses the file.
    """
    try:
        text = json.dumps(dict(description))
    except (TypeError, ValueError) as error:
        raise FlatlensError(f"The meta of {path} is not plain JSON: {error}.") from None
    # safetensors refuses tensors that share memory, as tied weights do: copy them
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    write_whole(path, save(copies, {KEY: text}))


def read(path: Path) -> Checkpoint:
    """Return a checkpoint.

    Raises:
        FlatlensError: if the file is damaged or no checkpoint of a run.
    """
    with opened(path):  # refuses what is no regular file
        pass
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {})[KEY]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise FlatlensError(
            f"{path} is damaged ({first_line(error)}); delete it to start the run again."
        ) from error
    content = checked(parse_json(text, f"The description in {path}"), SCHEMA, str(path))
    return Checkpoint(tensors, content["meta"], content["records"], content.get("sha256"))
