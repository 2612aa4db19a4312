"""A Tracker as a callback of Lightning (``lightning`` or ``pytorch_lightning``).

tracker = fl.Tracker(module, x, y, when=fl.every(200), run="runs/a")
trainer = lightning.Trainer(callbacks=[TrackerCallback(tracker)])
trainer.fit(module, loader)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flatlens.arguments import no_type_check
from flatlens.compat import make_torchvision_importable
from flatlens.errors import FlatlensError
from flatlens.track.sinks.base import Selection
from flatlens.track.tracker import Tracker
from flatlens.track.undisturbed import undisturbed

if TYPE_CHECKING:
    from typing import Any as Callback
else:
    make_torchvision_importable()
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise FlatlensError(
                "Lightning is not installed; it comes with pip install 'flatlens[lightning]'"
            ) from error


class TrackerCallback(Callback):
    """Call a tracker with Lightning's count of optimiser steps; 0 is before the first step.

    The headline values of each record also go to the trainer's loggers and to
    ``trainer.callback_metrics``, so that ``ModelCheckpoint(monitor="flatlens/nmls")`` works. The
    tracker's state is saved with Lightning's checkpoints: a training that goes on from one drops
    what was recorded after it.

    Args:
        tracker: it measures when its own schedule says so.
        metrics: names of logged metrics to record too, where they are available.
        on: "train" calls the tracker after each batch, with ``train_loss``; "validation" at the
            end of each validation.
        log: which values the trainer's loggers get: "headline", "all", a list of names, or None
            for no values.

    Raises:
        FlatlensError: if an argument has the wrong type.
    """

    @no_type_check
    def __init__(
        self,
        tracker: Tracker,
        metrics: Sequence[str] = (),
        on: Literal["train", "validation"] = "train",
        log: str | Sequence[str] | None = "headline",
    ) -> None:
        if not isinstance(tracker, Tracker):
            raise FlatlensError(f"tracker is a {type(tracker).__name__}, not a Tracker")
        if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics):
            raise FlatlensError(f"metrics={metrics!r} is not a list of names")
        if on not in ("train", "validation"):
            raise FlatlensError(f'on={on!r} is unknown; use "train" or "validation"')
        self.tracker, self.metrics, self.on = tracker, list(metrics), on
        self.select = None if log is None else Selection(log)
        self.restores = True

    @property
    def state_key(self) -> str:
        """The name by which Lightning's checkpoints tell several trackers apart."""
        folder = self.tracker.journal.folder_asked_for
        where = None if folder is None else str(folder)
        return f"{type(self).__qualname__}(on={self.on!r}, run={where!r})"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Note whether a checkpoint is loaded to go on training, in the process that writes.

        ``trainer.test(ckpt_path="best")`` also loads states: it must not drop later records.
        """
        self.restores = trainer.is_global_zero and stage == "fit"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Call the tracker before the first step."""
        if self.on == "train":
            self._track(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Call the tracker with the loss of the batch."""
        if self.on == "train":
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._track(trainer, **({"train_loss": loss} if isinstance(loss, Tensor) else {}))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Call the tracker, except in the sanity check before training."""
        if self.on == "validation" and not trainer.sanity_checking:
            self._track(trainer)

    def _track(self, trainer: Any, **scalars: Any) -> None:
        if not trainer.is_global_zero:
            return
        logged = trainer.callback_metrics
        scalars |= {name: logged[name] for name in self.metrics if name in logged}
        if self.tracker(trainer.global_step, **scalars) is None or self.select is None:
            return
        record = self.tracker.records[-1]
        values = self.select(record)
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in values.items()})
        with undisturbed():
            for logger in trainer.loggers:
                logger.log_metrics(values, step=record["step"])

    def state_dict(self) -> dict[str, Any]:
        """Return the tracker's state for Lightning's checkpoint."""
        return self.tracker.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from Lightning's checkpoint."""
        if self.restores:
            self.tracker.load_state_dict(state_dict)
