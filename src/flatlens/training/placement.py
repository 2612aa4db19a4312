"""Prepare a network and its samples: weights, device, precision, and a first trial."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from flatlens.data.datasets import Data, load
from flatlens.errors import FlatlensError, first_line
from flatlens.passes.probing import refuse_without_float64
from flatlens.training.networks import build
from flatlens.training.weight_files import load_weights

SAMPLES = 100  # measured by default, as in the paper


def subject(
    model: str,
    checkpoint: Path | None,
    data: str,
    n: int | None,
    device: str,
    dtype: str | None,
    key: str | None = None,
) -> tuple[nn.Module, Shaped[Tensor, "n ..."], Shaped[Tensor, "n ..."]]:
    """Build a network and load samples, ready to be measured together.

    Args:
        model: name of the network.
        checkpoint: file with its weights, or None.
        data: name of the data set.
        n: number of samples, the first ones of the training part. By default 100.
        device: where to compute.
        dtype: precision of weights and inputs; None keeps that of the network.
        key: where the weights are in the checkpoint; None searches for them.

    Returns:
        Network, inputs and targets.

    Raises:
        FlatlensError: if the network cannot be built or cannot read the data.

    >>> network, x, y = subject("torch.nn:Flatten", None, "digits", 5, "cpu", None)
    >>> x.shape, y.tolist()
    (torch.Size([5, 64]), [6, 6, 6, 2, 5])
    """
    network = build(model)
    if checkpoint is not None:
        load_weights(network, checkpoint, key)
    x, y = place(network, *_head(load(data), n), device, dtype)
    try_one(network, x)
    return network, x, y


def _head(data: Data, n: int | None) -> tuple[Tensor, Tensor]:
    """Return the first n training samples; too few samples raise, and are never cut silently."""
    available = len(data.x_train)
    if n is not None and n > available:
        raise FlatlensError(f"{n} samples were asked for, but the data has only {available}.")
    n = min(SAMPLES, available) if n is None else n
    return data.x_train[:n], data.y_train[:n]


def place(
    network: nn.Module, x: Tensor, y: Tensor, device: str, dtype: str | None
) -> tuple[Tensor, Tensor]:
    """Move a network (in place) and its samples to one device and, if they are floats, one dtype.

    Raises:
        FlatlensError: if the device is absent, or if complex numbers would be cut to real ones.
    """
    check_device(device)
    if dtype is not None:
        _refuse_complex(network, x, y)
    network.to(device=device, dtype=getattr(torch, dtype) if dtype else None)
    x, y = x.to(device), y.to(device)
    floats = [p.dtype for p in network.parameters() if p.is_floating_point()]
    if floats:
        x, y = (t.to(floats[0]) if t.is_floating_point() else t for t in (x, y))
    return x, y


def check_device(device: str, here: bool = True) -> None:
    """Raise if a device is unknown, absent, or without values ("meta").

    Args:
        device: name of the device.
        here: whether the device must be on this machine.

    Raises:
        FlatlensError: if torch cannot compute there.
    """
    try:
        known = torch.device(device)
        refuse_without_float64(known)
        if here:
            torch.zeros(1, device=known).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without it
        raise FlatlensError(
            f"Cannot compute on device {device!r} with this torch; try cpu."
        ) from error


def try_one(network: nn.Module, x: Tensor) -> None:
    """Run the first sample, so that data of the wrong kind gives a clear message.

    Raises:
        FlatlensError: if the network fails on it.
    """
    network.eval()
    try:
        with torch.no_grad():
            network(x[:1])
    except Exception as error:  # a user's network may raise anything
        reason = first_line(error).rstrip(".")
        raise FlatlensError(
            f"The network cannot read an input of shape {list(x[:1].shape)} ({x.dtype}): {reason}."
        ) from error


def _refuse_complex(network: nn.Module, x: Tensor, y: Tensor) -> None:
    """Raise for complex numbers, because a real dtype would silently drop their imaginary part."""
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    named |= {"the input": x, "the target": y}
    for name, tensor in named.items():
        if tensor.is_complex():
            raise FlatlensError(
                f"{name} has complex numbers ({tensor.dtype}), but only real networks are trained; "
                "write the network with real and imaginary parts."
            )
