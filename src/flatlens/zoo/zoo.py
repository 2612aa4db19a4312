"""Figure 3: normalised MLS and adaptive sharpness of vision models by name, one record each.

A model is a run folder named after it. A zoo that is started again skips finished models and adds
new ones. A model that cannot be measured (no weights, no memory) is skipped; the reason is in
`skipped.txt` of its folder, and the next start tries it again.
"""

from __future__ import annotations

import contextlib
import re
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatlens.errors import FlatlensError
from flatlens.files.replacing import replacing
from flatlens.runs import Run, RunBusyError, is_finished, read_runs
from flatlens.training.progress import sweep_bar
from flatlens.training.timm_models import reachable, select
from flatlens.workers.engine import Engine
from flatlens.workers.engines import open_engine
from flatlens.workers.local import LOSSES
from flatlens.workers.loop import run_tasks
from flatlens.workers.outcome import Outcome, marked, store_files, workplace
from flatlens.zoo.figure_files import remove_figures
from flatlens.zoo.measure_model import record_with_memory
from flatlens.zoo.settings import Zoo
from flatlens.zoo.table import converged, precise_models

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SKIPPED", "Zoo", "converged", "precise_models", "run_model", "zoo"]

SKIPPED = "skipped.txt"


def zoo(
    models: Sequence[str],
    settings: Zoo,
    *,
    out: Path | str,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Measure every model that matches, one run folder each below ``out``.

    Args:
        models: names of timm, with wildcards.
        settings: how to measure them.
        out: the folder for the records.
        engine: "local" uses processes of this machine, "dask" a Dask cluster.
        workers: number of worker processes. By default as many as cores and threads allow.
        address: address of a running Dask scheduler. By default a local cluster is started.
        progress: show a progress bar. By default only on a terminal.

    Returns:
        ``read_runs(out)``. ``attrs["skipped"]`` has the reason of each model that could not be
        measured, ``attrs["busy"]`` the models that another process is measuring.
    """
    settings.check(engine)
    names = select(models, settings.source)
    folder = Path(out).absolute()
    settings.check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    todo = [name for name in names if not is_finished(folder / name)]
    for name in set(names) - set(todo):
        with contextlib.suppress(RunBusyError):  # refuses a model that had other weights
            Run.open(folder / name, settings.identity(name)).close()
    settings = _absolute(settings)
    offline = settings.source == "pretrained" and not reachable()
    skipped: dict[str, str] = {}
    busy: list[str] = []
    with sweep_bar(len(names), len(names) - len(todo), progress) as show:
        if todo:
            with open_engine(
                engine, tasks=len(todo), threads=settings.threads, workers=workers, address=address
            ) as opened:
                for name, outcome in _outcomes(todo, settings, opened, folder, offline):
                    if outcome.status == "busy":
                        busy.append(name)
                    elif outcome.status != "done":
                        skipped[name] = outcome.reason
                    show(len(skipped), len(busy))
    frame = read_runs(folder) if any(folder.rglob("records.jsonl")) else _no_models()
    frame.attrs |= {"skipped": skipped, "busy": busy}
    remove_figures(folder)  # they show the records from before; the command draws them again
    return frame


def _absolute(settings: Zoo) -> Zoo:
    """Make the paths absolute: a worker may have another current folder."""
    settings = replace(settings, images=str(Path(settings.images).absolute()))
    if settings.source in ("pretrained", "random"):
        return settings
    return replace(settings, source=str(Path(settings.source).absolute()))


def _no_models() -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({"run": [], "model": []})


def _outcomes(
    todo: Sequence[str], settings: Zoo, engine: Engine, folder: Path, offline: bool
) -> Iterator[tuple[str, Outcome]]:
    """Measure the models on an engine and yield the name and outcome of each as it ends."""
    with marked(folder) as token:

        def call(name: str, lost: int) -> tuple[Any, ...]:
            chunk = 1 if lost > 1 else None  # a process that dies twice is short of memory
            return run_model, name, asdict(settings), str(folder), token, chunk, offline

        for name, outcome in run_tasks(todo, call, engine, losses=LOSSES - 1):
            yield name, _store(name, settings, outcome, folder)


def run_model(
    model: str, values: Mapping[str, Any], out: str, token: str, chunk: int | None, offline: bool
) -> Outcome:
    """Measure one model. This is the task that every engine runs.

    Args:
        model: name of the model.
        values: the settings as plain values.
        out: the zoo's folder on the driver's disk.
        token: name of a file in ``out``. If this machine does not see it, the record is made in a
            temporary folder and its files are sent back.
        chunk: images at a time; None lets the pass choose.
        offline: read weights from the hub's cache only.
    """
    settings = Zoo(**values)
    with workplace(out, token, model) as place:
        try:
            with Run.open(place.folder, settings.identity(model)) as run:
                if not run.done:
                    run.restore()  # cuts off what a killed process left
                    start = time.perf_counter()
                    run.append(record_with_memory(model, settings, chunk, offline))
                    run.log("timing", {"seconds": time.perf_counter() - start})
                    run.finish()
            (place.folder / SKIPPED).unlink(missing_ok=True)
        except RunBusyError:
            return Outcome("busy")
        except FlatlensError as error:
            return Outcome("refused", _without_advice(str(error)))
        except (Exception, SystemExit) as error:  # a model may raise anything
            reason = (str(error).splitlines() or [""])[0]
            message = f"{type(error).__name__}: {reason}"
            return Outcome("failed", f"{traceback.format_exc()}\n{message}")
        return place.finished()


def _without_advice(message: str) -> str:
    """Drop advice on options of `measure` that a zoo does not have, such as method="exact".

    >>> _without_advice('The network cannot be sketched; use method="exact".')
    'The network cannot be sketched.'
    """
    clauses = re.split(r"(?<=[.;])\s+", message)
    rest = [clause for clause in clauses if not re.search(r"\bmethod\s*=", clause)]
    return " ".join(rest).rstrip(";. ") + "." if rest else message


def _store(name: str, settings: Zoo, outcome: Outcome, folder: Path) -> Outcome:
    """Write what the driver has to write: the files that a worker sent, or why a model failed."""
    place = folder / name
    if outcome.status == "lost":
        reason = f"The process that measured {name} was killed (memory too short?)."
        outcome = replace(outcome, error=f"{outcome.error}\n{reason}")
    if outcome.error:
        with replacing(place / SKIPPED) as temporary:
            temporary.write_text(outcome.error)
    if outcome.files and not store_files(
        place, outcome.files, lambda: Run.open(place, settings.identity(name))
    ):
        return Outcome("busy")
    return outcome
