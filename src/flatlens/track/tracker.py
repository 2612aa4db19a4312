"""Follow every quantity through a training that does not notice it."""

from __future__ import annotations

import contextlib
import inspect
import random
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from flatlens.capture.inputs import batches
from flatlens.errors import FlatlensError
from flatlens.measurement import Measurement, measure
from flatlens.metrics import METRICS
from flatlens.runs import Run
from flatlens.runs.record_file import Record
from flatlens.track.schedules import Schedule, every

if TYPE_CHECKING:
    import pandas as pd
    from torch.utils.hooks import RemovableHandle

PART = 4  # one of so many samples is measured where all take too long
RESERVED = ("run", "step")  # columns of a table of runs
FEWEST = 10  # samples that are enough for a standard error


@runtime_checkable
class Sink(Protocol):
    """Where records go beside the run: anything with these two methods (see ``track.sinks``)."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Measures a network when it is time, and writes what it found; training stays bit-identical.

    Weights, buffers, gradients, optimiser and the random numbers of torch, numpy and Python are
    after a measurement what they were before it. It works under ``no_grad`` and ``inference_mode``.

    Args:
        model: the network in training.
        x, y: what it is measured on, as for ``measure``; copied at once to the model's device. An
            iterable of batches is read once, here: every measurement sees the same samples.
        when: a schedule (see ``track.schedules``), or several: measured when any of them is due.
        quantities: as for ``measure``, and so are all other options.
        run: a Run or the path of one, where each record is a line; a path is closed by ``close``.
        sinks: where else each record goes (see ``track.sinks``).
        max_overhead: the share of the time since the last measurement that the next one may take,
            say 0.1; the first comes on top. One that would exceed it leaves out what needs passes
            of its own; if that is not enough it takes a quarter of the samples, always the
            same ones, drawn at random; if that is not enough it does not take place. Each is
            warned of once and listed in ``skipped`` (and in the run's ``skipped.jsonl``). Records
            then say of how many ``samples`` they are; where not of all, each mean over
            samples has its standard error ``..._se``, of what all would give. What is recorded
            thus depends on the speed of the machine, so there is no limit by default.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(3, 2)
        >>> tracker = Tracker(net, torch.ones(4, 3), when=every(10))
        >>> for step in range(30):
        ...     _ = tracker(step, train_loss=0.5)  # one step of training goes here
        >>> [(r["step"], r["train_loss"], r["sharpness"]) for r in tracker.records]
        [(0, 0.5, 8.0), (10, 0.5, 8.0), (20, 0.5, 8.0)]
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        y: Any = None,
        *,
        when: Schedule | Sequence[Schedule] = every(200),  # noqa: B008
        quantities: str | Sequence[str] = "default",
        run: Run | str | Path | None = None,
        sinks: Sequence[Sink] = (),
        max_overhead: float | None = None,
        **measure_options: Any,
    ) -> None:
        options = set(inspect.signature(measure).parameters) - {"model", "x", "y", "quantities"}
        if unknown := sorted(measure_options.keys() - options):
            raise FlatlensError(
                f"Tracker has no option {unknown[0]!r}; those of measure are "
                f"{', '.join(sorted(options))}"
            )
        if max_overhead is not None and not 0 < max_overhead <= 1:
            raise FlatlensError(f"max_overhead={max_overhead} is not a share; give 0.1 for 10 %")
        if max_overhead is not None and measure_options.get("distributed"):
            raise FlatlensError("max_overhead may choose otherwise in each process; leave it out")
        if not isinstance(sinks, Sequence) or not all(isinstance(sink, Sink) for sink in sinks):
            raise FlatlensError(f"sinks={sinks!r} is no list of sinks; give [CSV(path)]")
        whens = [when] if callable(when) or not isinstance(when, Sequence) else when
        if not all(callable(w) for w in whens):
            raise FlatlensError(
                f"when={when!r} is no schedule; give every(200) or several in a list"
            )
        self.model, self.sinks, self.max_overhead = model, list(sinks), max_overhead
        self.quantities, self.options = quantities, measure_options
        self.when = [_with_three(w) for w in whens]
        self._device = _device(model)
        with undisturbed():
            self.x, self.y = _kept(x, self._device), _kept(y, self._device)
        self._owns_run = isinstance(run, (str, Path))
        self.run = Run.open(run) if isinstance(run, (str, Path)) else run
        self.records: list[Record] = [] if self.run is None else self.run.records
        self.skipped: list[dict[str, Any]] = []  # what max_overhead or a refusal left out, and why
        self._levels = self._choices()
        self.steps = 0  # of the optimiser that it is attached to
        self._last: int | None = None  # step of the last record of this process
        self._ended = 0.0  # when the last measurement did
        self._spent: dict[int, float] = {}  # seconds of the last one of each level

    def __call__(self, step: int, /, **scalars: Any) -> Measurement | None:
        """The measurement at ``step`` if one is due; scalars are recorded with it, as floats.

        A tensor among the scalars is read only then: no step waits for the device in between.
        """
        for name in RESERVED:
            if name in scalars:
                raise FlatlensError(
                    f"the scalar {name!r} has the name of a column of read_runs; call it otherwise"
                )
        if not any(due(step, scalars, self.records) for due in self.when):
            return None
        if not self._is_new(step):
            return None
        with undisturbed():
            numbers = {name: _number(name, value) for name, value in scalars.items()}
            return self._measure(int(step), numbers)

    def _is_new(self, step: int) -> bool:
        if not self.records or step > self.records[-1]["step"]:
            return True
        if step == self._last:  # asked twice at one step, as by two hooks of a framework
            return False
        last = self.records[-1]["step"]
        if self._last is None and self.run is not None:
            raise FlatlensError(
                f"The run {self.run.folder} has records up to step {last} and this is step {step}; "
                "choose another folder, or load the tracker's state to go on from a checkpoint."
            )
        raise FlatlensError(
            f"step {step} comes after step {last}; count steps over the whole training"
        )

    def _measure(self, step: int, scalars: dict[str, float]) -> Measurement | None:
        k = self._affordable(step)
        if k is None:
            return None
        quantities, part, _ = self._levels[k]
        start = self._now()
        try:
            x, y = self._data()
            if part:
                x, y = _some(x, y)
            m = measure(self.model, x, y, quantities=quantities, **self.options)
        except FlatlensError as error:
            if not self.records:  # a first measurement that fails is wrong in itself
                raise
            # later on it is the training that diverged: not for the tracker to end it
            # (no step in the text: the same warning is shown once)
            warnings.warn(f"not measured, see tracker.skipped: {error}", stacklevel=4)
            self._skip(step, f"not measured: {error}")
            self._write(step, scalars)
            return None
        self._ended = self._now()
        self._spent[k] = self._ended - start
        values = m.to_dict()
        if self.max_overhead is not None:
            values["samples"] = float(m.probe.n)
        if part:
            values |= _errors(m, _count(self.x))
        if clash := sorted(scalars.keys() & values.keys()):
            raise FlatlensError(
                f"the scalar {clash[0]!r} has the name of a measured quantity; call it otherwise"
            )
        self._write(step, {**scalars, **values})
        return m

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        record: Record = {"step": step, **{name: float(v) for name, v in values.items()}}
        if self.run is None:
            self.records.append(record)
        else:
            self.run.append(record)
        self._last = step
        for sink in self.sinks:
            try:
                sink.write(record)
            except Exception as error:
                if len(self.records) == 1:  # it never worked
                    raise
                # a server that is away for a while must not end a training
                told = f"{type(sink).__name__} did not take a record: {error}"
                warnings.warn(told, stacklevel=5)

    def _choices(self) -> list[tuple[str | Sequence[str], bool, str]]:
        """What to measure, on a part of the samples or all, and what that gives up; dear to cheap.

        A sketch is none of them: for ten outputs it is dearer than the exact pass.
        """
        reduced = _one_pass(self.quantities)
        levels: list[tuple[str | Sequence[str], bool, str]] = [(self.quantities, False, "")]
        if reduced != self.quantities:
            levels.append((reduced, False, "fewer quantities"))
        if self.max_overhead is not None and _count(self.x) >= PART * FEWEST:
            levels.append((reduced, True, "fewer samples"))
        return levels

    def _affordable(self, step: int) -> int | None:
        """The first level that the time allows."""
        if self.max_overhead is None or not self._spent:
            return 0
        left = self.max_overhead * (self._now() - self._ended)
        for k, (_, _, lost) in enumerate(self._levels):
            if self._expected(k) <= left:
                if lost:
                    self._over(step, lost)
                return k
        self._over(step, "not measured")
        return None

    def _expected(self, k: int) -> float:
        """Seconds of a level: those it took, or as many times a part as there are parts.

        The first measurement warms up; what it took must not count for ever.
        """
        took = self._spent.get(k, 0.0)
        last = len(self._levels) - 1
        if self._levels[k][0] == self._levels[last][0] and last in self._spent:
            return min(took, PART * self._spent[last])
        return took

    def _over(self, step: int, lost: str) -> None:
        why = f"{lost}: over max_overhead"
        if all(entry["why"] != why for entry in self.skipped):
            warnings.warn(f"{why}={self.max_overhead:g}, see tracker.skipped", stacklevel=5)
        self._skip(step, why)

    def _skip(self, step: int, why: str) -> None:
        self.skipped.append({"step": step, "why": why})
        if self.run is not None:
            self.run.log("skipped", self.skipped[-1])

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # what was queued before is not ours
        return time.perf_counter()

    def _data(self) -> tuple[Any, Any]:
        """The probe data, moved along if the model has been (Lightning does so late)."""
        device = _device(self.model)
        if device != self._device:
            self.x, self.y = _kept(self.x, device), _kept(self.y, device)
            self._device = device
        return self.x, self.y

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Track from the optimiser's own steps, without a line in the loop; 0 is before the first.

        The handle's ``remove()`` ends it.
        """

        def after_step(*_: Any) -> None:
            self.steps += 1
            self(self.steps)

        if self.steps == 0:
            self(0)
        return optimizer.register_step_post_hook(after_step)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep so that tracking goes on from there."""
        return {"steps": self.steps, "records": [dict(record) for record in self.records]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; records that were made after it are dropped."""
        records = state["records"]
        if self.run is None:
            self.records[:] = [dict(record) for record in records]
        elif len(records) > len(self.records):
            raise FlatlensError(
                f"The checkpoint belongs to {len(records)} records, but {self.run.folder} has "
                f"{len(self.records)}; give the folder that the checkpoint was made with."
            )
        else:
            self.run.cut(len(records))
        self.steps = state["steps"]
        self._last = self.records[-1]["step"] if self.records else None

    def rewind(self, step: int) -> None:
        """Drop the records after ``step``, for a training that goes on from there."""
        kept = [record for record in self.records if record["step"] <= step]
        self.load_state_dict({"steps": step, "records": kept})

    def to_pandas(self) -> pd.DataFrame:
        """The records as a table, one row a step."""
        import pandas as pd

        return pd.DataFrame(self.records)

    def close(self) -> None:
        """Close the sinks, and the run if it was given as a path."""
        with contextlib.ExitStack() as stack:  # all are closed, whatever one of them says
            if self._owns_run and self.run is not None:
                stack.callback(self.run.close)
            for sink in self.sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Gradients on, inference mode off, and random numbers that go on as if nothing had been.

    The guard of ``measure`` does this for its own pass; sinks draw random names of runs, too.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _with_three(when: Schedule) -> Schedule:
    """The schedule as a function of step, scalars and records."""
    try:
        takes = len(inspect.signature(when).parameters)
    except (TypeError, ValueError):  # built-in functions do not say
        takes = 1
    return when if takes == 3 else lambda step, _scalars, _records: when(step)


