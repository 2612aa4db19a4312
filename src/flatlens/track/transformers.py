"""A Tracker as a callback of the Trainer of Transformers.

tracker = fl.Tracker(model, probe_inputs, when=fl.every(200), run="runs/a", output="logits")
Trainer(model, arguments, train_dataset=data, callbacks=[TrackerCallback(tracker)]).train()
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flatlens.arguments import no_type_check
from flatlens.compat import make_torchvision_importable
from flatlens.errors import FlatlensError
from flatlens.files.reading import read_json
from flatlens.files.schema import Field, checked
from flatlens.track.sinks.base import Selection
from flatlens.track.tracker import Tracker
from flatlens.track.undisturbed import undisturbed

if TYPE_CHECKING:
    from typing import Any as TrainerCallback
else:
    make_torchvision_importable()
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise FlatlensError(
            "Transformers is not installed; it comes with pip install 'flatlens[transformers]'"
        ) from error

# A file in each checkpoint: the run folder that was asked for -> the name of the one in use.
STATE = "flatlens_tracker.json"


class TrackerCallback(TrainerCallback):
    """Call a tracker with the Trainer's count of optimiser steps; 0 is before the first step.

    Records have ``train_loss``, the loss of the last optimiser step (all batches of a gradient
    accumulation together). The headline values of each record also go through ``trainer.log``, so
    that they are in ``state.log_history`` and in every integration of ``report_to``. The Trainer
    hands no batch to a callback: the tracker measures on samples of its own. A training that goes
    on from a checkpoint drops what was recorded after it.

    Args:
        tracker: it measures when its own schedule says so.
        log: which values ``trainer.log`` gets: "headline", "all", a list of names, or None for no
            values.

    Raises:
        FlatlensError: if an argument has the wrong type.
    """

    @no_type_check
    def __init__(self, tracker: Tracker, log: str | Sequence[str] | None = "headline") -> None:
        if not isinstance(tracker, Tracker):
            raise FlatlensError(f"tracker is a {type(tracker).__name__}, not a Tracker")
        self.tracker = tracker
        self.select = None if log is None else Selection(log)
        self.trainer: Any = None
        self.losses = StepLoss()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go back to the checkpoint's records, if there is one, and call the tracker."""
        self.trainer = calling_trainer(self)
        if self.trainer is not None:
            self.losses.watch(self.trainer)
        if state.is_world_process_zero:
            if state.global_step:
                runs = _runs_of_checkpoint(_checkpoint(args, state))
                self.tracker.rewind(state.global_step, runs.get(self._folder_asked_for))
            self._track(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Call the tracker with the loss of the step."""
        loss = self.losses.take()
        if state.is_world_process_zero:
            self._track(state, control, **({} if loss is None else {"train_loss": loss}))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the name of the run folder into the checkpoint."""
        folder = _checkpoint(args, state)
        run = self.tracker.run
        if state.is_world_process_zero and run is not None and folder.is_dir():
            runs = {**_runs_of_checkpoint(folder), self._folder_asked_for: run.folder.name}
            (folder / STATE).write_text(json.dumps(runs) + "\n")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the trainer as it was."""
        self.losses.release()

    @property
    def _folder_asked_for(self) -> str:
        return str(self.tracker.journal.folder_asked_for)

    def _track(self, state: Any, control: Any, **scalars: Any) -> None:
        m = self.tracker(state.global_step, **scalars)
        if m is None or self.select is None or self.trainer is None:
            return
        should_log = control.should_log  # trainer.log resets it; the Trainer's own log comes later
        with undisturbed():
            self.trainer.log(self.select(self.tracker.records[-1]))
        control.should_log = should_log


class StepLoss:
    """Add up the losses that ``trainer.training_step`` returns during one optimiser step."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.trainer: Any = None
        self.wrapper: Callable[..., Any] | None = None
        self.replaced: Any = None  # what the trainer's own attributes held before

    def watch(self, trainer: Any) -> None:
        """Wrap the trainer's method ``training_step`` until ``release``."""
        original = trainer.training_step

        def training_step(*arguments: Any, **options: Any) -> Any:
            loss = original(*arguments, **options)
            if isinstance(loss, Tensor):
                value = loss.detach()
                self.total = value if self.total is None else self.total + value
            return loss

        self.trainer, self.wrapper, self.total = trainer, training_step, None
        self.replaced = vars(trainer).get("training_step")
        trainer.training_step = training_step

    def take(self) -> Tensor | None:
        """Return the loss since the last call, or None."""
        total, self.total = self.total, None
        return total

    def release(self) -> None:
        """Put the trainer's own method back, unless somebody else has replaced it since."""
        if self.trainer is not None and vars(self.trainer).get("training_step") is self.wrapper:
            del self.trainer.training_step
            if self.replaced is not None:
                self.trainer.training_step = self.replaced
        self.trainer = self.wrapper = self.replaced = None


def calling_trainer(callback: Any) -> Any:
    """Find the Trainer that is calling ``callback``, or return None.

    Transformers hands a callback everything but the trainer, which alone has ``log``. The trainer
    is ``self`` of a function that is running: the one that called the callback's event.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if callback in getattr(handler, "callbacks", ()) and hasattr(owner, "log"):
            return owner
        frame = frame.f_back
    return None


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _runs_of_checkpoint(checkpoint: Path) -> dict[str, str]:
    """Return the names of the run folders that a checkpoint was made with, as far as it says."""
    try:
        return checked(read_json(checkpoint / STATE), {}, STATE, others=Field((str,)))
    except FlatlensError:
        return {}
