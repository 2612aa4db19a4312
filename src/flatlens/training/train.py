"""Training that can be killed at any moment: started again, it ends with the same records.

The state of a run is its weights and buffers, the optimiser, torch's generator and the step. The
order of the samples needs no state: the permutation of each epoch comes from (seed, epoch) alone.
A record at step k is about the network after k updates.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, Shaped
from torch import Tensor, nn

import flatlens as fl
from flatlens.data.datasets import Data, load
from flatlens.errors import FlatlensError, first_line
from flatlens.runs import Run
from flatlens.training.authors import VARIANTS, split
from flatlens.training.config import RHO, Config, due_steps
from flatlens.training.networks import build
from flatlens.training.penalised_steps import check_augmentation, objective
from flatlens.training.placement import check_device, place, try_one
from flatlens.training.progress import Show, training_line

if TYPE_CHECKING:
    import pandas as pd

CHUNK = 100  # samples of one forward pass of the evaluation; fixed, sums depend on it
ETA = 0.01  # of ASAM: keeps weights near zero movable (Kwon et al., 2021)

Loss = Callable[[Tensor, Tensor], Tensor]


def train(config: Config, folder: Path | str, *, progress: bool | None = None) -> pd.DataFrame:
    """Trains in `folder`, or goes on where it stopped; gives the records, one row a measurement.

    A finished run is read, not repeated. `progress` shows a line on standard error; by default if
    a person looks at it.
    """
    import pandas as pd

    with open_run(folder, config) as run:
        if run.done and not run.records:
            raise FlatlensError(
                f"{run.folder} is done but has no records; delete it to train again."
            )
        if not run.done:
            check_device(config.device)
            with _torch_settings(config), _interrupt() as interrupted:
                state = _State.start(config)
                start = state.restore(run)
                with training_line(config.steps, start, progress) as show:
                    _go(state, run, start, interrupted, show)
            run.finish()
        return pd.DataFrame(run.records)


def open_run(folder: Path | str, config: Config) -> Run:
    """The run of a config; one that was made before a field was added has its default."""
    return Run.open(folder, config.identity, defaults=Config().identity)


def _go(
    state: _State, run: Run, start: int | None, interrupted: threading.Event, show: Show
) -> None:
    """All steps from `start` on. A checkpoint follows the record of the same step."""
    config = state.config
    due = set(due_steps(config.measure, config.steps))
    if start is None:
        start = 0
        if 0 in due:
            _measure(state, run, 0)
    order = batches(len(state.train.x), config.batch_size, config.seed, start, config.device)
    step_once = _step(state)
    for step, index in zip(range(start + 1, config.steps + 1), order, strict=False):
        loss = step_once(index, step)
        if step in due:
            _measure(state, run, step)
        stop = interrupted.is_set()
        if step % config.checkpoint_every == 0 or step == config.steps or stop:
            run.checkpoint(state.tensors(), {"step": step})
        if stop:
            raise KeyboardInterrupt
        show(step, loss, run.records)


def _measure(state: _State, run: Run, step: int) -> None:
    """Append the record of one step; the snapshot comes first, so every record has its weights."""
    if state.config.snapshots:
        run.snapshot(step, state.network.state_dict())
    run.append(state.record(step))


def batches(
    n: int, batch_size: int, seed: int, start: int, device: str = "cpu"
) -> Iterator[Int[Tensor, " b"]]:
    """Indices of the batches from step `start` on, each epoch in an order of its own.

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


# ------------------------------------------------------------------ what is trained on what


@dataclass(frozen=True)
class Part:
    """Inputs, labels as the data has them, and targets as the loss takes them."""

    x: Shaped[Tensor, "n ..."]
    y: Shaped[Tensor, "n ..."]
    targets: Shaped[Tensor, "n ..."]

    def first(self, n: int | None) -> Part:
        return Part(self.x[:n], self.y[:n], self.targets[:n])


