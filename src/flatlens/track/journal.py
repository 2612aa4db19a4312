"""The records of a tracker, in memory or in a run folder that is chosen at the first write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError, counted
from flatlens.runs import Run
from flatlens.track.folders import RunTarget, has_records

Record = dict[str, Any]


class Journal:
    """Keep records and skipped steps.

    Args:
        target: an open run, a folder to open at the first write, or None for memory alone.

    Example:
        >>> journal = Journal(None)
        >>> journal.append({"step": 0, "nmls": 1.0})
        >>> journal.records, journal.last_step
        ([{'step': 0, 'nmls': 1.0}], 0)
    """

    def __init__(self, target: Run | RunTarget | None) -> None:
        self.target = target
        self.run = target if isinstance(target, Run) else None
        self.skipped: list[Record] = []
        self.last_step: int | None = None  # step of the last record of this process
        self._memory: list[Record] = []  # records where there is no run folder

    @property
    @no_type_check  # the type checker would draw random numbers in the training
    def records(self) -> list[Record]:
        """All records, oldest first."""
        return self._memory if self.run is None else self.run.records

    @property
    def folder_asked_for(self) -> Path | None:
        """The folder that the user gave; the records may go to a numbered one beside it."""
        if isinstance(self.target, RunTarget):
            return self.target.path
        return None if self.target is None else self.target.folder

    @property
    def resumes(self) -> bool:
        """Whether the folder that was asked for is opened with its records."""
        return isinstance(self.target, RunTarget) and self.target.exist == "resume"

    def open(self) -> None:
        """Choose and open the run folder, unless that is done."""
        if self.run is None and isinstance(self.target, RunTarget):
            self.run = self.target.start()
            for entry in self.skipped:
                self.run.log("skipped", entry)

    def is_new(self, step: int) -> bool:
        """Return whether ``step`` has no record yet.

        Raises:
            FlatlensError: if later steps have records.
        """
        if not self.records or step > self.records[-1]["step"]:
            return True
        if step == self.last_step:  # called twice at one step, as by two hooks of a framework
            return False
        last = self.records[-1]["step"]
        if self.last_step is None and self.run is not None:
            raise FlatlensError(
                f"The run {self.run.folder} has records up to step {last} and this is step {step}; "
                "choose another folder, or load the tracker's state to go on from a checkpoint."
            )
        raise FlatlensError(
            f"step {step} comes after step {last}; count steps over the whole training"
        )

    def append(self, record: Record) -> None:
        """Add a record."""
        self.open()
        if self.run is None:
            self._memory.append(record)
        else:
            self.run.append(record)
        self.last_step = record["step"]

    def skip(self, step: int, why: str) -> None:
        """Record a step that was not measured, or not in full."""
        entry = {"step": step, "why": why}
        self.skipped.append(entry)
        if self.run is not None:
            self.run.log("skipped", entry)

    def resume(self, records: Sequence[Mapping[str, Any]], name: str | None) -> None:
        """Return to the records of a checkpoint; later records are dropped.

        Args:
            records: the records at the time of the checkpoint.
            name: name of the run folder at that time, or None if there was none.

        Raises:
            FlatlensError: if the run folder has fewer records than the checkpoint.
        """
        if self.run is None and isinstance(self.target, RunTarget):
            self._reopen(self.target, len(records), name)
        elif self.run is None:
            self._memory[:] = [dict(record) for record in records]
        else:
            self._require(len(records), len(self.records), str(self.run.folder))
            self.run.cut(len(records))
        self.last_step = self.records[-1]["step"] if self.records else None

    def rewind(self, step: int, name: str | None = None) -> None:
        """Drop the records after ``step``, for a training that goes on from there."""
        if self.run is None and isinstance(self.target, RunTarget):
            self._reopen(self.target, 0, name, cut=False)
        self.resume([record for record in self.records if record["step"] <= step], name)

    def _reopen(self, target: RunTarget, count: int, name: str | None, cut: bool = True) -> None:
        path = target.again(name)
        if not has_records(path):
            self._require(count, 0, str(path))
            return  # nothing to go back to: the folder is chosen at the first write
        run = target.resume(path)
        try:
            self._require(count, len(run.records), str(path))
            if cut:
                run.cut(count)
        except BaseException:
            run.close()
            raise
        self.run = run

    def _require(self, count: int, available: int, folder: str) -> None:
        if count > available:
            raise FlatlensError(
                f"The checkpoint belongs to {counted(count, 'record')}, but {folder} has "
                f"{available}; give the folder that the checkpoint was made with."
            )

    def close(self) -> None:
        """Close the run folder if this journal opened it."""
        if self.run is not None and self.run is not self.target:
            self.run.close()
