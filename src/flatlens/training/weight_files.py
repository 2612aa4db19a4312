"""Weights from a file into a network, without ever running code from the file.

Two formats: safetensors, and what `torch.save` wrote if it holds tensors only
(`weights_only=True`). The content decides which, not the name of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flatlens.errors import FlatlensError

WRAPPERS = ("state_dict", "model")  # keys under which training scripts keep the weights
PREFIXES = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile prepend


def load_weights(model: nn.Module, path: Path) -> None:
    """Copies the weights in `path` into `model`; every name and shape must agree."""
    state = _unprefixed(read_state(path), model.state_dict())
    _compare(path, state, model.state_dict())
    model.load_state_dict(state)


def read_state(path: Path) -> dict[str, Any]:
    """The state dict in a safetensors or `torch.save` file."""
    try:
        safe = _is_safetensors(path)
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    try:
        content = load_file(path) if safe else torch.load(path, "cpu", weights_only=True)
    except SafetensorError as error:
        raise FlatlensError(f"Cannot read {path} as safetensors: {error}.") from error
    # torch.load meets a damaged or foreign file with whatever error its parser falls over
    except Exception as error:
        raise FlatlensError(
            f"{path} is neither safetensors nor a torch checkpoint of tensors alone; "
            "save model.state_dict(), nothing else is loaded from a file that may run code."
        ) from error
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not any(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise FlatlensError(
            f"{path} holds no state dict: save model.state_dict(), by itself or under one of the "
            f"keys {', '.join(WRAPPERS)}."
        )
    return dict(content)


def _is_safetensors(path: Path) -> bool:
    """Eight bytes with the length of the header, then the header, a JSON object."""
    with path.open("rb") as file:
        head = file.read(9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") + 8 <= path.stat().st_size


def _unprefixed(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Drops a wrapper's prefix if all names have it and the model's own names do not."""
    for prefix in PREFIXES:
        if all(k.startswith(prefix) for k in state) and not any(k.startswith(prefix) for k in own):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _compare(path: Path, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    shapes = {key: value.shape for key, value in own.items() if isinstance(value, Tensor)}
    differs = [
        f"{key} is {list(value.shape)} instead of {list(shapes[key])}"
        for key, value in state.items()
        if key in shapes and isinstance(value, Tensor) and value.shape != shapes[key]
    ]
    faults = {
        "missing": [key for key in own if key not in state],
        "unexpected": [key for key in state if key not in own],
        "of another shape": differs,
    }
    if any(faults.values()):
        told = "; ".join(f"{what}: {_few(keys)}" for what, keys in faults.items() if keys)
        raise FlatlensError(f"{path} does not fit the model ({told}).")


def _few(names: Iterable[str], at_most: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more
