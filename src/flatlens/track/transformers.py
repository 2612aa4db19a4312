"""A Tracker as a callback of the Trainer of Transformers.

tracker = fl.Tracker(model, probe_inputs, when=fl.every(200), run="runs/a", output="logits")
Trainer(model, arguments, train_dataset=data, callbacks=[TrackerCallback(tracker)]).train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatlens.compat import make_torchvision_importable
from flatlens.errors import FlatlensError
from flatlens.track.tracker import Tracker

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


class TrackerCallback(TrainerCallback):
    """Calls the tracker with the Trainer's count of optimiser steps; 0 is before the first.

    The Trainer hands no batch to a callback: the tracker measures on data of its own. A training
    that goes on from a checkpoint drops what was recorded after it.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            if state.global_step:
                self.tracker.rewind(state.global_step)
            self.tracker(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.tracker(state.global_step)
