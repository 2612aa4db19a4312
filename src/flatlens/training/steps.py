"""One training step: the loss of a batch, the optimiser, and sharpness-aware minimisation."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from flatlens.errors import FlatlensError, first_line
from flatlens.training.ascent import ascend, placed
from flatlens.training.config import RHO, Config
from flatlens.training.direct_sgd import DirectSGD, is_plain_chain
from flatlens.training.penalised_steps import objective
from flatlens.training.samples import Part

WARM_UP = 0.1  # share of the steps in which the learning rate of a cosine schedule rises

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, int], Tensor]  # indices of a batch, step -> its loss, after one update
# indices of a batch, step -> its loss, and what is minimised: the loss plus a penalty
Objective = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def loss_function(name: str, smoothing: float = 0.0) -> Loss:
    """Return a loss by name, averaged over the batch.

    Args:
        name: mean_squared, half_squared or cross_entropy.
        smoothing: label smoothing of cross_entropy. Targets of the squared losses are smoothed
            before, by `smoothed_targets`.

    >>> f, t = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    >>> loss_function("mean_squared")(f, t).item(), loss_function("half_squared")(f, t).item()
    (2.0, 2.0)
    """
    if name == "mean_squared":
        return F.mse_loss
    if name == "half_squared":
        return lambda f, t: F.mse_loss(f, t, reduction="sum") * (0.5 / len(f))
    return lambda f, t: F.cross_entropy(f, t, label_smoothing=smoothing)


def smoothed_targets(part: Part, config: Config) -> Tensor:
    """Return one-hot targets with label smoothing; cross-entropy smooths by itself."""
    share, one_hot = config.label_smoothing, config.loss != "cross_entropy"
    if share and one_hot and not part.y.is_floating_point():
        return (1 - share) * part.targets + share / part.targets.shape[1]
    return part.targets


def make_optimizer(network: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Create the optimiser of a config; sam and asam take their steps with plain SGD.

    Raises:
        FlatlensError: if the network has no parameters to train.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    if not parameters:
        raise FlatlensError(f"The model {config.model} has no parameters to train.")
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "foreach": True}
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, **common)
    if config.optimizer in ("adamw", "sam-adamw"):
        return torch.optim.AdamW(parameters, **common)
    momentum = config.momentum if config.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, momentum=momentum, **common)


def make_step(
    network: nn.Module, optimizer: torch.optim.Optimizer, part: Part, config: Config
) -> Step:
    """Return the function that makes one update from the indices of a batch.

    Args:
        network: the network, in training mode.
        optimizer: its optimiser, from `make_optimizer`.
        part: the samples to train on.
        config: the config.

    Returns:
        A function from the indices of a batch and the number of the step to the loss of the batch
        before the update.
    """
    gradients = _gradient_function(optimizer, make_objective(network, part, config))
    direct = _direct_step(network, part, config)
    if config.optimizer in RHO:
        return _sharpness_aware_step(optimizer, gradients, direct, config)
    if direct is not None:
        return direct

    def step(index: Tensor, number: int) -> Tensor:
        loss = gradients(index, number)
        _update(optimizer, config, number)
        return loss

    return step


def _direct_step(network: nn.Module, part: Part, config: Config) -> Step | None:
    """Return a step of plain SGD during the backward pass, or None if that is impossible."""
    simple = config.optimizer in ("sgd", "sam", "asam") and not config.penalty
    if not simple or config.augment or not is_plain_chain(network):
        return None
    x, targets = part.x, smoothed_targets(part, config)
    loss_of = loss_function(config.loss, config.label_smoothing)
    direct = DirectSGD(network, config.weight_decay)

    def step(index: Tensor, number: int) -> Tensor:
        chosen = targets.index_select(0, index)
        inputs, lr = x.index_select(0, index), learning_rate(config, number)
        return direct.step(inputs, lambda f: loss_of(f, chosen), lr)

    return step


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step; the first step is step 1.

    >>> config = Config(lr=1.0, lr_schedule="cosine", steps=100)
    >>> [round(learning_rate(config, step), 2) for step in (1, 10, 55, 90)]
    [0.1, 1.0, 0.51, 0.04]
    """
    if config.lr_schedule == "constant":
        return config.lr
    rise = config.steps * WARM_UP
    if step <= rise:
        return config.lr * step / rise
    share = (step - rise) / (config.steps - rise + 1)  # below 1: the last step still moves
    return config.lr * 0.5 * (1 + math.cos(math.pi * share))