def _one_pass(quantities: str | Sequence[str]) -> str | Sequence[str]:
    """Without what needs passes of its own."""
    if isinstance(quantities, str):
        return "default" if quantities == "all" else quantities
    return [name for name in quantities if name in METRICS] or quantities


def _count(x: Any) -> int:
    return sum(inputs.n for inputs, _ in batches(x))


def _some(x: Any, y: Any) -> tuple[Any, Any]:
    """One of PART samples of each batch, drawn at random but the same every time."""
    sizes = [inputs.n for inputs, _ in batches(x)]
    draw = np.random.default_rng(0)
    rows = [torch.from_numpy(draw.permutation(n)[: -(-n // PART)]) for n in sizes]
    if isinstance(x, list):
        chosen: Any = [_rows(batch, r) for batch, r in zip(x, rows, strict=True)]
    else:
        chosen = _rows(x, rows[0])
    starts = accumulate(sizes[:-1], initial=0)
    whole = torch.cat([r + start for r, start in zip(rows, starts, strict=True)])
    return chosen, None if y is None else _rows(torch.as_tensor(y), whole)


def _rows(data: Any, rows: Tensor) -> Any:
    """These rows of every tensor."""
    if isinstance(data, Tensor):
        return data[rows.to(data.device)]
    if isinstance(data, Mapping):
        return {key: _rows(value, rows) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        return type(data)(_rows(value, rows) for value in data)
    return data


def _errors(m: Measurement, n: int) -> dict[str, float]:
    """Standard errors of means over m's samples, as estimates of the means over all n."""
    record, scale = m.to_dict(), np.sqrt(1 / m.probe.n - 1 / n)
    with np.errstate(invalid="ignore"):  # a volume of 0 has no logarithm
        return {
            # a sketch has an error of its own
            f"{name}_se": float(np.hypot(scale * np.std(v, ddof=1), record.get(f"{name}_se", 0.0)))
            for name, v in m.samples.items()
            if name in record
        }


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _kept(data: Any, device: torch.device) -> Any:
    """A copy of every tensor on ``device``; an iterable of batches becomes a list."""
    if isinstance(data, Tensor):
        return data.detach().to(device, copy=True)
    if isinstance(data, np.ndarray):
        return torch.as_tensor(data.copy(), device=device)
    if isinstance(data, Mapping):
        return {key: _kept(value, device) for key, value in data.items()}
    if isinstance(data, tuple):
        return tuple(_kept(value, device) for value in data)
    if data is None or isinstance(data, (str, int, float)):
        return data
    return [_kept(batch, device) for batch in data]


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):  # torch's, of many elements
        raise FlatlensError(
            f"the scalar {name} is a {type(value).__name__}, not one number"
        ) from None
