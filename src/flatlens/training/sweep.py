"""Many trainings, on the processes of one machine or on a Dask cluster, with the same records.

A cell of the grid is a folder named after its config, so a sweep that is started again skips what
is done, goes on with what was begun, and shares its folder with other sweeps: each run has a lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatlens.errors import FlatlensError, first_line
from flatlens.files.replacing import replacing
from flatlens.runs import RunBusyError, read_runs
from flatlens.training.config import Config, read_toml
from flatlens.training.progress import sweep_bar
from flatlens.training.train import open_run, train

if TYPE_CHECKING:
    import pandas as pd

Grid = Mapping[str, Any]
ERROR = "error.txt"  # in the folder of a run that failed
LOSSES = 3  # workers that may die under a run alone before it counts as failed, as Dask has it
CONNECT = "30s"  # how long a Dask scheduler may take to answer
IDLE = 60  # seconds after which local workers without work end
_ONE_AT_A_TIME = threading.Lock()  # torch has one generator and one number of threads a process


class SweepError(FlatlensError):
    """Some runs of a sweep failed; the others are done."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell. Files are sent along if the driver's disk was not seen."""

    status: Literal["done", "failed", "refused", "lost", "busy"]
    error: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


def sweep(
    base: Config | Mapping[str, Any],
    grid: Grid | Sequence[Grid],
    *,
    out: Path | str,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    retries: int = 1,
    resources: Mapping[str, int | float] | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Trains every cell of a grid below the folder `out`; gives `read_runs(out)`.

    `grid` maps fields of the config to lists of values, all combined with each other, as in
    `{"lr": [0.05, 0.1], "seed": range(5)}`; a key such as `model_options.activation` reaches into
    an option. Several grids in a list are done one after the other, equal cells once.

    The engine "local" uses `workers` processes of this machine (by default as many as it has
    cores); "dask" the scheduler at `address`, or without one a cluster of local processes.
    `resources` is what each run takes of a Dask worker, such as `{"GPU": 1}`. A run that
    fails is tried `retries` times more, where it stopped; a refusal (FlatlensError) is not.
    Failures do not stop the other runs: they are told at the end as a SweepError, and each
    traceback is in the file error.txt of its run. A run that another process is writing
    is left to it and listed in `attrs["busy"]` of the result.
    """
    configs = cells(base, grid)
    folder = Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    todo = [config for config in configs if not (folder / config.name / "done").exists()]
    failed: dict[str, str] = {}
    busy: list[str] = []
    with sweep_bar(len(configs), len(configs) - len(todo), progress) as show:
        if todo:
            threads = max(config.threads for config in todo)
            with engine_of(engine, workers, address, resources, threads, len(todo)) as using:
                for config, outcome in _outcomes(todo, using, folder, retries):
                    if outcome.status == "busy":
                        busy.append(config.name)
                    elif outcome.status != "done":
                        failed[config.name] = outcome.error
                    show(len(failed), len(busy))
    if failed:
        raise SweepError(_told(failed, len(configs), folder))
    damaged: list[str] = []
    frame = read_runs(folder, damaged=damaged)
    if damaged:
        raise SweepError(" ".join(damaged))
    frame.attrs["busy"] = busy
    return frame


def _told(failed: Mapping[str, str], total: int, folder: Path) -> str:
    reasons = [f"{name} ({error.splitlines()[-1]})" for name, error in failed.items()]
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return (
        f"{len(failed)} of {total} runs failed: {', '.join(reasons[:3])}{more}; the tracebacks are "
        f"in the {ERROR} of each run below {folder}, the same sweep again tries them once more."
    )


# ------------------------------------------------------------------ the cells of a grid


def cells(base: Config | Mapping[str, Any], grid: Grid | Sequence[Grid]) -> list[Config]:
    """Every config of the grid once, in order; the last key changes fastest.

    >>> [c.lr for c in cells(Config(), [{"lr": [0.1, 0.2]}, {"lr": [0.2, 0.3]}])]
    [0.1, 0.2, 0.3]
    >>> cells(Config(), {"model_options.activation": ["tanh"]})[0].model_options
    {'activation': 'tanh'}
    """
    start = base.to_dict() if isinstance(base, Config) else dict(base)
    found: dict[str, Config] = {}
    for one in [grid] if isinstance(grid, Mapping) else grid:
        lists = dict(_lists(one))
        for values in itertools.product(*lists.values()):
            settings = dict(start)
            for key, value in zip(lists, values, strict=True):
                name, _, option = key.partition(".")
                inside = settings.get(name, {})
                if option and not isinstance(inside, Mapping):
                    raise FlatlensError(
                        f"The grid's {key} is an option of {name}, but {name} is {inside!r}."
                    )
                settings[name] = {**inside, option: value} if option else value
            config = Config.from_dict(settings, "the grid")
            found.setdefault(config.name, config)
    return list(found.values())


def _lists(grid: Grid, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    for key, values in grid.items():
        if isinstance(values, Mapping):  # a TOML table inside the grid
            yield from _lists(values, f"{prefix}{key}.")
        elif isinstance(values, str) or not isinstance(values, Collection) or not len(values):
            raise FlatlensError(f"The grid's {prefix}{key} is {values!r}, but it must be a list.")
        else:
            yield prefix + key, list(values)


def read_sweep(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tables [base] and [grid] (or several [[grid]]) of a TOML file."""
    content = read_toml(path)
    if unknown := sorted(content.keys() - {"base", "grid"}):
        raise FlatlensError(f"{path} has {unknown[0]!r} beside its tables [base] and [grid].")
    base, grid = content.get("base", {}), content.get("grid", {})
    grids = grid if isinstance(grid, list) else [grid]
    if not isinstance(base, dict) or not all(isinstance(one, dict) for one in grids):
        raise FlatlensError(f"In {path} base and grid must be tables: [base], [grid] or [[grid]].")
    return base, grids


# ------------------------------------------------------------------ one cell, on any worker


def run_cell(settings: Mapping[str, Any], out: str, token: str) -> Outcome:
    """Trains one cell. The task of every engine.

    The file `token` in `out` tells that this machine sees the driver's disk. If it is not there,
    the run is made in a temporary folder and its files are sent back.
    """
    config = Config.from_dict(settings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        shared = (Path(out) / token).exists()
        place = out if shared else stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(place) / config.name
        try:
            train(config, folder, progress=False)
            (folder / ERROR).unlink(missing_ok=True)
        except RunBusyError:
            return Outcome("busy")
        # of anyone's network, which may even want to exit: kept, told at the end
        except (Exception, SystemExit) as error:
            status: Literal["refused", "failed"] = (
                "refused" if isinstance(error, FlatlensError) else "failed"
            )
            return Outcome(status, traceback.format_exc())
        if shared:
            return Outcome("done")
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
        return Outcome("done", files=files)


def _keep(config: Config, outcome: Outcome, folder: Path) -> Outcome:
    """What the driver has to write: files that a worker sent, or the traceback of a failure."""
    place = folder / config.name
    if outcome.error:
        with replacing(place / ERROR) as temporary:
            temporary.write_text(outcome.error)
    if not outcome.files:
        return outcome
    try:
        with open_run(place, config) as run:  # its lock: another sweep may write, too
            names = [] if run.done else sorted(outcome.files, key="done".__eq__)  # done comes last
            for name in names:
                with replacing(place / name) as temporary:
                    temporary.write_bytes(outcome.files[name])
        (place / ERROR).unlink(missing_ok=True)
    except RunBusyError:
        return Outcome("busy")
    return outcome


# ------------------------------------------------------------------ engines


@dataclass(frozen=True)
class Engine:
    """How to start a task, and how to wait for the first of several; both kinds have futures."""

    submit: Callable[..., Any]
    wait: Callable[[list[Any]], Any]
    window: int | None  # tasks under way at a time; None: the scheduler has a queue of its own
    losses: int  # how often a run is started again because its worker died; 0: by the scheduler


def _outcomes(
    todo: list[Config], engine: Engine, folder: Path, retries: int
) -> Iterator[tuple[Config, Outcome]]:
    """Each config with what became of it, in the order in which they end.

    A worker that dies takes the runs of all others along. Which one killed it is not known, so all
    of them are run again at the end with nothing beside them: only what is lost then is counted.
    """
    token = _mark(folder)
    waiting, suspects = list(reversed(todo)), list[Config]()
    running, together = dict[Any, Config](), set[Any]()  # futures, and those that had company
    left: Counter[tuple[str, str]] = Counter()  # how often a status of a run is tried again
    for config in todo:
        left["failed", config.name], left["lost", config.name] = retries, engine.losses

    def start(config: Config) -> None:
        running[engine.submit(run_cell, config.to_dict(), str(folder), token)] = config
        if len(running) > 1:
            together.update(running)

    try:
        while waiting or suspects or running:
            while waiting and (engine.window is None or len(running) < engine.window):
                start(waiting.pop())
            if not running:
                start(suspects.pop())
            done, _ = engine.wait(list(running))
            for future in done:
                config, outcome = running.pop(future), _result(future)
                if outcome.status == "lost" and engine.losses and future in together:
                    suspects.append(config)
                elif outcome.status == "lost" and left["lost", config.name] > 0:
                    left["lost", config.name] -= 1
                    suspects.append(config)
                elif left[outcome.status, config.name] > 0:
                    left[outcome.status, config.name] -= 1
                    waiting.append(config)
                else:
                    yield config, _keep(config, outcome, folder)
    finally:
        (folder / token).unlink(missing_ok=True)


def _mark(folder: Path) -> str:
    """A file by which a worker knows the folder of this sweep."""
    token = f".sweep-{uuid.uuid4().hex}"
    (folder / token).touch()
    return token


def _result(future: Any) -> Outcome:
    try:
        outcome: Outcome = future.result()
    except Exception as error:  # not of the run, which catches its own
        return Outcome("lost", traceback.format_exc() + _death(error))
    return outcome


def _death(error: Exception) -> str:
    """That a worker died, and of what as far as that is known; nothing of other errors."""
    if isinstance(error, BrokenProcessPool):
        code = re.search(r"exit codes of the workers are {(.+)}", str(error))
        return f"\nIts worker process died{f', {code[1]}' if code else ''}."
    return "\nIts worker processes died." if type(error).__name__ == "KilledWorker" else ""


@contextlib.contextmanager
def engine_of(
    name: str,
    workers: int | None,
    address: str | None,
    resources: Mapping[str, int | float] | None,
    threads: int,
    tasks: int,
) -> Iterator[Engine]:
    """Processes for ``tasks`` tasks of ``threads`` threads: as many as asked for, or as fit."""
    if workers is not None and workers < 1:
        raise FlatlensError(f"A sweep needs at least one worker, not {workers}.")
    if name not in ("local", "dask"):
        raise FlatlensError(f"Unknown engine {name!r}; use local or dask.")
    if name == "local" and (address or resources):
        raise FlatlensError("An address and resources belong to the engine dask.")
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        workers = max(1, (cores or 1) // threads)
    workers = min(workers, tasks)
    with _local(workers) if name == "local" else _dask(workers, address, resources) as engine:
        yield engine


@contextlib.contextmanager
def _local(workers: int) -> Iterator[Engine]:
    """Long-lived processes: importing torch takes seconds, so they are kept for the next sweep."""
    try:
        from loky import get_reusable_executor  # type: ignore[import-untyped]
    except ImportError as error:
        raise FlatlensError("The engine local needs pip install flatlens[sweep].") from error

    def executor() -> Any:  # a new one if a worker was killed, which breaks the old one
        return get_reusable_executor(max_workers=workers, timeout=IDLE, initializer=_deaf)

    def wait(futures: list[Any]) -> Any:
        return concurrent.futures.wait(futures, return_when="FIRST_COMPLETED")

    try:
        yield Engine(lambda *task: executor().submit(*task), wait, workers, LOSSES)
    except BaseException:  # Ctrl-C: runs may be killed at any moment
        executor().shutdown(wait=True, kill_workers=True)
        raise


def _deaf() -> None:
    """Ctrl-C reaches all processes of a terminal; what becomes of workers the driver decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def keeping_memory() -> contextlib.AbstractContextManager[Any]:
    """Workers that keep what they free for the next step.

    Dask starts them with an allocator that gives it back at once, which doubles the CPU time of a
    training: every step pays for its pages anew.
    """
    import dask

    key = "distributed.nanny.pre-spawn-environ"
    found = {k: v for k, v in dask.config.get(key).items() if k != "MALLOC_TRIM_THRESHOLD_"}
    return dask.config.set({key: found})


@contextlib.contextmanager
def _started() -> Iterator[None]:
    """Workers that do not start, in one sentence."""
    try:
        yield
    except RuntimeError as error:
        raise FlatlensError(
            f"Dask's workers do not start ({first_line(error).rstrip('.')}); each of them imports "
            'the script that is run, so the sweep has to stand below if __name__ == "__main__".'
        ) from None


@contextlib.contextmanager
def _dask(
    workers: int, address: str | None, resources: Mapping[str, int | float] | None
) -> Iterator[Engine]:
    try:
        import distributed
    except ImportError as error:
        raise FlatlensError("The engine dask needs pip install flatlens[dask].") from error
    if address is None and getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # a worker that runs the script again: the driver says what is wrong
    with contextlib.ExitStack() as stack:
        if address is None:
            with keeping_memory(), _started():
                cluster = distributed.LocalCluster(
                    n_workers=workers,
                    processes=True,
                    threads_per_worker=1,
                    dashboard_address="127.0.0.1:0",  # any free port
                    silence_logs=logging.ERROR,
                    resources=dict(resources or {}),
                )
            stack.enter_context(cluster)
        try:
            client = distributed.Client(address or cluster, timeout=CONNECT, set_as_default=False)
        except (OSError, ValueError) as error:
            raise FlatlensError(f"No Dask scheduler answers at {address}: {error}.") from error
        stack.enter_context(client)

        def submit(*task: Any) -> Any:
            return client.submit(*task, pure=False, resources=dict(resources or {}) or None)

        def wait(futures: list[Any]) -> Any:
            try:
                with client.as_current():
                    return distributed.wait(futures, return_when="FIRST_COMPLETED")
            except distributed.CancelledError as error:  # told to us only when it is gone
                raise SweepError(
                    "The Dask scheduler went away; start the same sweep again to go on."
                ) from error

        yield Engine(submit, wait, None, 0)  # Dask itself starts tasks of lost workers again
