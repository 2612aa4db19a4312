"""Track a training: measure at chosen steps, and write records.

| module | what it holds |
|---|---|
| ``tracker`` | ``Tracker``: measures a network in a training loop |
| ``schedules`` | when to measure |
| ``samples``, ``quantities``, ``budget`` | what to measure, and how much time that may take |
| ``journal``, ``folders`` | records, and the run folder that is chosen at the first write |
| ``sinks`` | CSV, TensorBoard, MLflow, Weights & Biases |
| ``lightning``, ``transformers`` | callbacks of these frameworks |
"""

from flatlens.runs import Run, RunBusyError, read_runs
from flatlens.track.schedules import at, every, log_spaced, on_interpolation
from flatlens.track.sinks.base import Sink
from flatlens.track.tracker import Tracker

__all__ = [
    "Run",
    "RunBusyError",
    "Sink",
    "Tracker",
    "at",
    "every",
    "log_spaced",
    "on_interpolation",
    "read_runs",
]
