"""Run folders, for experiments. They live in `flatlens.track.runs`, because a Tracker writes them
and imports go one way (core <- track <- experiments)."""

from flatlens.track.runs import Run, RunBusyError, read_runs

__all__ = ["Run", "RunBusyError", "read_runs"]
