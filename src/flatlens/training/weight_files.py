"""Load weights from a file into a network, without ever running code from the file.

Two formats are read: safetensors, and files of `torch.save` with `weights_only=True`. The content
decides which, not the name of the file. Other objects in a file of `torch.save` (settings of a
trainer, say) are replaced by inert placeholders: nothing of them is imported or called.

Training scripts store the weights in different ways. All of these are found:

| stored as                                                      | where from                  |
|----------------------------------------------------------------|-----------------------------|
| `model.state_dict()`                                           | the PyTorch tutorials       |
| `{"state_dict": ...}`, `{"model_state_dict": ...}`, `{"net": ...}` | most training scripts   |
| names with `module.` or `_orig_mod.` in front                  | data parallel, torch.compile |
| names with `model.`, `net.` or another attribute in front      | Lightning's `.ckpt`         |

`key` chooses where there are several: `"ema"`, `"state_dict.teacher"`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flatlens.errors import FlatlensError
from flatlens.files.reading import shown

# keys under which training scripts store the weights, in the order in which they are tried
WRAPPERS = (
    "state_dict", "model_state_dict", "model", "net", "network", "net_state_dict", "weights",
    "params", "parameters", "module", "generator", "backbone", "encoder",
)  # fmt: skip


def load_weights(model: nn.Module, path: Path, key: str | None = None) -> None:
    """Copy the weights in a file into a network.

    Args:
        model: the network, changed in place. Every name and shape must agree.
        path: a safetensors file or a file of `torch.save`.
        key: where the weights are in the file, as in "ema" or "state_dict.teacher". By default
            they are looked for as in the table of this module.

    Raises:
        FlatlensError: if the file is damaged, holds no weights, or does not fit the network.
    """
    own = model.state_dict()
    state = _without_prefix(path, read_state(path, key), own)
    _compare(path, state, own)
    model.load_state_dict(state)


def read_state(
    path: Path, key: str | None = None, wrappers: Sequence[str] = WRAPPERS
) -> dict[str, Any]:
    """Read the state dict in a file.

    Args:
        path: a safetensors file or a file of `torch.save`.
        key: where the state dict is, with dots between keys. By default it is looked for.
        wrappers: keys that are tried if there is no `key`.

    Returns:
        Tensors by name.

    Raises:
        FlatlensError: if the file cannot be read or holds no tensors there.
    """
    content = _read(path)
    if key is not None:
        content = _selected(path, content, key)
    else:
        content = _unwrapped(path, content, wrappers)
    if not _is_state(content):
        raise FlatlensError(
            f"{path} holds no state dict: save model.state_dict(), by itself or under one of the "
            f"keys {', '.join(wrappers[:4])}, or name its key."
        )
    return dict(content)


def _read(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():
            raise FlatlensError(f"Cannot read {path}: it is not a regular file.")
        safe = _is_safetensors(path)
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    try:
        return load_file(path) if safe else _torch_load(path)
    except SafetensorError as error:
        raise FlatlensError(f"Cannot read {path} as safetensors: {error}.") from error
    # torch.load may raise anything for a damaged or foreign file
    except Exception as error:
        raise FlatlensError(
            f"{path} is neither safetensors nor a torch checkpoint of tensors alone; "
            "save model.state_dict(), nothing else is loaded from a file that may run code."
        ) from error


class _Placeholder:
    """A stand-in for an object of a class that is not loaded; it accepts and ignores everything."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Forget an item of a list."""

    def extend(self, items: Any) -> None:
        """Forget the items of a list."""


def _torch_load(path: Path) -> Any:
    """Load the tensors and plain values of a file; other classes become placeholders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old formats
        try:
            return torch.load(path, "cpu", weights_only=True)
        except Exception:
            classes = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if not classes:
                raise
            # a tuple maps the name in the file to our class, the only one that is ever called
            placeholders: list[Any] = [(_Placeholder, name) for name in classes]
            with torch.serialization.safe_globals(placeholders):
                return torch.load(path, "cpu", weights_only=True)


def _is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors: eight bytes with the length of a JSON object."""
    with path.open("rb") as file:
        head = file.read(9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") + 8 <= path.stat().st_size


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _unwrapped(path: Path, content: Any, wrappers: Sequence[str]) -> Any:
    """Find the state dict inside what a training script saved."""
    for _ in range(4):  # {"model": {"state_dict": ...}}
        if _is_state(content) or not isinstance(content, Mapping):
            return content
        known = [key for key in wrappers if isinstance(content.get(key), Mapping)]
        others = [str(key) for key, value in content.items() if _is_state(value)]
        if not known and len(others) > 1:
            raise FlatlensError(
                f"{path} holds several state dicts ({_few(others, 6)}); name one of them as key."
            )
        chosen = known[0] if known else next(iter(others), None)
        if chosen is None:
            return content
        content = content[chosen]
    return content


def _selected(path: Path, content: Any, key: str) -> Any:
    """Follow a dotted key; a part may also be a prefix of the names in a state dict."""
    here = content
    for word in key.split("."):
        names = [str(name) for name in here] if isinstance(here, Mapping) else []
        prefix = f"{word}."
        if word in names:
            here = here[word]
        elif any(name.startswith(prefix) for name in names):
            here = {
                name.removeprefix(prefix): value
                for name, value in here.items()
                if str(name).startswith(prefix)
            }
        else:
            raise FlatlensError(
                f"{path} has no key {shown(key)}: there is no {word!r} among "
                f"{_few(names, 8) or 'the values there'}."
            )
    return here


def _without_prefix(path: Path, state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the prefix that a wrapper put in front of all names of the network.

    Names without the prefix belong to something else, such as a loss with weights in a Lightning
    module, and are dropped.
    """
    if not own or all(name in state for name in own):
        return state
    ending = next(iter(own))
    prefixes = [name.removesuffix(ending) for name in state if name.endswith(f".{ending}")]
    fitting = [p for p in prefixes if all(f"{p}{name}" in state for name in own)]
    if len(fitting) > 1:
        names = [prefix.rstrip(".") for prefix in fitting]
        raise FlatlensError(
            f"{path} holds the weights of several networks ({_few(names, 6)}); name one of them "
            "as key."
        )
    # without a full match, drop the common prefix, so that the message is about the rest
    for prefix in fitting or ("module.", "_orig_mod."):
        if fitting or all(name.startswith(prefix) for name in state):
            state = {
                name.removeprefix(prefix): value
                for name, value in state.items()
                if name.startswith(prefix)
            }
    return state


def _compare(path: Path, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    shapes = {key: value.shape for key, value in own.items() if isinstance(value, Tensor)}
    tensors = {key: value for key, value in state.items() if key in shapes}
    differences = [
        f"{key} is {list(value.shape)} instead of {list(shapes[key])}"
        for key, value in tensors.items()
        if isinstance(value, Tensor) and value.shape != shapes[key]
    ]
    faults = {
        "missing": [key for key in own if key not in state],
        "unexpected": [key for key in state if key not in own],
        "of another shape": differences,
        "not a tensor": [key for key, value in tensors.items() if not isinstance(value, Tensor)],
    }
    if any(faults.values()):
        reasons = "; ".join(f"{what}: {_few(keys)}" for what, keys in faults.items() if keys)
        raise FlatlensError(f"{path} does not fit the model ({reasons}).")


def _few(names: Iterable[str], at_most: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more
