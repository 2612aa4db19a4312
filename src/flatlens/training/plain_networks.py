"""Refuse networks whose weights have no values, or whose layers cannot be seen."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flatlens.errors import FlatlensError


def check_plain(network: nn.Module, model: str) -> None:
    """Refuse lazy networks, networks on the device meta and TorchScript.

    Args:
        network: the network that a factory made.
        model: name of the model, for the message.

    Raises:
        FlatlensError: names the model and its parameter.

    >>> check_plain(nn.Linear(3, 2), "mine:build")
    """
    tensors = [*network.named_parameters(), *network.named_buffers()]
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise FlatlensError(
            f"The parameter {lazy[0]} of {model} is lazy and has no shape yet; run a sample "
            "through the network in the factory."
        )
    if meta := [name for name, tensor in tensors if tensor.is_meta]:
        raise FlatlensError(
            f"The parameter {meta[0]} of {model} is on the device meta and has no values; create "
            "the network on the CPU."
        )
    if isinstance(network, torch.jit.ScriptModule):
        raise FlatlensError(
            f"The model {model} is a TorchScript module, whose layers cannot be seen; return the "
            "Python module that it was made from."
        )
