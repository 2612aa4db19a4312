"""Losses, accuracies and measured quantities of a network: the record of one step."""

from __future__ import annotations

import math

import torch
from torch import nn

import flatlens as fl
from flatlens.errors import FlatlensError
from flatlens.measurement.quantities import Quantities
from flatlens.training.authors import VARIANTS, split
from flatlens.training.config import Config
from flatlens.training.own_quantities import resolved
from flatlens.training.samples import Part
from flatlens.training.steps import Loss, loss_function

CHUNK = 100  # samples of one forward pass; fixed, because float sums depend on it


def make_record(
    network: nn.Module, train: Part, test: Part, config: Config, step: int
) -> dict[str, int | float]:
    """Measure and evaluate a network.

    Args:
        network: the network. It is in training mode afterwards.
        train: training samples; the first ones are measured.
        test: test samples; there may be none.
        config: the config.
        step: number of updates so far.

    Returns:
        The step, the measured quantities, losses and accuracies by name.

    Raises:
        FlatlensError: if the training loss is not finite.
    """
    scores = _scores(network, train, test, config, step)
    measured = train.head(config.samples)
    quantities, variants = split(config.quantities)
    functions = [VARIANTS[name] for name in variants]
    is_set_name = isinstance(quantities, str)
    requested: Quantities = quantities if is_set_name else [*resolved(quantities), *functions]
    m = fl.measure(network, measured.x, measured.y, quantities=requested)
    return {"step": step, **m.to_dict(), **scores}


def _scores(
    network: nn.Module, train: Part, test: Part, config: Config, step: int
) -> dict[str, float]:
    """Return losses and accuracies in per cent, and gaps where there is a test part."""
    scores: dict[str, float] = {}
    loss = loss_function(config.loss)
    for name, part in (("train", train), ("test", test)):
        if len(part.x):
            values = evaluate(network, part.head(config.evaluate), loss)
            scores |= {f"{name}_{key}": value for key, value in values.items()}
    if not math.isfinite(scores["train_loss"]):
        raise FlatlensError(
            f"The training diverged: its loss is {scores['train_loss']} after {step} steps; "
            f"use a smaller learning rate than {config.lr:g}."
        )
    if "test_loss" in scores:
        scores["loss_gap"] = scores["test_loss"] - scores["train_loss"]
    if "test_accuracy" in scores:
        gap = scores["train_accuracy"] - scores["test_accuracy"]
        scores["generalization_gap"] = gap  # percentage points
    return scores


@torch.no_grad()
def evaluate(network: nn.Module, part: Part, loss: Loss) -> dict[str, float]:
    """Return the loss of a network and, for class labels, its accuracy in per cent.

    The network is in evaluation mode meanwhile, and in training mode afterwards.
    """
    network.eval()
    total, correct = 0.0, 0
    for x, y, t in zip(*(v.split(CHUNK) for v in (part.x, part.y, part.targets)), strict=True):
        f = network(x)
        total += loss(f, t).item() * len(x)
        if not y.is_floating_point():
            correct += int((f.argmax(1) == y).sum())
    network.train()
    values = {"loss": total / len(part.x)}
    if not part.y.is_floating_point():
        values["accuracy"] = 100 * correct / len(part.x)
    return values