@dataclass(frozen=True)
class _State:
    """A network with its optimiser and its data, ready to step."""

    config: Config
    network: nn.Module
    optimizer: torch.optim.Optimizer
    train: Part
    test: Part

    @classmethod
    def start(cls, config: Config) -> _State:
        """Initial weights from the seed, data on the device."""
        torch.manual_seed(config.seed)
        network = _built(config)
        data = _load(config)
        x, y = place(network, data.x_train, data.y_train, config.device, config.dtype)
        x_test, y_test = place(network, data.x_test, data.y_test, config.device, config.dtype)
        try_one(network, x)
        check_augmentation(config, x)
        N = _outputs(network, x)
        network.train()
        return cls(
            config,
            network,
            _optimizer(network, config),
            Part(x, y, _targets(y, N, config)),
            Part(x_test, y_test, _targets(y_test, N, config)),
        )

    def restore(self, run: Run) -> int | None:
        """The step of the last checkpoint, with everything as it was then; None without one."""
        found = run.restore()
        if found is None:
            return None
        try:
            return self._load(*found)
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise FlatlensError(
                f"The checkpoint in {run.folder} is not of this run ({first_line(error)}); delete "
                "it to start the run again."
            ) from error

    def _load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> int:
        self.network.load_state_dict(_below("network.", tensors))
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in _below("optimizer.", tensors).items():
            k, _, name = key.partition(".")
            state.setdefault(int(k), {})[name] = value.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.config.device)
        return int(meta["step"])

    def tensors(self) -> dict[str, Tensor]:
        """Everything that `restore` needs."""
        named = {f"network.{key}": value for key, value in self.network.state_dict().items()}
        for k, entry in self.optimizer.state_dict()["state"].items():
            named |= {f"optimizer.{k}.{name}": torch.as_tensor(v) for name, v in entry.items()}
        named["rng.cpu"] = torch.get_rng_state()
        if self.config.device.startswith("cuda"):
            named["rng.cuda"] = torch.cuda.get_rng_state(self.config.device)
        return named

    def record(self, step: int) -> dict[str, int | float]:
        """All that is known at one step."""
        scores = self._scores(step)
        probe = self.train.first(self.config.samples)
        quantities, variants = split(self.config.quantities)
        m = fl.measure(self.network, probe.x, probe.y, quantities=quantities)
        others = {name: VARIANTS[name](m.probe) for name in variants}
        return {"step": step, **m.to_dict(), **others, **scores}

    def _scores(self, step: int) -> dict[str, float]:
        """Losses and accuracies, in per cent; gaps where there is a test part."""
        scores: dict[str, float] = {}
        loss = _loss(self.config.loss)
        for name, part in (("train", self.train), ("test", self.test)):
            if len(part.x):
                found = evaluate(self.network, part.first(self.config.evaluate), loss)
                scores |= {f"{name}_{key}": value for key, value in found.items()}
        if not math.isfinite(scores["train_loss"]):
            raise FlatlensError(
                f"The training diverged: its loss is {scores['train_loss']} after {step} steps; "
                f"take a smaller learning rate than {self.config.lr:g}."
            )
        if "test_loss" in scores:
            scores["loss_gap"] = scores["test_loss"] - scores["train_loss"]
        if "test_accuracy" in scores:
            gap = scores["train_accuracy"] - scores["test_accuracy"]
            scores["generalization_gap"] = gap  # percentage points
        return scores


def _built(config: Config) -> nn.Module:
    """The network that the config names, every layer with at least one weight."""
    with warnings.catch_warnings():  # torch warns of what is refused here
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        network = build(config.model, **config.model_options)
    for name, p in network.named_parameters():
        if not p.numel():
            raise FlatlensError(
                f"{name} of the model {config.model} has shape {list(p.shape)}; give every layer "
                "at least one unit."
            )
    return network


def _load(config: Config) -> Data:
    """The data that the config names, cut to its size."""
    if config.classes is not None and "classes" in config.data_options:
        raise FlatlensError("The data is given classes twice: as classes and in data_options.")
    classes = {} if config.classes is None else {"classes": config.classes}
    data = load(config.data, **classes, **config.data_options)
    there, n = len(data.x_train), config.train_size
    if n is not None and n > there:
        raise FlatlensError(f"train_size is {n}, but {config.data} has only {there} samples.")
    if config.samples > (n or there):
        raise FlatlensError(f"samples is {config.samples}, but there are only {n or there}.")
    return Data(data.x_train[:n], data.y_train[:n], data.x_test, data.y_test, data.classes)


def _outputs(network: nn.Module, x: Tensor) -> int:
    """N, the number of outputs of a network that gives one row a sample."""
    with torch.no_grad():
        out = network(x[:1])
    if not isinstance(out, Tensor) or out.ndim != 2:
        what = f"a tensor of shape {list(out.shape)}" if isinstance(out, Tensor) else type(out)
        raise FlatlensError(f"Training needs a network with outputs of shape [n, N], not {what}.")
    return out.shape[1]


def _targets(y: Shaped[Tensor, "n ..."], N: int, config: Config) -> Shaped[Tensor, "n ..."]:
    """One-hot over all N outputs for the squared losses, whatever the number of classes."""
    if y.is_floating_point():
        y = y.reshape(len(y), -1)
        if y.shape[1] != N:
            raise FlatlensError(f"The network has {N} outputs for targets of {y.shape[1]} columns.")
        return y
    if len(y) and int(y.max()) >= N:
        raise FlatlensError(
            f"The data has the class {int(y.max())}, but the network only the outputs 0 to {N - 1}."
        )
    if config.loss == "cross_entropy":
        return y
    return F.one_hot(y, N).to(getattr(torch, config.dtype))


