"""Vision models of timm by name: selection, construction, size (extra `zoo`).

All code gets timm from `timm()` here, which first makes torchvision importable with any torch.
flatlens reads weights from files itself, as tensors only. While timm loads weights from its hub,
torch.load accepts nothing but tensors.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from flatlens.compat import make_torchvision_importable
from flatlens.errors import FlatlensError, first_line
from flatlens.training.weight_files import WRAPPERS, read_state

CLASSES, LARGEST = 1000, 384  # the paper's filters: classes of ImageNet, largest image in pixels
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
CACHE = "attention_bias_cache"  # timm's name for it
WAIT = 5  # seconds that the hub may take to answer


def timm() -> Any:
    """Import the library.

    Raises:
        FlatlensError: if it is not installed; the message says how to install it.
    """
    make_torchvision_importable()
    try:
        return import_module("timm")
    except ImportError as error:
        raise FlatlensError("Models of timm need pip install 'flatlens[zoo]'.") from error


def select(patterns: Sequence[str], source: str) -> list[str]:
    """Return the models that match, in timm's order.

    A pattern with wildcards selects models that pass the paper's filters: 1000 classes, at most
    384 pixels, no test models. A full name is taken without filters.

    Args:
        patterns: names, with or without wildcards.
        source: "pretrained" (names have tags, as in deit_tiny_patch16_224.fb_in1k), "random", or a
            folder of weights. With a folder, wildcards select models that have a file in it.

    Raises:
        FlatlensError: if nothing matches, or a name is unknown.
    """
    library, selected = timm(), dict[str, None]()
    for pattern in patterns:
        if not any(c in pattern for c in "*?["):
            _check(pattern)
            selected[pattern] = None
            continue
        names = library.list_models(pattern, pretrained=source == "pretrained")
        if source not in ("pretrained", "random"):
            names += [n for n in library.list_models(pretrained=True) if fnmatchcase(n, pattern)]
            names = [n for n in names if _files(Path(source), [n])]
        selected |= dict.fromkeys(n for n in names if _passes(n))
    if not selected:
        raise FlatlensError(
            f"No model of timm matches {' '.join(patterns)} with {CLASSES} classes and at most "
            f"{LARGEST} pixels" + ("." if source in ("pretrained", "random") else f" in {source}.")
        )
    return list(selected)


def _check(name: str) -> None:
    library = timm()
    base, _, tag = name.partition(".")
    if not library.is_model(base):
        close = difflib.get_close_matches(base, library.list_models())
        hint = f"; do you mean {' or '.join(close)}?" if close else "."
        raise FlatlensError(f"timm has no model {base!r}{hint}")
    if tag and name not in library.list_models(f"{base}*", pretrained=True):
        raise FlatlensError(f"timm has no weights {tag} for {base}.")


def _passes(name: str) -> bool:
    cfg = timm().models.get_pretrained_cfg(name, allow_unregistered=False)
    return (
        cfg is not None
        and cfg.num_classes == CLASSES
        and max(cfg.input_size[1:]) <= LARGEST
        and not name.startswith("test_")
    )


def family(name: str) -> str:
    """Return the family of a model: the first word of its name, or timm's module if that says more.

    vit_relpos_small_patch16_224 belongs to vit_relpos, efficientvit_b0 to efficientvit_mit.
    """
    entry = timm().models.model_entrypoint(name.partition(".")[0])
    module = str(entry.__module__).rpartition(".")[2].replace("vision_transformer", "vit")
    word = name.partition("_")[0]
    return module if word in (*module.split("_"), "vit") else word


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    paths = (folder / f"{n}{suffix}" for n in names for suffix in SUFFIXES)
    return [path for path in paths if path.is_file()]


def weights_file(folder: Path, name: str) -> Path:
    """Return the file with the weights of a model, named after it with or without the tag.

    Raises:
        FlatlensError: if there is none.
    """
    if not (files := _files(folder, [name, name.partition(".")[0]])):
        raise FlatlensError(
            f"{folder} has no weights of {name}: a file {name} with one of {' '.join(SUFFIXES)}."
        )
    return files[0]


def create(name: str, **options: Any) -> nn.Module:
    """Create a model as `timm.create_model` does, by default with random weights.

    Args:
        name: name of the model. Random weights come from torch's global generator.
        options: options of timm: num_classes, img_size, in_chans, pretrained and others.
    """
    _check(name)
    with _tensors_only():
        return uncached(timm().create_model(name, **options))


def build(name: str, source: str, seed: int = 0, offline: bool = False) -> nn.Module:
    """Create a model with its weights, in evaluation mode.

    Args:
        name: name of the model.
        source: "pretrained", "random", or a folder with a file of weights.
        seed: seed of random weights.
        offline: use the cache of timm's hub and no network.

    Raises:
        FlatlensError: if the weights cannot be loaded.
    """
    library = timm()
    options: dict[str, Any] = {"pretrained": source != "random"}
    what = "pretrained weights" if options["pretrained"] else "the layers"
    if source not in ("pretrained", "random"):
        file = weights_file(Path(source), name)
        what = str(file)
        # no file name: several versions of timm would unpickle it
        options["pretrained_cfg_overlay"] = {"state_dict": _file_state(file, name)}
    with torch.random.fork_rng(devices=[]), _hub(offline), _tensors_only():
        torch.manual_seed(seed)
        try:
            model: nn.Module = library.create_model(name, **options)
        except Exception as error:  # the hub, a file or a model may raise anything
            if offline:
                reason = "there is no network, and the hub's cache does not have them"
            else:
                reason = first_line(error).rstrip(".")
            raise FlatlensError(f"Cannot load {what} of {name}: {reason}.") from error
    return uncached(model.eval())


class _Forgetful(dict[str, Tensor]):
    """A cache that removes an entry when it is read, so that values are computed each time."""

    def __contains__(self, key: object) -> bool:
        return False

    def __getitem__(self, key: str) -> Tensor:
        return self.pop(key)


def uncached(model: nn.Module) -> nn.Module:
    """Remove caches that hide parameters from derivatives, in place.

    In evaluation mode LeViT, EfficientViT (MSRA), TinyViT and others compute their attention biases
    once and store them, so later passes see constants instead of parameters.
    """
    for module in model.modules():
        if hasattr(module, CACHE):
            setattr(module, CACHE, _Forgetful())
    return model


def reachable() -> bool:
    """Whether the hub of the weights answers; behind a proxy it is assumed to."""
    host = urlsplit(_constants().ENDPOINT)
    if urllib.request.getproxies():
        return True
    try:
        port = host.port or (80 if host.scheme == "http" else 443)
        socket.create_connection((host.hostname or "", port), WAIT).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _hub(offline: bool) -> Iterator[None]:
    """Use only the cache of the hub if offline, as it would retry for a minute per model."""
    constants = _constants()
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """Make torch.load accept only tensors, whatever the caller asks for."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _file_state(file: Path, name: str) -> dict[str, Tensor]:
    """Read the weights of a model from a file: averaged weights first, as timm does."""
    averaged = ("state_dict_ema", "model_ema")
    try:
        state = read_state(file, wrappers=(*averaged, *WRAPPERS))
    except FlatlensError as error:
        raise FlatlensError(f"Cannot load {file} of {name}: {error}") from error
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {key.removeprefix("module.").removeprefix("_orig_mod."): v for key, v in tensors.items()}