def make_objective(network: nn.Module, part: Part, config: Config) -> Objective:
    """Return the function that is minimised: the loss of a batch, plus a penalty if asked for."""
    x, targets = part.x, smoothed_targets(part, config)
    value = objective(config, network, loss_function(config.loss, config.label_smoothing))

    def of_batch(index: Tensor, step: int) -> tuple[Tensor, Tensor]:
        with _batch_of_one(len(index), config):
            return value(x.index_select(0, index), targets.index_select(0, index), step)

    return of_batch


def _gradient_function(optimizer: torch.optim.Optimizer, minimised: Objective) -> Step:
    """Return a function that leaves the gradients of a batch in the parameters."""

    def gradients(index: Tensor, step: int) -> Tensor:
        optimizer.zero_grad()
        loss, total = minimised(index, step)
        total.backward()
        return loss.detach()

    return gradients


def _update(optimizer: torch.optim.Optimizer, config: Config, step: int) -> None:
    optimizer.param_groups[0]["lr"] = learning_rate(config, step)
    optimizer.step()


def _sharpness_aware_step(
    optimizer: torch.optim.Optimizer, gradients: Step, direct: Step | None, config: Config
) -> Step:
    """Return a step that takes its gradient at the worst point nearby (Foret et al., 2021).

    Args:
        optimizer: the optimiser that follows the gradient.
        gradients: leaves the gradients of a batch in the parameters.
        direct: makes the step during the backward pass, if the network allows it. It changes the
            weights themselves even while the parameters have the values of the worst point.
        config: the config.
    """
    parameters = optimizer.param_groups[0]["params"]
    worst = [torch.empty_like(p) for p in parameters]  # memory that every step uses again

    def step(index: Tensor, number: int) -> Tensor:
        loss = gradients(index, number)
        ascend(parameters, worst, config.radius, adaptive=config.optimizer == "asam")
        with placed(parameters, worst):
            (direct or gradients)(index, number)
        if direct is None:
            _update(optimizer, config, number)
        return loss

    return step


@contextlib.contextmanager
def _batch_of_one(n: int, config: Config) -> Iterator[None]:
    """Explain the error of batch norm, which cannot train on one sample.

    The last batch of an epoch may have one sample.
    """
    try:
        yield
    except ValueError as error:
        if n > 1:
            raise
        raise FlatlensError(
            f"The network cannot train on a batch of one sample ({first_line(error)}), which "
            f"batch_size={config.batch_size} leaves at the end of an epoch; choose another."
        ) from error


def batches(
    n: int, batch_size: int, seed: int, start: int, device: str = "cpu"
) -> Iterator[Int[Tensor, " b"]]:
    """Yield the indices of the batches from a step on, each epoch in its own order.

    The order of an epoch depends on the seed and the number of the epoch alone, so a training that
    resumes needs no stored state for it.

    Args:
        n: number of samples.
        batch_size: samples in a batch; the last batch of an epoch may be smaller.
        seed: seed of the orders.
        start: number of batches to skip.
        device: device of the indices.

    >>> a, b = batches(4, 2, 0, 0), batches(4, 2, 0, 3)
    >>> [next(a).tolist() for _ in range(4)][3] == next(b).tolist()
    True
    """
    epoch, skip = divmod(start, math.ceil(n / batch_size))
    for e in itertools.count(epoch):
        seeds = np.random.SeedSequence([seed, e]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seeds[0] >> np.uint64(1)))
        order = torch.randperm(n, generator=generator).to(device)
        yield from order.split(batch_size)[skip:]
        skip = 0
