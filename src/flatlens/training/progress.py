"""Progress bars on standard error, on a terminal only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

REFRESH = 0.25  # seconds; the loss is read from the device no more often
Show = Callable[[int, Tensor, Sequence[Mapping[str, float]]], None]


@contextmanager
def training_line(steps: int, start: int | None, progress: bool | None) -> Iterator[Show]:
    """Show steps, loss, sharpness S, NMLS, steps per second and the time left.

    Args:
        steps: number of steps.
        start: step of the checkpoint, or None.
        progress: whether to show the line. None shows it on a terminal only.
    """
    console = Console(stderr=True)
    if not (console.is_terminal if progress is None else progress):
        yield lambda step, loss, records: None
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("loss {task.fields[loss]}  S {task.fields[S]}  NMLS {task.fields[nmls]}"),
        TextColumn("{task.fields[speed]} steps/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(
            "", total=steps, completed=start or 0, loss="-", S="-", nmls="-", speed="-"
        )
        shown = time.monotonic()

        def show(step: int, loss: Tensor, records: Sequence[Mapping[str, float]]) -> None:
            nonlocal shown
            if (now := time.monotonic()) < shown + REFRESH:
                return
            shown = now
            last = records[-1] if records else {}
            speed = bar.tasks[task].speed
            bar.update(
                task,
                completed=step,
                refresh=True,
                loss=f"{loss.item():.3g}",
                S=_number(last.get("sharpness")),
                nmls=_number(last.get("nmls")),
                speed=f"{speed:.0f}" if speed else "-",
            )

        yield show


@contextmanager
def sweep_bar(total: int, skipped: int, progress: bool | None) -> Iterator[Callable[..., None]]:
    """Show how many runs ended, were done before, failed or are busy, and the time left."""
    console = Console(stderr=True)
    columns = (
        TextColumn("runs"),
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    off = not (console.is_terminal if progress is None else progress)
    with Progress(*columns, console=console, transient=True, disable=off) as bar:
        task = bar.add_task(f"{skipped} done before", total=total, completed=skipped)

        def show(failed: int, busy: int) -> None:
            counts = [f"{skipped} done before", f"{failed} failed"]
            counts += [f"{busy} left to another sweep"] if busy else []
            bar.update(task, advance=1, description=", ".join(counts))

        yield show


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
