"""What `flatlens measure` measures: the network, the weights and the samples that a user named."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from flatlens.data.datasets import Data, load
from flatlens.errors import FlatlensError, first_line
from flatlens.training.networks import build
from flatlens.training.weight_files import load_weights

SAMPLES = 100  # measured by default, as in the paper


def subject(
    model: str, checkpoint: Path | None, data: str, n: int | None, device: str, dtype: str | None
) -> tuple[nn.Module, Shaped[Tensor, "n ..."], Shaped[Tensor, "n ..."]]:
    """Network, inputs and targets, ready to be measured together.

    >>> network, x, y = subject("torch.nn:Flatten", None, "digits", 5, "cpu", None)
    >>> x.shape, y.tolist()
    (torch.Size([5, 64]), [6, 6, 6, 2, 5])
    """
    network = build(model)
    if checkpoint is not None:
        load_weights(network, checkpoint)
    x, y = place(network, *_first(load(data), n), device, dtype)
    try_one(network, x)
    return network, x, y


def _first(data: Data, n: int | None) -> tuple[Tensor, Tensor]:
    """The first n training samples; fewer than asked for is a refusal, never a silent cut."""
    there = len(data.x_train)
    if n is not None and n > there:
        raise FlatlensError(f"{n} samples were asked for, but the data has only {there}.")
    n = min(SAMPLES, there) if n is None else n
    return data.x_train[:n], data.y_train[:n]


def place(
    network: nn.Module, x: Tensor, y: Tensor, device: str, dtype: str | None
) -> tuple[Tensor, Tensor]:
    """Network (in place), inputs and targets on one device; all that are floats of one dtype."""
    check_device(device)
    network.to(device=device, dtype=getattr(torch, dtype) if dtype else None)
    x, y = x.to(device), y.to(device)
    floats = [p.dtype for p in network.parameters() if p.is_floating_point()]
    if floats:
        x, y = (t.to(floats[0]) if t.is_floating_point() else t for t in (x, y))
    return x, y


def check_device(device: str, here: bool = True) -> None:
    """Refuses a device that is unknown or (``here``) absent, or without values ("meta")."""
    try:
        known = torch.device(device)
        if here:
            torch.zeros(1, device=known).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without it
        raise FlatlensError(
            f"Cannot compute on device {device!r} with this torch; try cpu."
        ) from error


def try_one(network: nn.Module, x: Tensor) -> None:
    """Runs the first sample, so that data of the wrong kind is told apart from all other errors."""
    network.eval()
    try:
        with torch.no_grad():
            network(x[:1])
    except Exception as error:  # the network is anyone's code and may raise anything
        reason = first_line(error).rstrip(".")
        raise FlatlensError(
            f"The network cannot read an input of shape {list(x[:1].shape)} ({x.dtype}): {reason}."
        ) from error
