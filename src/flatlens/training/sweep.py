"""Train every config of a grid, in processes of one machine or on a Dask cluster.

Each run has a folder named after its config. A sweep that is started again skips finished runs and
continues the others. Several sweeps can share a folder, because each run has a lock.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatlens.arguments import no_type_check, typed_arguments
from flatlens.errors import FlatlensError
from flatlens.files.replacing import replacing
from flatlens.runs import RunBusyError, is_finished, read_runs
from flatlens.training.config import Config
from flatlens.training.grid import Grid, cells
from flatlens.training.own_quantities import own_names
from flatlens.training.progress import sweep_bar
from flatlens.training.train import open_run, train
from flatlens.training.trust import import_factory
from flatlens.workers.dask import SchedulerGoneError
from flatlens.workers.engine import Engine
from flatlens.workers.engines import open_engine
from flatlens.workers.loop import run_tasks
from flatlens.workers.outcome import Outcome, marked, store_files, workplace

if TYPE_CHECKING:
    import pandas as pd

ERROR = "error.txt"  # in the folder of a run that failed


class SweepError(FlatlensError):
    """Some runs of a sweep failed; the others are done."""


@no_type_check
@typed_arguments
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
    code: Path | str | None = None,
) -> pd.DataFrame:
    """Train every config of a grid below the folder ``out`` and return ``read_runs(out)``.

    Args:
        base: the settings that all runs share.
        grid: lists of values by field of the config, all combined with each other, as in
            ``{"lr": [0.05, 0.1], "seed": range(5)}``. A key such as ``model_options.activation``
            sets an option inside a field. Several grids in a list are done one after the other;
            equal configs run once.
        out: the folder for the runs.
        engine: "local" uses processes of this machine, "dask" a Dask cluster.
        workers: number of worker processes. By default as many as the machine has cores.
        address: address of a running Dask scheduler. By default a local cluster is started.
        retries: how often a run that failed is tried again, from where it stopped. A FlatlensError
            is never tried again.
        resources: what each run takes of a Dask worker, such as ``{"GPU": 1}``.
        progress: show a progress bar. By default only on a terminal.
        code: a folder in which workers look first for the modules of model factories and of own
            quantities.

    Returns:
        The records of all runs below ``out``. ``attrs["busy"]`` lists the runs of this sweep that
        another process is still writing; their records are incomplete.

    Raises:
        SweepError: if runs failed. All other runs are finished first, and the traceback of each
            failure is in the file error.txt of its run.
        FlatlensError: if an argument is wrong; nothing has been started then.
    """
    configs = {config.name: config for config in cells(base, grid)}
    folder = Path(out).absolute()
    todo = {name: c for name, c in configs.items() if not is_finished(folder / name)}
    failed: dict[str, str] = {}
    busy: list[str] = []
    with sweep_bar(len(configs), len(configs) - len(todo), progress) as show:
        if todo:
            threads = max(config.threads for config in todo.values())
            with open_engine(
                engine, tasks=len(todo), threads=threads, workers=workers, address=address,
                resources=resources,
            ) as opened:  # fmt: skip
                folder.mkdir(parents=True, exist_ok=True)
                for name, outcome in _outcomes(todo, opened, folder, retries, code):
                    if outcome.status == "busy":
                        busy.append(name)
                    elif outcome.status != "done":
                        failed[name] = outcome.reason
                    show(len(failed), len(busy))
    if failed:
        raise SweepError(_failures(failed, len(configs), folder))
    damaged: list[str] = []
    frame = read_runs(folder, damaged=damaged)
    if damaged:
        raise SweepError(" ".join(damaged))
    # another process may have finished in the meantime
    frame.attrs["busy"] = [name for name in busy if not is_finished(folder / name)]
    return frame


def _outcomes(
    todo: Mapping[str, Config],
    engine: Engine,
    folder: Path,
    retries: int,
    code: Path | str | None = None,
) -> Iterator[tuple[str, Outcome]]:
    """Train the configs on an engine and yield the name and outcome of each run as it ends."""
    with marked(folder) as token:

        def call(name: str, _: int) -> tuple[Any, ...]:
            return run_cell, todo[name].to_dict(), str(folder), token, code and str(code)

        try:
            for name, outcome in run_tasks(list(todo), call, engine, retries=retries):
                yield name, _store(todo[name], outcome, folder)
        except SchedulerGoneError as error:
            raise SweepError(str(error)) from error


def _failures(failed: Mapping[str, str], total: int, folder: Path) -> str:
    """Describe the runs that failed in one sentence."""
    reasons = [f"{name} ({reason})" for name, reason in failed.items()]
    more = f" and {len(reasons) - 3:,} more" if len(reasons) > 3 else ""
    return (
        f"{len(failed):,} of {total:,} runs failed: {', '.join(reasons[:3])}{more}; each traceback "
        f"is in the file {ERROR} of its run below {folder}. Start the same sweep again to retry "
        "them."
    )


def run_cell(settings: Mapping[str, Any], out: str, token: str, code: str | None = None) -> Outcome:
    """Train one config. Every engine runs this task.

    Args:
        settings: the config as plain values.
        out: the sweep's folder on the driver's disk.
        token: name of a file in ``out``. If this machine does not see it, the run is made in a
            temporary folder and its files are sent back.
        code: a folder in which to look first for the modules of model factories and own quantities.
    """
    config = Config.from_dict(settings)
    with workplace(out, token, config.name) as place:
        try:
            if code is not None:
                for name in (config.model, *own_names(config.quantities)):
                    import_factory(name, code)
            train(config, place.folder, progress=False)
            (place.folder / ERROR).unlink(missing_ok=True)
        except RunBusyError:
            return Outcome("busy")
        except FlatlensError:
            return Outcome("refused", traceback.format_exc())
        except (Exception, SystemExit):  # a user's network may raise anything, or even exit
            return Outcome("failed", traceback.format_exc())
        return place.finished()


def _store(config: Config, outcome: Outcome, folder: Path) -> Outcome:
    """Write the files that a worker sent, or its traceback, to the driver's disk."""
    place = folder / config.name
    if outcome.error:
        with replacing(place / ERROR) as temporary:
            temporary.write_text(outcome.error)
    if outcome.files:
        if not store_files(place, outcome.files, lambda: open_run(place, config)):
            return Outcome("busy")
        (place / ERROR).unlink(missing_ok=True)
    return outcome
