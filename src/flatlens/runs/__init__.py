"""Run folders: what a training writes, and how to read it back."""

from flatlens.runs.run import Run, RunBusyError, read_runs

__all__ = ["Run", "RunBusyError", "read_runs"]
