"""Vision models of timm by name: which there are, how to build them, what they take (extra `zoo`).

Every process that uses timm gets it from `timm()` here, which first makes torchvision importable
beside a torch that it was not built for.
"""

from __future__ import annotations

import contextlib
import difflib
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

CLASSES, LARGEST = 1000, 384  # the paper's filters: ImageNet's classes, at most so many pixels
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
CACHE = "attention_bias_cache"  # timm's name for it
WAIT = 5  # seconds that the hub may take to answer


def timm() -> Any:
    """The library, or a refusal that says how to get it."""
    make_torchvision_importable()
    try:
        return import_module("timm")
    except ImportError as error:
        raise FlatlensError("Models of timm need pip install flatlens[zoo].") from error


def select(patterns: Sequence[str], source: str) -> list[str]:
    """The models that match, in timm's order.

    A pattern with wildcards takes what passes the paper's filters: 1000 classes, at most 384
    pixels, no test models. A name in full is taken as it is. `source` is "pretrained" (names have
    tags there, as in deit_tiny_patch16_224.fb_in1k), "random", or a folder of weights: then
    wildcards choose among the models that have a file in it.
    """
    library, found = timm(), dict[str, None]()
    for pattern in patterns:
        if not any(c in pattern for c in "*?["):
            _check(pattern)
            found[pattern] = None
            continue
        names = library.list_models(pattern, pretrained=source == "pretrained")
        if source not in ("pretrained", "random"):
            names += [n for n in library.list_models(pretrained=True) if fnmatchcase(n, pattern)]
            names = [n for n in names if _files(Path(source), [n])]
        found |= dict.fromkeys(n for n in names if _passes(n))
    if not found:
        raise FlatlensError(
            f"No model of timm matches {' '.join(patterns)} with {CLASSES} classes and at most "
            f"{LARGEST} pixels" + ("." if source in ("pretrained", "random") else f" in {source}.")
        )
    return list(found)


def _check(name: str) -> None:
    library = timm()
    base, _, tag = name.partition(".")
    if not library.is_model(base):
        close = difflib.get_close_matches(base, library.list_models())
        told = f"; do you mean {' or '.join(close)}?" if close else "."
        raise FlatlensError(f"timm has no model {base!r}{told}")
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
    """The class of a model: the first word of its name, or timm's module where that says more.

    vit_relpos_small_patch16_224 is of vit_relpos, efficientvit_b0 of efficientvit_mit.
    """
    entry = timm().models.model_entrypoint(name.partition(".")[0])
    module = str(entry.__module__).rpartition(".")[2].replace("vision_transformer", "vit")
    word = name.partition("_")[0]
    return module if word in (*module.split("_"), "vit") else word


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    paths = (folder / f"{n}{suffix}" for n in names for suffix in SUFFIXES)
    return [path for path in paths if path.is_file()]


def weights_file(folder: Path, name: str) -> Path:
    """The file with the weights of a model, by its name with or without the tag."""
    if not (found := _files(folder, [name, name.partition(".")[0]])):
        raise FlatlensError(
            f"{folder} has no weights of {name}: a file {name} with one of {' '.join(SUFFIXES)}."
        )
    return found[0]


def create(name: str, **options: Any) -> nn.Module:
    """The model as `timm.create_model` makes it, by default with random weights.

    Those come from torch's global generator. `options` are timm's: num_classes, img_size,
    in_chans, pretrained and others.
    """
    _check(name)
    return uncached(timm().create_model(name, **options))


def build(name: str, source: str, seed: int = 0, offline: bool = False) -> nn.Module:
    """The model with its weights; random ones depend on the seed alone."""
    library = timm()
    options: dict[str, Any] = {"pretrained": source != "random"}
    what = "pretrained weights" if options["pretrained"] else "the layers"
    if source not in ("pretrained", "random"):
        file = str(weights_file(Path(source), name))
        options["pretrained_cfg_overlay"], what = {"file": file}, file
    with torch.random.fork_rng(devices=[]), _hub(offline):
        torch.manual_seed(seed)
        try:
            model: nn.Module = library.create_model(name, **options)
        except Exception as error:  # of the hub, the network, the file or anyone's model
            if offline:
                reason = "there is no network, and the hub's cache does not have them"
            else:
                reason = first_line(error).rstrip(".")
            raise FlatlensError(f"Cannot load {what} of {name}: {reason}.") from error
    return uncached(model.eval())


class _Forgetful(dict[str, Tensor]):
    """A cache that is filled anew at each use."""

    def __contains__(self, key: object) -> bool:
        return False

    def __getitem__(self, key: str) -> Tensor:
        return self.pop(key)


def uncached(model: nn.Module) -> nn.Module:
    """Takes away what hides parameters from derivatives, in place.

    In evaluation mode LeViT, EfficientViT (MSRA), TinyViT and others look up their attention biases
    once and keep them: a table of constants, or of another pass.
    """
    for module in model.modules():
        if hasattr(module, CACHE):
            setattr(module, CACHE, _Forgetful())
    return model


def reachable() -> bool:
    """Whether the hub of the weights answers; behind a proxy that is left to be tried."""
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
    """Without a network the cache of the hub alone: it would try for a minute for each model."""
    constants = _constants()
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _constants() -> Any:
    timm()
    return import_module("huggingface_hub.constants")


def transform(model: nn.Module) -> tuple[Any, int]:
    """The model's own evaluation transform, from a picture to a tensor, and its size in pixels."""
    data = timm().data
    config = data.resolve_model_data_config(model)
    return data.create_transform(**config, is_training=False), config["input_size"][-1]


@dataclass(frozen=True)
class Size:
    """What a model takes, without its weights: from one pass over shapes alone."""

    parameters: int
    pixels: int
    bytes: int  # kept for the backward pass of one image
    flops: int  # of one forward pass of one image


def size(name: str) -> Size:
    """The sizes of a model; nothing is computed or downloaded."""
    from torch.utils.flop_counter import FlopCounterMode

    kept = 0

    def count(t: Tensor) -> Tensor:
        nonlocal kept
        kept += t.numel() * t.element_size()
        return t

    with torch.device("meta"):
        model: nn.Module = timm().create_model(name).eval()
        shape = timm().data.resolve_model_data_config(model)["input_size"]
        x = torch.empty(1, *shape)
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda t: t)
        with FlopCounterMode(display=False) as counter, hooks:
            model(x)
    parameters = sum(p.numel() for p in model.parameters())
    return Size(parameters, shape[-1], max(0, kept - 4 * parameters), counter.get_total_flops())
