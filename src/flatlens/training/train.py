"""Train a network in a run folder; a training that is killed and resumed has the same records.

The record of step k describes the network after k updates.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from flatlens.arguments import no_type_check, typed_arguments
from flatlens.errors import FlatlensError
from flatlens.runs import Run
from flatlens.runs.layout import CONFIG
from flatlens.training.config import Config
from flatlens.training.placement import check_device
from flatlens.training.progress import Show, training_line
from flatlens.training.schedule import MeasureSchedule
from flatlens.training.state import TrainingState
from flatlens.training.steps import batches
from flatlens.training.surroundings import interrupts, torch_settings

if TYPE_CHECKING:
    import pandas as pd


@no_type_check
@typed_arguments
def train(config: Config, folder: Path | str, *, progress: bool | None = None) -> pd.DataFrame:
    """Train a network in a run folder, or resume where the folder stopped.

    A finished run is read and not repeated. A finished run that has lost records is trained again,
    from its checkpoint where that is possible, with a warning.

    Args:
        config: what to train, how, and when to measure.
        folder: the run folder. It is created. It also stores the command line of this process,
            without what looks like a secret (see `flatlens.runs.provenance`).
        progress: whether to show a line on standard error. By default on a terminal only.

    Returns:
        The records as a table, one row per measurement.

    Raises:
        RunBusyError: if another process is writing to the folder.
        FlatlensError: if the config cannot be trained, or the folder has another config.

    Example:
        >>> import tempfile
        >>> config = Config(model_options={"widths": (64, 4, 10)}, steps=2, measure="end")
        >>> train(config, tempfile.mkdtemp() + "/run")["step"].tolist()
        [2]
    """
    import pandas as pd

    check_device(config.device)
    with torch_settings(config), interrupts() as interrupted:
        # a new run starts before it has a folder, so that a bad config leaves nothing behind
        state = None if (Path(folder) / CONFIG).exists() else TrainingState.start(config)
        with open_run(folder, config) as run:
            if run.damage is not None:
                warnings.warn(f"{run.damage}; the run is trained again.", stacklevel=2)
                run.repair()
            if run.done and not run.records:
                raise FlatlensError(
                    f"{run.folder} is done but has no records; delete it to train again."
                )
            if not run.done:
                state = state or TrainingState.start(config)
                start = state.restore(run)
                with training_line(config.steps, start, progress) as show:
                    run_steps(state, run, start, interrupted, show)
                run.finish()
            return pd.DataFrame(run.records)


def open_run(folder: Path | str, config: Config) -> Run:
    """Open the run folder of a config; fields that an older folder lacks have their defaults."""
    return Run.open(folder, config.identity, defaults=Config().identity)


def run_steps(
    state: TrainingState, run: Run, start: int | None, interrupted: threading.Event, show: Show
) -> None:
    """Make all steps from `start` on; None means that there is no checkpoint.

    A checkpoint is written after the record of the same step.
    """
    config = state.config
    due = MeasureSchedule(config.measure, config.steps)
    if start is None and 0 in due:
        _measure(state, run, 0)
    for step, loss in updates(state, start or 0):
        if step in due:
            _measure(state, run, step)
        stop = interrupted.is_set()
        if step % config.checkpoint_every == 0 or step == config.steps or stop:
            run.checkpoint(state.tensors(), {"step": step})
        if stop:
            raise KeyboardInterrupt
        show(step, loss, run.records)


def updates(state: TrainingState, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Train a network step by step: the one training loop.

    Args:
        state: the network and its samples, changed in place.
        start: number of steps that were made already.

    Yields:
        The number of updates so far, and the loss of the last batch before its update.
    """
    config = state.config
    order = batches(len(state.train.x), config.batch_size, config.seed, start, config.device)
    step_once = state.step_function()
    for step, index in zip(range(start + 1, config.steps + 1), order, strict=False):
        yield step, step_once(index, step)


def _measure(state: TrainingState, run: Run, step: int) -> None:
    """Append the record of a step after its snapshot, so that every record has weights."""
    if state.config.snapshots:
        run.snapshot(step, state.network.state_dict())
    run.append(state.record(step))
