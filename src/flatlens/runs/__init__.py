"""Run folders: what a training writes, and how to read it back."""

from flatlens.runs.done_file import is_finished
from flatlens.runs.lock import RunBusyError
from flatlens.runs.run import Run
from flatlens.runs.tables import read_runs

__all__ = ["Run", "RunBusyError", "is_finished", "read_runs"]
