"""Load the networks and samples that a command line names."""

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
    if key is not None and checkpoint is None:
        raise FlatlensError("--key is a place inside a checkpoint; give --checkpoint too.")
    if checkpoint is not None:
        options: dict[str, Any] = {} if key is None else {"key": key}
        load_weights(network, checkpoint, **options)
    return network


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


def with_tokenizer(data: str, model: str) -> str:
    """Add the tokenizer of a model of Transformers to text data, unless one is named.

    >>> with_tokenizer("text:book.txt?length=9", "hf:gpt2")
    'text:book.txt?length=9&tokenizer=gpt2'
    """
    if not (data.startswith("text:") and model.startswith("hf:")) or "tokenizer=" in data:
        return data
    return f"{data}{'&' if '?' in data else '?'}tokenizer={model.removeprefix('hf:')}"


def selected_output(output: str | None, position: str | None, model: str, data: str) -> Any:
    """Return the part of the network's result to measure: a key, an index or a function."""
    key: Any = int(output) if output is not None and output.isdecimal() else output
    if key is None and model.startswith("hf:"):
        key = "logits"
    if position is None:
        position = "last" if data.startswith("text:") else "all"
    if position == "all":
        return key

    def last_position(result: Any) -> Tensor:
        tensor = result if key is None else result[key]
        if tensor.dim() < 3:
            raise FlatlensError(
                f"The output has shape {list(tensor.shape)}, not one row for each token; give "
                "--position all."
            )
        last: Tensor = tensor[:, -1]
        return last

    return last_position


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
        there: number of available samples.
        n: number of samples to draw. By default 100, or all if there are fewer.
        seed: seed of the draw.

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
