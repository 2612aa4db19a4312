"""The state of a training: network, optimiser and samples, stored in and restored from a run.

A checkpoint holds the weights and buffers, the optimiser, torch's generator and the step. The
order of the samples needs no state: it depends on the seed and the step alone.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatlens.errors import FlatlensError, first_line
from flatlens.runs import Run
from flatlens.training.config import Config
from flatlens.training.evaluation import make_record
from flatlens.training.networks import build
from flatlens.training.penalised_steps import check_augmentation
from flatlens.training.placement import check_device, place, try_one
from flatlens.training.samples import Part, load_data, make_targets
from flatlens.training.steps import Step, make_optimizer, make_step


@dataclass(frozen=True)
class TrainingState:
    """A network with its optimiser and its samples.

    Args:
        config: the config.
        network: the network, in training mode.
        optimizer: its optimiser.
        train: samples to train on.
        test: samples to test on; there may be none.
    """

    config: Config
    network: nn.Module
    optimizer: torch.optim.Optimizer
    train: Part
    test: Part

    @classmethod
    def start(cls, config: Config) -> TrainingState:
        """Build the network with weights from the seed, and load the data onto the device.

        Raises:
            FlatlensError: if model and data cannot be built, or do not fit each other.
        """
        check_device(config.device)
        torch.manual_seed(config.seed)
        network = build_network(config)
        data = load_data(config)
        x, y = place(network, data.x_train, data.y_train, config.device, config.dtype)
        x_test, y_test = place(network, data.x_test, data.y_test, config.device, config.dtype)
        try_one(network, x)
        check_augmentation(config, x)
        N = _outputs(network, x)
        network.train()
        return cls(
            config,
            network,
            make_optimizer(network, config),
            Part(x, y, make_targets(y, N, config)),
            Part(x_test, y_test, make_targets(y_test, N, config)),
        )

    def step_function(self) -> Step:
        """Return the function that makes one update from the indices of a batch."""
        return make_step(self.network, self.optimizer, self.train, self.config)

    def record(self, step: int) -> dict[str, int | float]:
        """Measure and evaluate the network."""
        return make_record(self.network, self.train, self.test, self.config, step)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that `restore` needs."""
        named = {f"network.{key}": value for key, value in self.network.state_dict().items()}
        for k, entry in self.optimizer.state_dict()["state"].items():
            named |= {f"optimizer.{k}.{name}": torch.as_tensor(v) for name, v in entry.items()}
        named["rng.cpu"] = torch.get_rng_state()
        if self.config.device.startswith("cuda"):
            named["rng.cuda"] = torch.cuda.get_rng_state(self.config.device)
        return named

    def restore(self, run: Run) -> int | None:
        """Load the last checkpoint of a run.

        Returns:
            The step of the checkpoint, or None without one.

        Raises:
            FlatlensError: if the checkpoint is damaged or belongs to another training.
        """
        saved = run.restore()
        if saved is None:
            return None
        try:
            return self._load(*saved)
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise FlatlensError(
                f"The checkpoint in {run.folder} is not of this run ({first_line(error)}); delete "
                "it to start the run again."
            ) from error

    def _load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> int:
        step = meta["step"]
        if not isinstance(step, int) or not 0 <= step <= self.config.steps:
            raise ValueError(f"its step is {step!r}, but the run has {self.config.steps} steps")
        self.network.load_state_dict(below("network.", tensors))
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in below("optimizer.", tensors).items():
            k, _, name = key.partition(".")
            state.setdefault(int(k), {})[name] = value.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.config.device)
        return step


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it.

    >>> list(below("network.", {"network.weight": torch.ones(1), "rng.cpu": torch.ones(1)}))
    ['weight']
    """
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def build_network(config: Config) -> nn.Module:
    """Build the network of a config.

    Raises:
        FlatlensError: if a layer has no weights, or if weights are complex numbers.
    """
    with warnings.catch_warnings():  # torch warns about what is refused here
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        network = build(config.model, **config.network_options)
    for name, p in network.named_parameters():
        if not p.numel():
            raise FlatlensError(
                f"{name} of the model {config.model} has shape {list(p.shape)}; give every layer "
                "at least one unit."
            )
    return network


def _outputs(network: nn.Module, x: Tensor) -> int:
    """Return N, the number of outputs of a network that gives one row per sample."""
    with torch.no_grad():
        out = network(x[:1])
    if not isinstance(out, Tensor) or out.ndim != 2:
        what = f"a tensor of shape {list(out.shape)}" if isinstance(out, Tensor) else type(out)
        raise FlatlensError(f"Training needs a network with outputs of shape [n, N], not {what}.")
    if out.is_complex():
        raise FlatlensError("Training needs a network with real outputs, not complex ones.")
    return out.shape[1]
