"""Watch it happen: a Tracker in a training loop, when it measures, and where its records go.

`tracker` follows a network, `schedules` says when, `runs` keeps the records in a folder that
survives anything, `sinks` hands them to TensorBoard, MLflow, Weights & Biases or a CSV file, and
`lightning` and `transformers` are the callbacks of these frameworks.
"""

from flatlens.runs import Run, RunBusyError, read_runs
from flatlens.track.schedules import at, every, log_spaced, on_interpolation
from flatlens.track.tracker import Sink, Tracker

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
