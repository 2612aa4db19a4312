"""Measure a network during its training; the training does not change."""

from __future__ import annotations

import contextlib
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError
from flatlens.measurement import Measurement
from flatlens.measurement.measuring import measure
from flatlens.measurement.quantities import read_request
from flatlens.runs import Run
from flatlens.track import checks
from flatlens.track.budget import Level, TimeBudget, levels, now
from flatlens.track.curves import plot_records
from flatlens.track.folders import Exist
from flatlens.track.journal import Journal, Record
from flatlens.track.quantities import edge_of_stability, errors_of_part
from flatlens.track.samples import ProbeSamples, device_of, part_of
from flatlens.track.schedules import Schedule, every
from flatlens.track.sinks.base import Sink
from flatlens.track.undisturbed import undisturbed

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from torch.utils.hooks import RemovableHandle

RESERVED = ("run", "step")  # columns of a table of runs


class Tracker:
    """Measure a network when a schedule says so, and write records; training stays bit-identical.

    After a measurement, weights, buffers, gradients, optimiser and the random numbers of torch,
    numpy and Python are what they were before it. A tracker works under ``no_grad`` and
    ``inference_mode``.

    Args:
        model: the network in training.
        x, y: samples and targets, as for ``measure``, or a torch ``Dataset``. They are read and
            copied once, here: every measurement sees the same samples.
        when: a schedule (see ``track.schedules``), or a list of schedules of which any may be due.
        quantities: names as for ``measure``, functions of a Probe that return one number or one
            number per sample, or a list of both.
        run: a run folder, where each record is a line; ``close`` closes it. Or an open ``Run``.
        exist: what to do if the folder has records at the first write. "number" takes the next
            free folder ``run-2``, ``run-3``, ... and says so; "resume" appends to the records;
            "overwrite" deletes the old run; "error" refuses. A loaded state always goes on in its
            own folder.
        config: settings of the training, stored in the run's ``config.json``. flatlens adds
            ``measured_loss``, the name of the loss that ``loss`` in the records is about, and
            ``measured_precision`` where the option ``precision="model"`` is given.
        n: number of samples to draw at random from x, with ``seed``. None takes all samples.
        sinks: where else each record goes (see ``track.sinks``).
        max_overhead: share of the time since the last measurement that the next one may take, such
            as 0.1; the first measurement comes on top. A measurement that would exceed it leaves
            out what needs passes of its own; if that is not enough it takes a quarter of the
            samples, always the same ones, drawn at random; if that is not enough it is skipped.
            Each case is warned of once and listed in ``skipped`` (and in the run's
            ``skipped.jsonl``). Records then have the number of ``samples``; where it is not all,
            each mean over samples has its standard error ``..._se`` as an estimate of the mean over
            all. What is recorded thus depends on the speed of the machine, so there is no limit by
            default.
        **measure_options: all other options of ``measure``.

    Raises:
        FlatlensError: if an argument has the wrong type or an option is unknown.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(3, 2)
        >>> tracker = Tracker(net, torch.ones(4, 3), when=every(10))
        >>> for step in range(30):
        ...     _ = tracker(step, train_loss=0.5)  # one step of training goes here
        >>> [(r["step"], r["train_loss"], r["sharpness"]) for r in tracker.records]
        [(0, 0.5, 8.0), (10, 0.5, 8.0), (20, 0.5, 8.0)]
    """

    @no_type_check
    def __init__(
        self,
        model: nn.Module,
        x: Any,
        y: Any = None,
        *,
        when: Schedule | Sequence[Schedule] = every(200),  # noqa: B008
        quantities: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = "default",
        run: Run | str | Path | None = None,
        exist: Exist = "number",
        config: Mapping[str, Any] | None = None,
        n: int | None = None,
        sinks: Sequence[Sink] = (),
        max_overhead: float | None = None,
        **measure_options: Any,
    ) -> None:
        checks.check_model(model)
        checks.check_options(measure_options, set(inspect.signature(measure).parameters))
        checks.check_overhead(max_overhead, bool(measure_options.get("distributed")))
        self.model, self.sinks = model, checks.sink_list(sinks)
        self.when = [_with_three(schedule) for schedule in checks.schedule_list(when)]
        self.options = measure_options
        loss, precision = measure_options.get("loss"), measure_options.get("precision")
        self.journal = Journal(checks.run_target(run, exist, config, loss, precision))
        seed = measure_options.get("seed", 0)
        with undisturbed():
            self.samples = ProbeSamples(x, y, device_of(model), n, seed)
        samples = None if max_overhead is None else self.samples.count()
        self.budget = TimeBudget(max_overhead, levels(read_request(quantities, edge=True), samples))
        self.steps = 0  # steps of the optimiser that it is attached to
        self.optimizer: torch.optim.Optimizer | None = None  # the one that it is attached to

    @property
    def run(self) -> Run | None:
        """The open run; None before the first write, or where records stay in memory."""
        return self.journal.run

    @property
    @no_type_check  # its checks would draw random numbers in the training
    def records(self) -> list[Record]:
        """All records, oldest first: flat dicts with the key ``step``."""
        return self.journal.records

    @property
    @no_type_check
    def skipped(self) -> list[Record]:
        """Steps that were not measured, or not in full, each with the reason."""
        return self.journal.skipped

    @no_type_check
    def __call__(self, step: int, /, **scalars: Any) -> Measurement | None:
        """Measure at ``step`` if a schedule is due.

        Args:
            step: number of training steps so far; it must grow over the whole training.
            **scalars: numbers to record with the measurement. A tensor is read only if a
                measurement is due, so no other step waits for the device.

        Returns:
            The measurement, or None if none was due or possible.

        Raises:
            FlatlensError: if the step is not a whole number or comes after a later one, if a scalar
                is not one number or has the name of a quantity, or if the first measurement fails.
        """
        step = _whole_step(step)
        for name in RESERVED:
            if name in scalars:
                raise FlatlensError(
                    f"the scalar {name!r} has the name of a column of read_runs; rename it"
                )
        if self.journal.resumes:
            self._open_journal()  # the schedules see the records of the folder
        if not any(due(step, scalars, self.records) for due in self.when):
            return None
        self._open_journal()
        if not self.journal.is_new(step):
            return None
        with undisturbed():
            numbers = {name: _number(name, value) for name, value in scalars.items()}
            return self._measure(step, numbers)

    def _open_journal(self) -> None:
        with undisturbed():
            self.journal.open()

    def _measure(self, step: int, scalars: dict[str, float]) -> Measurement | None:
        device = self.samples.device
        level_number = self.budget.choose(now(device))
        if level_number is None:
            self._note_over_budget(step, "not measured")
            return None
        level = self.budget.levels[level_number]
        if level.gives_up:
            self._note_over_budget(step, level.gives_up)
        start = now(device)
        try:
            m = self._measurement(level)
            self.budget.record(level_number, start, now(device))
            values = self._values(level, m, scalars)
        except FlatlensError as error:
            if not self.records:  # a first measurement that fails is wrong in itself
                raise
            # Later on the training has diverged, which is not for the tracker to end. The text has
            # no step in it, so that the same warning is shown once.
            warnings.warn(f"not measured, see tracker.skipped: {error}", stacklevel=4)
            self.journal.skip(step, f"not measured: {error}")
            self._write(step, scalars)
            return None
        if clash := sorted(scalars.keys() & values.keys()):
            raise FlatlensError(
                f"the scalar {clash[0]!r} has the name of a measured quantity; rename it"
            )
        self._write(step, {**scalars, **values})
        return m

    def _measurement(self, level: Level) -> Measurement:
        x, y = self.samples.on(device_of(self.model))  # Lightning moves the model late
        if level.is_part:
            x, y = part_of(x, y)
        return measure(self.model, x, y, quantities=level.request.listed, **self.options)

    def _values(
        self, level: Level, m: Measurement, scalars: Mapping[str, float]
    ) -> dict[str, float]:
        values = m.to_dict()
        if level.request.edge:
            values |= edge_of_stability(values, self._learning_rate(scalars))
        if self.budget.share is not None:
            values["samples"] = float(m.probe.n)
        if level.is_part:
            values |= errors_of_part(m, self.samples.count())
        return values

    def _learning_rate(self, scalars: Mapping[str, float]) -> float | None:
        """The learning rate of the step: ``lr`` if it was passed, else that of the optimiser."""
        if "lr" in scalars or self.optimizer is None:
            return scalars.get("lr")
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        record: Record = {"step": step, **{name: float(v) for name, v in values.items()}}
        self.journal.append(record)
        for sink in self.sinks:
            try:
                sink.write(record)
            except Exception as error:
                if len(self.records) == 1:  # it never worked
                    raise
                # A server that is away for a while must not end a training.
                message = f"{type(sink).__name__} did not take a record: {error}"
                warnings.warn(message, stacklevel=5)

    def _note_over_budget(self, step: int, gives_up: str) -> None:
        why = f"{gives_up}: over max_overhead"
        if all(entry["why"] != why for entry in self.skipped):
            warnings.warn(f"{why}={self.budget.share:g}, see tracker.skipped", stacklevel=5)
        self.journal.skip(step, why)

    @no_type_check
    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Track from the optimiser's own steps, without a line in the loop.

        Args:
            optimizer: the optimiser whose steps are counted; step 0 is before the first one. Its
                learning rate (the largest of its parameter groups) is that of
                ``edge_of_stability``.

        Returns:
            A handle; its ``remove()`` ends the tracking.

        Raises:
            FlatlensError: if ``optimizer`` is not a torch optimiser.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise FlatlensError(
                f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer"
            )

        def after_step(*_: Any) -> None:
            self.steps += 1
            self(self.steps)

        self.optimizer = optimizer
        if self.steps == 0:
            self(0)
        return optimizer.register_step_post_hook(after_step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold so that tracking goes on from there."""
        return {
            "steps": self.steps,
            "records": [dict(record) for record in self.records],
            "run": None if self.run is None else self.run.folder.name,
        }

    @no_type_check
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, in its own run folder; later records are dropped.

        Args:
            state: the result of ``state_dict``.

        Raises:
            FlatlensError: if the state is damaged or belongs to another folder.
        """
        checks.check_state(state)
        with undisturbed():
            self.journal.resume(state["records"], state.get("run"))
        self.steps = state["steps"]

    def rewind(self, step: int, run: str | None = None) -> None:
        """Drop the records after ``step``, for a training that goes on from there.

        Args:
            step: the last step whose record stays.
            run: name of the run folder to go on in. None takes the folder that has records.

        Raises:
            FlatlensError: if ``run`` is None and several numbered folders have records.
        """
        with undisturbed():
            self.journal.rewind(step, run)
        self.steps = step

    def to_pandas(self) -> pd.DataFrame:
        """Return the records as a table, one row per step."""
        import pandas as pd

        return pd.DataFrame(self.records)

    @no_type_check
    def plot(self, quantities: Sequence[str] | None = None, *, ax: Axes | None = None) -> Axes:
        """Plot quantities over steps, relative to their first values.

        Args:
            quantities: names to draw. None draws the headline quantities of the records.
            ax: axes of matplotlib to draw into. None makes a new figure.

        Returns:
            The axes.

        Raises:
            FlatlensError: if there are no records, or a name is not in any of them.

        Example:
            >>> tracker = Tracker(nn.Linear(3, 2), torch.ones(4, 3), when=every(1))
            >>> _ = tracker(0), tracker(1)
            >>> tracker.plot(["sharpness"]).get_xlabel()
            'steps'
        """
        return plot_records(self.records, quantities, ax)

    def close(self) -> None:
        """Close the sinks, and the run folder if it was given as a path."""
        with contextlib.ExitStack() as stack:  # all are closed, also if one of them fails
            stack.callback(self.journal.close)
            for sink in self.sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_three(schedule: Schedule) -> Schedule:
    """Return the schedule as a function of step, scalars and records."""
    try:
        arguments = len(inspect.signature(schedule).parameters)
    except (TypeError, ValueError):  # built-in functions do not say
        arguments = 1
    return schedule if arguments == 3 else lambda step, _scalars, _records: schedule(step)


def _whole_step(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise FlatlensError(f"step={step!r} is not a whole number") from None


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last, of many elements
        raise FlatlensError(
            f"the scalar {name} is a {type(value).__name__}, not one number"
        ) from None
