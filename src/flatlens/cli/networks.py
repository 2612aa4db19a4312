"""Networks and samples that the words of a command line name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatlens.errors import FlatlensError

if TYPE_CHECKING:
    from torch import Tensor, nn


def load_network(model: str, checkpoint: Path | None, key: str | None) -> nn.Module:
    """Build a network and load its weights.

    Args:
        model: name of the network, or package.module:factory in the current folder.
        checkpoint: file with its weights, or None.
        key: place of the weights in the file, or None.

    Raises:
        FlatlensError: if the network cannot be built or the weights do not fit.
    """
    from flatlens.training.networks import build
    from flatlens.training.trust import import_factory
    from flatlens.training.weight_files import load_weights

    import_factory(model, Path.cwd())
    network = build(model)
    _check_plain(network, model)
    if key is not None and checkpoint is None:
        raise FlatlensError("--key is a place inside a checkpoint; give --checkpoint too.")
    if checkpoint is not None:
        options: dict[str, Any] = {} if key is None else {"key": key}
        load_weights(network, checkpoint, **options)
    return network


def _check_plain(network: nn.Module, model: str) -> None:
    """Refuse networks whose weights have no values or whose layers cannot be seen."""
    import torch
    from torch.nn.parameter import is_lazy

    tensors = [*network.named_parameters(), *network.named_buffers()]
    if lazy := [name for name, t in tensors if is_lazy(t)]:
        raise FlatlensError(
            f"The parameter {lazy[0]} of {model} is lazy and has no shape yet; run a sample "
            "through the network in the factory."
        )
    if meta := [name for name, t in tensors if t.is_meta]:
        raise FlatlensError(
            f"The parameter {meta[0]} of {model} is on the device meta and has no values; create "
            "the network on the CPU."
        )
    if isinstance(network, torch.jit.ScriptModule):
        raise FlatlensError(
            f"The model {model} is a TorchScript module, whose layers cannot be seen; return the "
            "Python module that it was made from."
        )


def load_samples(
    network: nn.Module, data: str, n: int | None, seed: int, device: str, dtype: str | None
) -> tuple[Tensor, Tensor]:
    """Draw n training samples and move them, and the network, to one device and precision.

    Raises:
        FlatlensError: if there are fewer samples, or the network cannot read them.
    """
    from flatlens.data.datasets import load
    from flatlens.training.placement import place, try_one

    loaded = load(data)
    index = draw(len(loaded.x_train), n, seed)
    x, y = place(network, loaded.x_train[index], loaded.y_train[index], device, dtype)
    try_one(network, x)
    return x, y


def own_or_named(quantities: Sequence[str] | None) -> str | list[Any]:
    """Return the argument ``quantities`` of ``measure``; functions are imported.

    Args:
        quantities: the words of the option; None stands for the default set.

    Raises:
        FlatlensError: if a function cannot be imported.
    """
    from flatlens.training.own_quantities import own_names, resolved
    from flatlens.training.trust import import_factory

    if not quantities:
        return "default"
    for name in own_names(quantities):
        import_factory(name, Path.cwd())
    return resolved(quantities)


def draw(there: int, n: int | None, seed: int) -> Tensor:
    """Draw the indices of n different samples at random, in ascending order.

    torch's global generator is left alone.

    Args:
        there: number of samples that there are.
        n: number of samples to draw. By default 100, or all if there are fewer.
        seed: the same seed draws the same samples.

    Raises:
        FlatlensError: if n is larger than the number of samples.

    >>> draw(5, 5, seed=3).tolist()
    [0, 1, 2, 3, 4]
    """
    import torch

    from flatlens.training.placement import SAMPLES

    if n is not None and n > there:
        raise FlatlensError(f"{n:,} samples were asked for, but the data has only {there:,}.")
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(there, generator=generator)[: n or min(SAMPLES, there)].sort().values
