"""The objective of a training step: the loss of a batch, with a penalty and augmented images.

Everything random here (the signs of a penalty, the flips and crops of images) comes from a
generator that is seeded by (seed, step). A run that resumes at any step draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from flatlens.errors import FlatlensError
from flatlens.penalties import sensitivity_of_outputs, sharpness_of_outputs, twice_differentiable
from flatlens.training.config import Config
from flatlens.training.config_checks import split_penalty

SIGNS, IMAGES = 1, 2  # purposes of a generator
PADDING = 8  # a crop moves an image by up to an eighth of its size

Loss = Callable[[Tensor, Tensor], Tensor]
Objective = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def objective(config: Config, network: nn.Module, loss_of: Loss) -> Objective:
    """Make the function that a step differentiates.

    Args:
        config: its fields penalty, augment and seed count here.
        network: the network that is trained.
        loss_of: the loss of outputs and targets.

    Returns:
        A function of the inputs of a batch, their targets and the step. It returns the loss and
        the number to minimise, which is the loss plus the penalty.
    """
    change = _augmentation(config)
    if config.penalty is None:

        def plain(x: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
            loss = loss_of(network(change(x, step)), targets)
            return loss, loss

        return plain

    kind, strength = split_penalty(config.penalty)
    parameters = [p for p in network.parameters() if p.requires_grad]

    def penalised(x: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
        x = change(x, step)
        if kind == "sensitivity":
            x = x.detach().requires_grad_()
        with twice_differentiable():  # one forward pass serves the loss and the penalty
            f = network(x.clone() if x.requires_grad else x)  # a layer may overwrite its input
        loss = loss_of(f, targets)
        signs = step_generator(config.seed, step, SIGNS)
        if kind == "sensitivity":
            return loss, loss + strength * sensitivity_of_outputs(f, x, signs)
        return loss, loss + strength * sharpness_of_outputs(f, parameters, signs)

    return penalised


def step_generator(seed: int, step: int, purpose: int) -> torch.Generator:
    """Return a generator that depends only on the seed, the step and its purpose.

    >>> a, b = step_generator(0, 7, SIGNS), step_generator(0, 7, SIGNS)
    >>> torch.rand(1, generator=a) == torch.rand(1, generator=b)
    tensor([True])
    """
    state = np.random.SeedSequence([seed, step, purpose]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def check_augmentation(config: Config, x: Tensor) -> None:
    """Raise if the inputs to flip or crop are not images.

    Raises:
        FlatlensError: if augment is set and the inputs are not [n, channels, height, width].
    """
    if config.augment is not None and (x.ndim != 4 or not x.is_floating_point()):
        raise FlatlensError(
            f"augment={config.augment} needs images of shape [n, channels, height, width], but "
            f"{config.data} has inputs of shape {list(x.shape)}."
        )


def _augmentation(config: Config) -> Callable[[Tensor, int], Tensor]:
    """Return the function that changes the images of a step."""
    wanted = (config.augment or "").split("+")
    if config.augment is None:
        return lambda x, step: x

    def change(x: Tensor, step: int) -> Tensor:
        generator = step_generator(config.seed, step, IMAGES)
        x = flipped(x, generator) if "flip" in wanted else x
        return cropped(x, generator) if "crop" in wanted else x

    return change


def flipped(x: Float[Tensor, "n c h w"], generator: torch.Generator) -> Float[Tensor, "n c h w"]:
    """Mirror each image left to right with probability 1/2."""
    mirror = torch.randint(2, (len(x), 1, 1, 1), generator=generator).bool().to(x.device)
    return torch.where(mirror, x.flip(-1), x)


def cropped(x: Float[Tensor, "n c h w"], generator: torch.Generator) -> Float[Tensor, "n c h w"]:
    """Pad each image with zeros on all sides and cut an image of the old size out of it at random.

    The padding is an eighth of the height and of the width (4 pixels of 32).
    """
    n, channels, height, width = x.shape
    up, left = height // PADDING, width // PADDING
    padded = F.pad(x, (left, left, up, up))
    top = torch.randint(2 * up + 1, (n, 1), generator=generator) + torch.arange(height)
    side = torch.randint(2 * left + 1, (n, 1), generator=generator) + torch.arange(width)
    index = [torch.arange(n)[:, None, None, None], torch.arange(channels)[:, None, None]]
    places = [*index, top[:, None, :, None], side[:, None, None, :]]
    return padded[tuple(i.to(x.device) for i in places)]
