"""The paper in one command: flatness and compression over training, for two learning rates.

A 64-64-64-10 ReLU network learns 1,000 digits twice, with learning rates 0.1 and 1.0. The demo
records the sharpness of the loss and the compression of the representation over the steps. Loss
and optimiser are those of the paper's experiments: squared error averaged over the batch *and* the
outputs, plain SGD, batch 20.

The larger learning rate ends flatter, with a smaller volume and dimension. MLS (maximum local
sensitivity) and NMLS (its sum over the layers) are not smaller after the default 10,000 steps. With
the smaller learning rate they are still rising at that step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import flatlens as fl
from flatlens.data import load
from flatlens.files.plain_json import to_plain
from flatlens.files.replacing import replacing
from flatlens.measurement.printing import one_screen
from flatlens.training.config import Config
from flatlens.training.state import TrainingState
from flatlens.training.surroundings import torch_settings
from flatlens.training.train import updates

LEARNING_RATES = (0.1, 1.0)
WIDTHS = (64, 64, 64, 10)
BATCH = 20
SAMPLES = 100  # training images that are measured, always the first ones
YOUR_OWN = "Measure your own network: fl.measure(model, x, y), or flatlens measure --help."
COLOURS = (
    "#0072B2",
    "#D55E00",
)  # of Okabe and Ito: all readers can tell them apart
STYLES = ("-", "--")


@dataclass(frozen=True)
class Record:
    """The values of one step; losses are squared errors averaged over samples and outputs."""

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
class DemoRun:
    """One training: its learning rate, the trained network, and its records."""

    lr: float
    model: nn.Module
    records: list[Record]

    @property
    def last(self) -> Record:
        """The record of the last step."""
        return self.records[-1]


def schedule(steps: int) -> list[int]:
    """Return the steps to measure: 1, 2, 5 in each decade below 200, every 200, and the last.

    >>> schedule(500)
    [0, 1, 2, 5, 10, 20, 50, 100, 200, 400, 500]
    """
    early = [0, 1, 2, 5, 10, 20, 50, 100]
    return [*(s for s in early if s < steps), *range(200, steps, 200), steps]


def config(lr: float, steps: int, seed: int) -> Config:
    """Return the config of the training with one learning rate."""
    return Config(
        model_options={"widths": WIDTHS},
        data="digits",
        lr=lr,
        batch_size=BATCH,
        steps=steps,
        seed=seed,
        samples=SAMPLES,
        quantities=("sharpness", "nmls", "log_volume", "log_volume_top3", "mls", "local_dimension"),
    )


def train(lr: float, steps: int, seed: int, tick: Callable[[], object] = lambda: None) -> DemoRun:
    """Train one network and record it at the steps of `schedule`.

    Args:
        lr: learning rate.
        steps: number of steps.
        seed: seed of the initial weights and of the order of the batches.
        tick: called after every step.
    """
    settings = config(lr, steps, seed)
    with torch_settings(settings):  # the caller's threads and generator are put back
        state = TrainingState.start(settings)
        due = set(schedule(steps))
        records = [_record(state, 0)]
        for step, _ in updates(state):
            if step in due:
                records.append(_record(state, step))
            tick()
    return DemoRun(lr, state.network, records)


def _record(state: TrainingState, step: int) -> Record:
    values = state.record(step)
    shared = {field.name: values[field.name] for field in fields(Record) if field.name in values}
    return Record(**shared, sqrt_sharpness=math.sqrt(values["sharpness"]))  # type: ignore[arg-type]


def draw(runs: list[DemoRun]) -> Figure:
    """Draw six panels over the steps, with one line per learning rate."""
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
    """Save the figure as PNG and PDF; each file is written whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {"png": out / "demo.png", "pdf": out / "demo.pdf"}
    for kind, path in paths.items():
        with replacing(path) as temporary:
            # no date inside: the same run gives the same bytes
            metadata = {"CreationDate": None} if kind == "pdf" else None
            figure.savefig(temporary, format=kind, dpi=160, metadata=metadata)
    return paths


def main(out: Path, steps: int, seed: int, as_json: bool) -> None:
    """Train both networks, save the figure, and print tables or one JSON object.

    Args:
        out: folder for the figure.
        steps: number of steps of each training.
        seed: seed of the initial weights and of the order of the batches.
        as_json: print one JSON object instead of tables.
    """
    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be created fails at once
    with _progress(steps * len(LEARNING_RATES)) as tick:
        runs = [train(lr, steps, seed, tick) for lr in LEARNING_RATES]
    paths = save(draw(runs), out)
    if as_json:
        print(json.dumps(_summary(runs, seed, paths), allow_nan=False))
        return
    _print_table(runs, steps)
    data = load("digits")
    print(f"\nThe network of learning rate {runs[-1].lr}, on {SAMPLES} training images:\n")
    m = fl.measure(runs[-1].model, data.x_train[:SAMPLES], data.y_train[:SAMPLES])
    print(one_screen(m, YOUR_OWN))
    print(f"\nFigure: {paths['png']} (and {paths['pdf'].name})")


def _print_table(runs: list[DemoRun], steps: int) -> None:
    table = Table(title=f"{'-'.join(map(str, WIDTHS))} ReLU on 1,000 digits after {steps:,} steps")
    table.add_column("quantity")
    for run in runs:
        table.add_column(f"learning rate {run.lr}", justify="right")
    for field in list(asdict(runs[0].last))[1:]:  # all but the step
        values = (getattr(run.last, field) for run in runs)
        table.add_row(field.replace("_", " "), *(f"{value:.4g}" for value in values))
    Console().print(table)


def _summary(runs: list[DemoRun], seed: int, paths: dict[str, Path]) -> dict[str, Any]:
    return {
        "seed": seed,
        "runs": [
            {"lr": run.lr, "records": [to_plain(asdict(r)) for r in run.records]} for run in runs
        ],
        "figure": {kind: str(path) for kind, path in paths.items()},
    }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    """Show a progress bar on standard error, on a terminal only."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("training", total=total)
        yield lambda: progress.advance(task)
