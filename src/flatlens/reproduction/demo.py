"""The paper's story in one command: flatness and compression over training, two learning rates.

The larger one ends flatter, with a smaller volume and dimension. (MLS and NMLS are not smaller
after the default 10,000 steps: with the smaller learning rate they are still rising then.)

A 64-64-64-10 ReLU network learns 1,000 digits twice, with learning rates 0.1 and 1.0; the
sharpness of the loss and the compression of the representation are followed over the steps.
Loss and optimiser are those of the paper's experiments: squared error averaged over the batch
*and* the outputs, plain SGD, batch 20.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import flatlens as fl
from flatlens.data.datasets import Data, load
from flatlens.runs.files import replacing
from flatlens.training.networks import mlp

LEARNING_RATES = (0.1, 1.0)
WIDTHS = (64, 64, 64, 10)
BATCH = 20
SAMPLES = 100  # training images that are measured, always the first ones
COLOURS = ("#0072B2", "#D55E00")  # Okabe and Ito's blue and vermilion: told apart by all readers
STYLES = ("-", "--")


@dataclass(frozen=True)
class Record:
    """What is known at one step; losses are squared errors averaged over samples and outputs."""

    step: int
    train_loss: float
    test_loss: float
    train_accuracy: float  # percent
    test_accuracy: float  # percent
    sqrt_sharpness: float  # square root of Eq. 3, as the paper plots it
    nmls: float  # Def. 3.9
    log_volume: float  # logarithm of Eq. 7
    log_volume_top3: float  # of the three largest singular values alone, as the paper plots it
    mls: float  # Def. 3.7
    local_dimension: float  # Eq. 15


# panel title and axis scale of each plotted field, in the order of the panels
PANELS = {
    "train_loss": ("training loss", "log"),
    "sqrt_sharpness": ("sharpness (square root)", "linear"),
    "nmls": ("NMLS", "linear"),
    "log_volume_top3": ("log volume (top 3)", "linear"),
    "mls": ("MLS", "linear"),
    "local_dimension": ("local dimension", "linear"),
}


@dataclass(frozen=True)
class Run:
    """One training: its learning rate, the trained network, what was recorded on the way."""

    lr: float
    model: nn.Module
    records: list[Record]

    @property
    def last(self) -> Record:
        return self.records[-1]


def schedule(steps: int) -> list[int]:
    """Steps at which to measure: 1, 2, 5 in each decade below 200, then every 200, and the last.

    >>> schedule(500)
    [0, 1, 2, 5, 10, 20, 50, 100, 200, 400, 500]
    """
    early = [0, 1, 2, 5, 10, 20, 50, 100]
    return [*(s for s in early if s < steps), *range(200, steps, 200), steps]


def train(
    data: Data, lr: float, steps: int, seed: int, tick: Callable[[], object] = lambda: None
) -> Run:
    """Plain SGD from a seeded start; `tick` is called after every step."""
    with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it is
        torch.manual_seed(seed)
        model = mlp(WIDTHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    targets = F.one_hot(data.y_train, data.classes).to(data.x_train)
    batches = _batches(len(targets), seed)
    due = set(schedule(steps))
    records = [record(model, data, 0)]
    for step in range(1, steps + 1):
        index = next(batches)
        optimizer.zero_grad()
        F.mse_loss(model(data.x_train[index]), targets[index]).backward()
        optimizer.step()
        if step in due:
            records.append(record(model, data, step))
        tick()
    return Run(lr, model, records)


def record(model: nn.Module, data: Data, step: int) -> Record:
    """Everything that the figure shows, at one step."""
    p = fl.probe(model, data.x_train[:SAMPLES])
    train_loss, train_accuracy = _evaluate(model, data.x_train, data.y_train, data.classes)
    test_loss, test_accuracy = _evaluate(model, data.x_test, data.y_test, data.classes)
    return Record(
        step=step,
        train_loss=train_loss,
        test_loss=test_loss,
        train_accuracy=train_accuracy,
        test_accuracy=test_accuracy,
        sqrt_sharpness=math.sqrt(fl.sharpness(p)),
        nmls=fl.nmls(p),
        log_volume=fl.log_volume(p),
        log_volume_top3=fl.log_volume(p, top=3),
        mls=fl.mls(p),
        local_dimension=fl.local_dimension(p),
    )


def draw(runs: list[Run]) -> Figure:
    """Six panels over the steps, one line a learning rate."""
    # Figure rather than pyplot: no window, no state shared with the caller's own figures
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    for ax, (field, (title, scale)) in zip(axes.flat, PANELS.items(), strict=True):
        for run, colour, style in zip(runs, COLOURS, STYLES, strict=True):
            steps = [r.step for r in run.records]
            values = [getattr(r, field) for r in run.records]
            ax.plot(steps, values, style, color=colour, label=f"learning rate {run.lr}")
        ax.set_title(title, fontsize="medium")
        ax.set_yscale(scale)
        ax.set_xscale("symlog", linthresh=1)  # keeps step 0 on a log axis
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    for ax in axes[1]:
        ax.set_xlabel("SGD steps")
    axes[0, 0].legend(frameon=False)
    return figure


def save(figure: Figure, out: Path) -> dict[str, Path]:
    """PNG and PDF, each whole or not at all (written beside its place, then renamed)."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {"png": out / "demo.png", "pdf": out / "demo.pdf"}
    for kind, path in paths.items():
        with replacing(path) as temporary:
            # no date inside: the same run gives the same bytes
            metadata = {"CreationDate": None} if kind == "pdf" else None
            figure.savefig(temporary, format=kind, dpi=160, metadata=metadata)
    return paths


