"""Models of Transformers by name or folder: `hf:gpt2`, `hf:./checkpoint` (extra `transformers`).

Weights are read only from safetensors files, and code beside them is never run. The library's
settings decide about network access: its cache is used first, and with HF_HUB_OFFLINE=1 it does not
connect.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from torch import nn

from flatlens.compat import make_torchvision_importable
from flatlens.errors import FlatlensError, first_line

Weights = Literal["pretrained", "random"]


def transformers() -> Any:
    """Import the library.

    Raises:
        FlatlensError: if it is not installed; the message says how to install it.
    """
    make_torchvision_importable()
    try:
        return import_module("transformers")
    except ImportError as error:
        raise FlatlensError(
            "Models of Transformers need pip install 'flatlens[transformers]'."
        ) from error


def create(name: str, weights: Weights = "pretrained", **options: Any) -> nn.Module:
    """Create a model with its weights, in evaluation mode.

    The configuration names the class, such as GPT2LMHeadModel. If it names none, `AutoModel`
    chooses the class.

    Args:
        name: name on the hub, or a folder with config.json and safetensors files.
        weights: "pretrained", or "random" for weights from torch's global generator.
        options: entries of the configuration, such as num_labels.

    Raises:
        FlatlensError: if the model cannot be read, has no safetensors file, or needs code of its
            own.
    """
    library = transformers()
    if weights not in ("pretrained", "random"):
        raise FlatlensError(
            f"weights={weights!r} of hf:{name} is unknown; use pretrained or random."
        )
    try:
        config = library.AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
        config.use_cache = False  # the cache of earlier tokens is not needed
        kind = _model_class(library, config)
        if weights == "random":
            model = (
                kind._from_config(config)
                if kind is not library.AutoModel
                else kind.from_config(config)
            )
        else:
            model = kind.from_pretrained(
                name, config=config, use_safetensors=True, trust_remote_code=False
            )
    except Exception as error:  # the hub, a file or a model may raise anything
        raise FlatlensError(f"Cannot load hf:{name}: {_reason(name, error)}.") from error
    plain: nn.Module = model.eval()
    return plain


def _model_class(library: Any, config: Any) -> Any:
    """Return the class that the configuration names, if it is one of the library's models."""
    for name in getattr(config, "architectures", None) or ():
        kind = getattr(library, name, None)
        if isinstance(kind, type) and issubclass(kind, library.PreTrainedModel):
            return kind
    return library.AutoModel


def _reason(name: str, error: Exception) -> str:
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        return "the folder has no config.json"
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        return "the folder has no safetensors file; save the model with save_pretrained"
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is not run"
    return first_line(error).rstrip(".")
