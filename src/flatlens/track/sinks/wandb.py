"""Records in a Weights & Biases run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError
from flatlens.track.sinks.base import PREFIX, Selection, need


class WandB:
    """Log to the active Weights & Biases run, or to a new run if none is active.

    Values have an own x axis, the metric ``flatlens/step``. In a run of the user's, the sink never
    advances the step counter of W&B, because W&B drops every row whose ``step=`` is below it. A
    record joins the row that the user's own ``wandb.log`` writes next. Where several records come
    between two rows of the user's, the later ones wait for further rows, and at the latest for the
    end of the run. The sink never finishes a run that it did not start.

    Args:
        names: which values of a record, see ``Selection``.
        prefix: put in front of every name.
        live: write each record as a row at once, also in a run of the user's. Use it only where
            nothing else passes ``step=`` to ``wandb.log``.
        **init: arguments of ``wandb.init`` for a new run; ``mode="offline"`` needs no account.

    Raises:
        FlatlensError: if wandb is not installed, or an argument has the wrong type.

    Example:
        >>> wandb.init(project="flatness")  # doctest: +SKIP
        >>> tracker = fl.Tracker(net, x, sinks=[WandB()])  # doctest: +SKIP
    """

    @no_type_check
    def __init__(
        self,
        *,
        names: str | Sequence[str] = "headline",
        prefix: str = PREFIX,
        live: bool = False,
        **init: Any,
    ) -> None:
        self._wandb = need("wandb", "wandb")
        if not isinstance(live, bool):
            raise FlatlensError(f"live={live!r} is neither True nor False")
        self.select = Selection(names, prefix)
        self.init, self.live = init, live
        self.run: Any = None
        self.started_run = False
        self._waiting: deque[dict[str, Any]] = deque()  # records that have no row yet
        self._row: int | None = None  # the row that holds the last record

    def write(self, record: Mapping[str, Any]) -> None:
        """Log every selected value with ``flatlens/step``."""
        if self.run is None:
            self._connect()
        self._waiting.append({self._step_name: record["step"], **self.select(record)})
        if self.started_run or self.live:
            self._write_out()
        else:
            self._join_row()

    @property
    def _step_name(self) -> str:
        return f"{self.select.prefix}step"

    def _connect(self) -> None:
        """Take the active run, or start one; then define the x axis of our values."""
        self.run = self._wandb.run
        if self.run is None:
            self.run = self._wandb.init(**self.init)
            self.started_run = True
        self.run.define_metric(self._step_name)
        if self.select.prefix:
            self.run.define_metric(f"{self.select.prefix}*", step_metric=self._step_name)
        settings = self.run.settings
        has_no_counter = self.run.disabled or getattr(settings, "mode", None) == "shared"
        self.live = self.live or has_no_counter or not self._write_out_at_end()

    def _write_out_at_end(self) -> bool:
        """Have wandb call us before it ends the run; return whether it can."""
        from wandb.sdk import wandb_run

        hooks = getattr(self.run, "_teardown_hooks", None)
        hook = getattr(wandb_run, "TeardownHook", None)
        if not isinstance(hooks, list) or hook is None:
            return False
        hooks.append(hook(self._write_out, wandb_run.TeardownStage.EARLY))
        return True

    def _join_row(self) -> None:
        """Add the oldest waiting record to the user's open row, if that row has none yet."""
        row = self.run.step
        if row != self._row:
            self.run.log(self._waiting.popleft(), commit=False)
            self._row = row

    def _write_out(self) -> None:
        """Write every waiting record as a row of its own."""
        if self._row is not None and self._row == self.run.step:
            self.run.log({}, commit=True)  # the open row holds a record already
        self._row = None
        while self._waiting:
            self.run.log(self._waiting.popleft(), commit=True)

    def close(self) -> None:
        """Finish the run if this sink started it; a run of the user's stays open."""
        if self.started_run:
            self.run.finish()
