"""A Tracker as a callback of Lightning (``lightning`` or ``pytorch_lightning``).

tracker = fl.Tracker(module, x, y, when=fl.every(200), run="runs/a")
trainer = lightning.Trainer(callbacks=[TrackerCallback(tracker)])
trainer.fit(module, loader)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from flatlens.compat import make_torchvision_importable
from flatlens.errors import FlatlensError
from flatlens.track.tracker import Tracker

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
    """Calls the tracker with Lightning's count of optimiser steps; 0 is before the first.

    Args:
        tracker: measured when its own schedule says so. Its state is saved with Lightning's
            checkpoints: a training that goes on from one drops what was recorded after it.
        metrics: names of logged metrics that are recorded too, as far as they are there.
        on: "train" (after each batch, ``train_loss`` is recorded) or "validation" (at its end).
    """

    def __init__(
        self,
        tracker: Tracker,
        metrics: Sequence[str] = (),
        on: Literal["train", "validation"] = "train",
    ) -> None:
        self.tracker, self.metrics, self.on = tracker, list(metrics), on

    @property
    def state_key(self) -> str:
        """By which Lightning's checkpoints tell several trackers apart."""
        run = self.tracker.run
        where = None if run is None else str(run.folder)
        return f"{type(self).__qualname__}(on={self.on!r}, run={where!r})"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.on == "train":
            self._track(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.on == "train":
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._track(trainer, **({"train_loss": loss} if isinstance(loss, Tensor) else {}))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.on == "validation" and not trainer.sanity_checking:
            self._track(trainer)

    def _track(self, trainer: Any, **scalars: Any) -> None:
        if trainer.is_global_zero:
            logged = trainer.callback_metrics
            scalars |= {name: logged[name] for name in self.metrics if name in logged}
            self.tracker(trainer.global_step, **scalars)

    def state_dict(self) -> dict[str, Any]:
        return self.tracker.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tracker.load_state_dict(state_dict)