def main(out: Path, steps: int, seed: int, as_json: bool) -> None:
    """Both runs, the figure, and either tables or one JSON object on standard output."""
    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is said at once
    data = load("digits")
    runs = []
    with _one_thread(), _progress(steps * len(LEARNING_RATES)) as tick:
        for lr in LEARNING_RATES:
            runs.append(train(data, lr, steps, seed, tick))
    paths = save(draw(runs), out)
    if as_json:
        print(json.dumps(_summary(runs, seed, paths), allow_nan=False))
        return
    _print_table(runs, steps)
    print(f"\nThe network of learning rate {runs[-1].lr}, on {SAMPLES} training images:\n")
    print(fl.measure(runs[-1].model, data.x_train[:SAMPLES], data.y_train[:SAMPLES]))
    print(f"\nFigure: {paths['png']} (and {paths['pdf'].name})")


def _print_table(runs: list[Run], steps: int) -> None:
    table = Table(title=f"{'-'.join(map(str, WIDTHS))} ReLU on 1,000 digits after {steps:,} steps")
    table.add_column("quantity")
    for run in runs:
        table.add_column(f"learning rate {run.lr}", justify="right")
    for field in list(asdict(runs[0].last))[1:]:  # all but the step
        values = (getattr(run.last, field) for run in runs)
        table.add_row(field.replace("_", " "), *(f"{value:.4g}" for value in values))
    Console().print(table)


def _summary(runs: list[Run], seed: int, paths: dict[str, Path]) -> dict[str, Any]:
    return {
        "seed": seed,
        "runs": [
            {"lr": run.lr, "records": [_finite(asdict(r)) for r in run.records]} for run in runs
        ],
        "figure": {kind: str(path) for kind, path in paths.items()},
    }


def _finite(fields: dict[str, int | float]) -> dict[str, int | float | str]:
    """JSON has no infinities: a log volume of -inf is written as the string "-inf"."""
    return {key: value if math.isfinite(value) else str(value) for key, value in fields.items()}


def _batches(n: int, seed: int) -> Iterator[Tensor]:
    """Indices of one batch after another, each epoch in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(n, generator=generator).split(BATCH)


@torch.no_grad()
def _evaluate(model: nn.Module, x: Tensor, y: Tensor, classes: int) -> tuple[float, float]:
    f = model(x)
    loss = F.mse_loss(f, F.one_hot(y, classes).to(f))
    accuracy = (f.argmax(-1) == y).double().mean()
    return loss.item(), 100 * accuracy.item()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower on many threads, far slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    """A bar on standard error while a person looks at it; else nothing."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("training", total=total)
        yield lambda: progress.advance(task)
