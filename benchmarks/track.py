"""What does a Tracker cost? Its share of a training, measured every 200 steps on 100 samples.

    python benchmarks/track.py                     # the paper's three networks, one thread
    python benchmarks/track.py --models vgg --batch 32 --repeats 11 --json track.json

A window is 200 plain SGD steps (batch 20, squared loss, as in the paper) and the one measurement
that falls into it, written to a run folder. The overhead is the time inside the tracker (all 200
calls, the measurement, the write to the disk) over the time of the steps in the same window; the
table has the median over windows, and quartiles. The second column compares whole windows with
and without a tracker, one after the other: it agrees if the tracker costs nothing beside its calls.
The rows are for the headline set and for all that one pass gives.
The last column is the overhead under ``max_overhead=0.1`` after the first window, how many of those
due took place, and how many of these on a part of the samples. With ``--sketch`` a second table
has one measurement by the exact pass and by sketches of 2 and 4 directions, as a share of a window.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flatlens as fl
from flatlens.track import Tracker, every
from flatlens.training.networks import build

MODELS = ("mlp", "lenet", "vgg")  # those of the paper's experiments
Tracking = Callable[..., object]


def data(name: str, n: int) -> tuple[Tensor, Tensor]:
    """Return random pixels in [0, 1] and one-hot targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, *((784,) if name == "mlp" else (3, 32, 32)), generator=generator)
    return x, F.one_hot(torch.randint(10, (n,), generator=generator), 10).float()


class Training:
    """Plain SGD, one window of steps at a time."""

    def __init__(self, name: str, batch: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = build(name)
        self.x, self.y = data(name, 1000)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batch, self.step = batch, 0

    def window(self, steps: int, track: Tracking) -> tuple[float, float]:
        """Return the seconds of ``steps`` steps, and the part that ``track`` took."""
        start, tracked = time.perf_counter(), 0.0
        for _ in range(steps):
            rows = torch.randint(len(self.x), (self.batch,))
            loss = F.mse_loss(self.model(self.x[rows]), self.y[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            before = time.perf_counter()
            track(self.step, train_loss=loss)
            tracked += time.perf_counter() - before
            self.step += 1
        return time.perf_counter() - start, tracked


def overhead(name: str, quantities: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row of the table: seconds per window, and both ratios."""
    training = Training(name, options.batch)
    x, y = data(name, options.samples)
    rows: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Tracker(
            training.model,
            x,
            y,
            when=every(options.every),
            run=Path(folder) / "a",
            quantities=quantities,
        ) as tracker,
    ):
        training.window(options.every, tracker)  # the first of everything is slow
        for _ in range(options.repeats):
            # the untracked window has its own step numbers, because the tracker must count upwards
            plain, _ = training.window(options.every, lambda *_, **__: None)
            whole, tracked = training.window(options.every, tracker)
            rows.append({"plain": plain, "whole": whole, "tracked": tracked})
        assert len(tracker.records) == options.repeats + 1
    shares = [row["tracked"] / (row["whole"] - row["tracked"]) for row in rows]
    return {
        "model": name,
        "quantities": quantities,
        "limited": limited(name, quantities, options),
        "windows": rows,
        "overhead": shares,
        "against_plain": [row["whole"] / row["plain"] - 1 for row in rows],
    }


def limited(name: str, quantities: str, options: argparse.Namespace) -> dict[str, float]:
    """Train with ``max_overhead=0.1``; return the overhead and the number of measurements."""
    training = Training(name, options.batch)
    x, y = data(name, options.samples)
    when = every(options.every)
    tracker = Tracker(training.model, x, y, when=when, quantities=quantities, max_overhead=0.1)
    training.window(options.every, tracker)  # the first of everything is slow
    with warnings.catch_warnings(action="ignore"):  # that it is over the limit
        windows = [training.window(options.every, tracker) for _ in range(2 * options.repeats)]
    whole, tracked = (sum(seconds) for seconds in zip(*windows, strict=True))
    found = tracker.records[1:]
    return {
        "share": tracked / (whole - tracked),
        "measured": len(found),
        "part": sum(record["samples"] < options.samples for record in found),
        "due": len(windows),
    }


def sketches(name: str, options: argparse.Namespace) -> str:
    """Return a row of the second table: one measurement by each method, as a share of a window."""
    training = Training(name, options.batch)
    x, y = data(name, options.samples)
    window = min(training.window(options.every, lambda *_, **__: None)[0] for _ in range(2))
    cells = []
    for method in ({}, {"directions": 2}, {"directions": 4}):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            fl.measure(training.model, x, y, method="sketch" if method else "exact", **method)
            seconds.append(time.perf_counter() - start)
        cells.append(f"{1000 * min(seconds):.0f} ms, {min(seconds) / window:.0%}")
    return f"| {name} | {' | '.join(cells)} |"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | quantities | training, a window | tracker, a window | overhead "
        "| against a window without | max_overhead=0.1 |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        steps = 1000 * median(w["whole"] - w["tracked"] for w in row["windows"])
        tracked = 1000 * median(w["tracked"] for w in row["windows"])
        limit = row["limited"]
        low, mid, high = quantiles(row["overhead"], n=4)
        lines.append(
            f"| {row['model']} | {row['quantities']} | {steps:.0f} ms | {tracked:.0f} ms "
            f"| **{100 * mid:.1f} %** ({100 * low:.1f} to {100 * high:.1f}) "
            f"| {100 * median(row['against_plain']):.1f} % "
            f"| {100 * limit['share']:.1f} % ({limit['measured']} of {limit['due']}, "
            f"{limit['part']} on a part) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of a Tracker in training.")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--quantities", nargs="*", default=["headline", "default"])
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--every", type=int, default=200, help="steps between measurements")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=11, help="windows (2 or more)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sketch", action="store_true", help="compare with sketches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = {
        **{key: value for key, value in vars(options).items() if key not in ("models", "json")},
        "flatlens": fl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n")
    rows = [
        overhead(name, quantities, options)
        for name in options.models
        for quantities in options.quantities
    ]
    print(table(rows))
    if options.sketch:
        print("\n| model | exact | 2 directions | 4 directions |\n|---|--:|--:|--:|")
        print("\n".join(sketches(name, options) for name in options.models))
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