def _constants() -> Any:
    timm()
    return import_module("huggingface_hub.constants")


def transform(model: nn.Module) -> tuple[Any, int]:
    """Return the model's evaluation transform, from picture to tensor, and its size in pixels."""
    data = timm().data
    config = data.resolve_model_data_config(model)
    return data.create_transform(**config, is_training=False), config["input_size"][-1]


@dataclass(frozen=True)
class Size:
    """Size of a model, from one pass over shapes alone."""

    parameters: int
    pixels: int
    bytes: int  # stored for the backward pass of one image
    flops: int  # of one forward pass of one image


def size(name: str) -> Size:
    """Return the size of a model; nothing is computed or downloaded."""
    from torch.utils.flop_counter import FlopCounterMode

    saved = 0

    def count(t: Tensor) -> Tensor:
        nonlocal saved
        saved += t.numel() * t.element_size()
        return t

    with torch.device("meta"):
        model: nn.Module = timm().create_model(name).eval()
        shape = timm().data.resolve_model_data_config(model)["input_size"]
        x = torch.empty(1, *shape)
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda t: t)
        with FlopCounterMode(display=False) as counter, hooks:
            model(x)
    parameters = sum(p.numel() for p in model.parameters())
    return Size(parameters, shape[-1], max(0, saved - 4 * parameters), counter.get_total_flops())
