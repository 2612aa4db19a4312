"""What does our training loop cost? Ratios to plain PyTorch loops, taken in one run.

    python benchmarks/train.py                                   # mlp, lenet, vgg; batch 20
    python benchmarks/train.py --models vgg --repeats 9 --json train.json
    python benchmarks/train.py --interventions                   # a step with a penalty or SAM

Two plain loops stand beside ours, each with `torch.optim.SGD` as it comes: *tensor*, which shuffles
and indexes tensors in memory, the fastest thing one writes by hand; and *loader*, which takes its
batches from a shuffled `DataLoader`. Ours includes everything that `flatlens train` does at a step
that is not measured. All make the same number of steps from the same weights on the same data; a
ratio is the median over repeats of the ratio within one repeat.

`--interventions` compares a step with each penalty, with SAM and with ASAM with the loop *tensor*,
a plain step of `torch.optim.SGD`. Our own plain step stands beside them.
"""

from __future__ import annotations

import argparse
import copy
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flatlens.training.config import Config
from flatlens.training.networks import build
from flatlens.training.samples import Part
from flatlens.training.state import TrainingState
from flatlens.training.steps import make_optimizer
from flatlens.training.train import run_steps

SAMPLES = 2_000
STEPS = {"mlp": 300, "lenet": 200, "vgg": 60}  # about a second each
# changes of a plain config; a tiny strength leaves the weights nearly unchanged at the same cost
INTERVENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharpness penalty": {"penalty": "sharpness:1e-9"},
    "sensitivity penalty": {"penalty": "sensitivity:1e-9"},
    "SAM": {"optimizer": "sam"},
    "ASAM": {"optimizer": "asam"},
}
Work = Callable[[nn.Module], None]


class NoRun:
    """A run folder that stores nothing, so that only the loop is timed."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def append(self, record: Any) -> None: ...

    def checkpoint(self, tensors: Any, meta: Any) -> None: ...


def ours(config: Config, x: Tensor, y: Tensor) -> Work:
    def work(network: nn.Module) -> None:
        part = Part(x, y.argmax(1), y)
        state = TrainingState(config, network, make_optimizer(network, config), part, part)
        run_steps(state, NoRun(), 0, threading.Event(), lambda *_: None)  # type: ignore[arg-type]

    return work


def tensor(config: Config, x: Tensor, y: Tensor) -> Work:
    def work(network: nn.Module) -> None:
        optimizer = torch.optim.SGD(network.parameters(), lr=config.lr)
        step = 0
        while True:
            for index in torch.randperm(len(x)).split(config.batch_size):
                optimizer.zero_grad()
                F.mse_loss(network(x[index]), y[index]).backward()
                optimizer.step()
                step += 1
                if step == config.steps:
                    return

    return work


def loader(config: Config, x: Tensor, y: Tensor) -> Work:
    batches = DataLoader(TensorDataset(x, y), batch_size=config.batch_size, shuffle=True)

    def work(network: nn.Module) -> None:
        optimizer = torch.optim.SGD(network.parameters(), lr=config.lr)
        step = 0
        while True:
            for x_batch, y_batch in batches:
                optimizer.zero_grad()
                F.mse_loss(network(x_batch), y_batch).backward()
                optimizer.step()
                step += 1
                if step == config.steps:
                    return

    return work


def made_up_data(name: str) -> tuple[Tensor, Tensor]:
    """Random images of the size that a network reads, with one-hot targets."""
    generator = torch.Generator().manual_seed(0)
    shape = (784,) if name == "mlp" else (3, 32, 32)
    x = torch.rand(SAMPLES, *shape, generator=generator)
    return x, F.one_hot(torch.randint(10, (SAMPLES,), generator=generator), 10).float()


def compare(name: str, batch: int, repeats: int) -> dict[str, Any]:
    """Time our loop and two plain loops."""
    x, y = made_up_data(name)
    config = Config(model=name, batch_size=batch, steps=STEPS[name], measure="end")
    sides = {side.__name__: side(config, x, y) for side in (ours, tensor, loader)}
    return timed(name, config, sides, repeats)


def compare_interventions(name: str, batch: int, repeats: int, steps: int) -> dict[str, Any]:
    """Time our loop with each intervention."""
    x, y = made_up_data(name)
    config = Config(model=name, batch_size=batch, steps=steps, measure="end")
    sides = {side: ours(replace(config, **fields), x, y) for side, fields in INTERVENTIONS.items()}
    sides |= {"tensor": tensor(config, x, y)}
    return timed(name, config, sides, repeats)


def timed(name: str, config: Config, sides: dict[str, Work], repeats: int) -> dict[str, Any]:
    """Return the seconds of every side in every repeat, after one warm-up round."""
    torch.manual_seed(0)
    network = build(name)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats + 1):
        for side, work in sides.items():
            copied = copy.deepcopy(network)
            began = time.perf_counter()
            work(copied)
            seconds[side].append(time.perf_counter() - began)
    seconds = {side: times[1:] for side, times in seconds.items()}
    return {"steps": config.steps, "batch": config.batch_size, "seconds": seconds}


def report(name: str, result: dict[str, Any]) -> str:
    seconds = result["seconds"]
    columns = [f"{name:6} {1e3 * median(seconds['ours']) / result['steps']:8.3f} ms a step"]
    for side in ("tensor", "loader"):
        ratios = [a / b for a, b in zip(seconds["ours"], seconds[side], strict=True)]
        columns.append(f"ours / {side} {spread(ratios)}")
    return "   ".join(columns)


def report_interventions(name: str, result: dict[str, Any]) -> str:
    seconds = result["seconds"]
    columns = [
        f"{name:6} {1e3 * median(seconds['tensor']) / result['steps']:8.3f} ms a step of SGD"
    ]
    for side in INTERVENTIONS:
        ratios = [a / b for a, b in zip(seconds[side], seconds["tensor"], strict=True)]
        columns.append(f"{side} / SGD {spread(ratios)}")
    return "   ".join(columns)


def spread(ratios: list[float]) -> str:
    """Format the median of ratios and, for two or more, the quartiles."""
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}"
    low, _, high = quantiles(ratios, n=4)
    return f"{median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--interventions", action="store_true", help="penalties and SAM")
    parser.add_argument("--steps", type=int, help="steps of --interventions")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    TrainingState.record = lambda self, step: {}  # type: ignore[method-assign]
    results = {}
    for name in given.models:
        if given.interventions:
            steps = given.steps or STEPS[name]
            results[name] = compare_interventions(name, given.batch, given.repeats, steps)
            print(report_interventions(name, results[name]), flush=True)
        else:
            results[name] = compare(name, given.batch, given.repeats)
            print(report(name, results[name]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