@torch.no_grad()
def evaluate(network: nn.Module, part: Part, loss: Loss) -> dict[str, float]:
    """Loss and accuracy (in per cent, of class labels) of the network in evaluation mode."""
    network.eval()
    total, right = 0.0, 0
    for x, y, t in zip(*(v.split(CHUNK) for v in (part.x, part.y, part.targets)), strict=True):
        f = network(x)
        total += loss(f, t).item() * len(x)
        if not y.is_floating_point():
            right += int((f.argmax(1) == y).sum())
    network.train()
    found = {"loss": total / len(part.x)}
    if not part.y.is_floating_point():
        found["accuracy"] = 100 * right / len(part.x)
    return found


# ------------------------------------------------------------------ one step


def _loss(name: str, smoothing: float = 0.0) -> Loss:
    """The loss by its name; targets of squared losses are smoothed before."""
    if name == "mean_squared":
        return F.mse_loss
    if name == "half_squared":
        return lambda f, t: F.mse_loss(f, t, reduction="sum") * (0.5 / len(f))
    return lambda f, t: F.cross_entropy(f, t, label_smoothing=smoothing)


def _optimizer(network: nn.Module, config: Config) -> torch.optim.Optimizer:
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


def _step(state: _State) -> Callable[..., Tensor]:
    """The function that makes one update from the indices of a batch and gives its loss."""
    config, network, optimizer = state.config, state.network, state.optimizer
    x, targets = state.train.x, _smoothed(state.train, config)
    value = objective(config, network, _loss(config.loss, config.label_smoothing))
    parameters = optimizer.param_groups[0]["params"]

    def gradients(index: Tensor, step: int) -> Tensor:
        optimizer.zero_grad()
        with _one_sample(len(index), config):
            loss, total = value(x.index_select(0, index), targets.index_select(0, index), step)
        total.backward()
        return loss.detach()

    def plain(index: Tensor, step: int = 0) -> Tensor:
        loss = gradients(index, step)
        optimizer.step()
        return loss

    def sharpness_aware(index: Tensor, step: int = 0) -> Tensor:
        """The gradient at the worst point nearby moves the weights (Foret et al., 2021)."""
        loss = gradients(index, step)
        kept = [p.detach().clone() for p in parameters]
        ascend(parameters, config.radius, adaptive=config.optimizer == "asam")
        gradients(index, step)
        with torch.no_grad():
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)
        optimizer.step()
        return loss

    return sharpness_aware if config.optimizer in RHO else plain


@contextlib.contextmanager
def _one_sample(n: int, config: Config) -> Iterator[None]:
    """Batch norm cannot train on one sample, which the last batch of an epoch may be."""
    try:
        yield
    except ValueError as error:
        if n > 1:
            raise
        raise FlatlensError(
            f"The network cannot train on a batch of one sample ({first_line(error)}), which "
            f"batch_size={config.batch_size} leaves at the end of an epoch; choose another."
        ) from error


def _smoothed(part: Part, config: Config) -> Tensor:
    """One-hot targets with the share of label smoothing; cross-entropy smooths by itself."""
    share, one_hot = config.label_smoothing, config.loss != "cross_entropy"
    if share and one_hot and not part.y.is_floating_point():
        return (1 - share) * part.targets + share / part.targets.shape[1]
    return part.targets


@torch.no_grad()
def ascend(parameters: list[nn.Parameter], rho: float, adaptive: bool) -> None:
    """To the worst point of the ball around the weights, to first order.

    SAM: rho g / ||g|| (Foret et al., 2021). ASAM: rho T^2 g / ||T g|| with the elementwise
    T = |w| + eta (Kwon et al., 2021).
    """
    moves = [(p, p.grad) for p in parameters if p.grad is not None]
    scales = [p.abs() + ETA if adaptive else torch.ones_like(p) for p, _ in moves]
    norms = [torch.linalg.vector_norm(t * g) for (_, g), t in zip(moves, scales, strict=True)]
    # tensors, not numbers: the host does not wait for the device
    length = rho / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-12)
    for (p, g), t in zip(moves, scales, strict=True):
        p.add_(t * t * g * length)


# ------------------------------------------------------------------ surroundings


@contextlib.contextmanager
def _torch_settings(config: Config) -> Iterator[None]:
    """The threads of the config; the caller's threads and generators are put back."""
    threads = torch.get_num_threads()
    devices = [config.device] if config.device.startswith("cuda") else []
    try:
        torch.set_num_threads(config.threads)
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _interrupt() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that a step is finished and kept; a second one is at once."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed  # only the main thread hears signals
        return
    before = signal.getsignal(signal.SIGINT)

    def press(*_: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
