"""The samples that a tracker measures on: a copy, the same for every measurement."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flatlens.arguments import no_type_check
from flatlens.capture.inputs import batches
from flatlens.errors import FlatlensError
from flatlens.measurement.sampling import as_tensor, draw, select

PART = 4  # a part of the samples is one in four


class ProbeSamples:
    """A copy of the samples on the model's device.

    Args:
        x, y: samples and targets, as for ``measure``, or a torch ``Dataset``.
        device: where the copy goes.
        n: number of samples to draw at random. None takes all samples.
        seed: seed of the draw.

    Raises:
        FlatlensError: if n is out of range, or if x holds nothing that can be copied.

    Example:
        >>> samples = ProbeSamples(torch.arange(8.0), None, torch.device("cpu"), n=3, seed=0)
        >>> samples.count()
        3
    """

    @no_type_check
    def __init__(
        self, x: Any, y: Any, device: torch.device, n: int | None = None, seed: int = 0
    ) -> None:
        if n is not None or isinstance(x, Dataset):
            x, y = draw(x, y, n, seed)
        self.x, self.y, self.device = copied("x", x, device), copied("y", y, device), device

    def on(self, device: torch.device) -> tuple[Any, Any]:
        """Return samples and targets on ``device``; the copy moves along with the model."""
        if device != self.device:
            self.x, self.y = copied("x", self.x, device), copied("y", self.y, device)
            self.device = device
        return self.x, self.y

    def count(self) -> int:
        """Return the number of samples."""
        return sum(inputs.n for inputs, _ in batches(self.x))


def part_of(x: Any, y: Any) -> tuple[Any, Any]:
    """Take one in four samples of each batch, drawn at random but the same every time.

    Args:
        x: a tensor, a tuple or dict of tensors, or a list of batches.
        y: targets of all samples, or None.

    Returns:
        The chosen samples in the same form, and their targets.

    Example:
        >>> x, y = part_of(torch.arange(8), 10 * torch.arange(8))
        >>> len(x), bool((y == 10 * x).all())
        (2, True)
    """
    sizes = [inputs.n for inputs, _ in batches(x)]
    chooser = np.random.default_rng(0)
    chosen = [torch.from_numpy(chooser.permutation(n)[: -(-n // PART)]) for n in sizes]
    if isinstance(x, list):
        part: Any = [select(batch, numbers) for batch, numbers in zip(x, chosen, strict=True)]
    else:
        part = select(x, chosen[0])
    starts = accumulate(sizes[:-1], initial=0)
    positions = torch.cat([numbers + start for numbers, start in zip(chosen, starts, strict=True)])
    return part, None if y is None else select(as_tensor(y), positions)


def copied(name: str, data: Any, device: torch.device) -> Any:
    """Copy every tensor to ``device``; an iterable of batches becomes a list.

    >>> copied("x", {"a": np.zeros(2), "flag": True}, torch.device("cpu"))
    {'a': tensor([0., 0.], dtype=torch.float64), 'flag': True}
    """
    if isinstance(data, Tensor):
        return data.detach().to(device, copy=True)
    if isinstance(data, np.ndarray):
        return torch.as_tensor(data.copy(), device=device)
    if isinstance(data, Mapping):
        return {key: copied(name, value, device) for key, value in data.items()}
    if isinstance(data, tuple):
        return tuple(copied(name, value, device) for value in data)
    if data is None or isinstance(data, (str, int, float)):
        return data
    try:
        batch_list = list(data)
    except TypeError:
        raise FlatlensError(
            f"{name} is a {type(data).__name__}; give tensors, a data set, a loader or batches"
        ) from None
    return [copied(name, batch, device) for batch in batch_list]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter; the CPU if it has none.

    >>> device_of(nn.Linear(2, 2)).type
    'cpu'
    """
    return next((p.device for p in model.parameters()), torch.device("cpu"))
