"""How well does a sweep use its cores? Ten networks on two workers, by both engines.

    FLATLENS_DATA=FOLDER python benchmarks/sweep.py                       # 3,000 steps, two workers
    FLATLENS_DATA=FOLDER python benchmarks/sweep.py --steps 50 --figure trial.png

The paper's MLP on FashionMNIST, five learning rates with two seeds each, measured every 200 steps
on 100 samples. Each engine starts its workers first and has each of them do a run of one step: that
is the *start* (importing torch, reading the data once). What follows is the sweep alone: its wall
time, and *core use*, the CPU time of the workers over wall time x workers. The records of the
two engines are compared byte for byte, and the figure has the trends of all ten runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

import flatlens as fl
from flatlens.figures import style, trends
from flatlens.training.config import Config
from flatlens.workers.dask import keeping_memory

GRID = {"lr": [0.05, 0.1, 0.2, 0.4, 0.8], "seed": [0, 1]}
FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "sweep.png"


def cpu() -> float:
    """Return the CPU seconds of all child processes so far, ended or alive."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def started(engine: str, workers: int) -> Iterator[dict[str, Any]]:
    """Start processes that outlive one sweep; yield options of `fl.sweep`."""
    options: dict[str, Any] = {"engine": engine, "workers": workers, "progress": False}
    if engine == "local":  # kept for the next sweep by themselves
        from loky import get_reusable_executor

        yield options
        get_reusable_executor().shutdown(wait=True, kill_workers=True)
        return
    import distributed

    with (
        keeping_memory(),
        distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.ERROR,
        ) as cluster,
    ):
        yield {**options, "address": cluster.scheduler_address}


def timed(engine: str, base: Config, workers: int, folder: Path) -> dict[str, float]:
    """Return wall and CPU seconds of the start and of the sweep."""
    one = {**base.to_dict(), "steps": 1}
    marks = [(time.perf_counter(), cpu())]
    with started(engine, workers) as options:
        fl.sweep(one, {"seed": range(workers)}, out=folder / f"start-{engine}", **options)
        marks.append((time.perf_counter(), cpu()))
        fl.sweep(base, GRID, out=folder / engine, **options)
        marks.append((time.perf_counter(), cpu()))
    start, sweep = ((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks))
    return {
        "start_wall": start[0],
        "start_cpu": start[1],
        "wall": sweep[0],
        "cpu": sweep[1],
        "core_use": sweep[1] / (sweep[0] * workers),
    }


def records(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(folder.glob("*/records.jsonl"))}


def summary_line(engine: str, row: dict[str, float]) -> str:
    return (
        f"{engine}: {row['wall']:.0f} s, core use {row['core_use']:.0%} "
        f"(before it {row['start_wall']:.0f} s to start)"
    )


def draw(folder: Path, caption: str, path: Path) -> None:
    """Draw the trends of all runs below `folder`, with the times underneath."""
    figure = trends(fl.read_runs(folder), by="lr")
    with style.look():
        figure.legends[0].remove()  # of one row; five learning rates need less room each
        handles, labels = figure.axes[0].get_legend_handles_labels()
        short = [label.replace("learning rate", "lr") for label in labels]
        figure.legend(handles, short, loc="outside upper center", ncols=len(short))
        figure.supxlabel(caption, size=6)
        figure.savefig(path, dpi=220)


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time and core use of a sweep.")
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engines", nargs="+", default=["local", "dask"])
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times here too")
    given = parser.parse_args()
    base = Config(model="mlp", data="fashion-mnist", steps=given.steps, evaluate=1_000)
    print(f"flatlens {fl.__version__}, torch {torch.__version__}, {psutil.cpu_count()} cores")
    print("| engine | start, wall (CPU) | sweep, wall | CPU of workers | core use |")
    print("|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = {}
        for engine in given.engines:
            row = rows[engine] = timed(engine, base, given.workers, folder)
            print(
                f"| {engine} | {row['start_wall']:.1f} s ({row['start_cpu']:.1f} s) "
                f"| {row['wall']:.1f} s | {row['cpu']:.1f} s | **{row['core_use']:.1%}** |",
                flush=True,
            )
        first, *others = (records(folder / engine) for engine in given.engines)
        assert len(first) == 10
        assert all(other == first for other in others), "the engines gave different records"
        print(f"\n{' and '.join(rows)}: the same records of {len(first)} runs, byte for byte.")
        caption = f"10 runs of {given.steps:,} steps on {given.workers} workers\n"
        caption += "; ".join(summary_line(engine, row) for engine, row in rows.items())
        draw(folder / given.engines[0], caption, given.figure)
    if given.json:
        given.json.write_text(json.dumps({**vars(given), "rows": rows}, default=str, indent=2))


if __name__ == "__main__":
    main()
