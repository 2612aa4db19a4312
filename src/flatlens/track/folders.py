"""Choose the folder of a tracker if the requested folder exists already."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from flatlens.errors import FlatlensError
from flatlens.runs import Run, RunBusyError

Exist = Literal["number", "resume", "overwrite", "error"]
EXIST = get_args(Exist)
RECORDS = "records.jsonl"
# Files of a run, by the names that flatlens writes; nothing else is ever deleted.
RUN_FILES = (
    *(RECORDS, "config.json", "checkpoint.safetensors", "done"),
    *("skipped.jsonl", "timing.jsonl"),
)

log = logging.getLogger("flatlens")


@dataclass(frozen=True)
class RunTarget:
    """The requested run folder, and what to do if it has records.

    Numbered folders have the same parent as the requested folder: ``runs/a``, ``runs/a-2``, ...
    """

    path: Path
    exist: Exist = "number"
    config: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)  # facts that flatlens adds

    def start(self) -> Run:
        """Open the folder for a new training.

        Returns:
            An open run: without records, unless ``exist`` is "resume".

        Raises:
            FlatlensError: if the folder has records and ``exist`` is "error", or if another
                process writes to it and ``exist`` is not "number".
        """
        if self.exist == "number":
            return self._start_numbered()
        if self.exist == "error" and has_records(self.path):
            raise FlatlensError(
                f"run={str(self.path)!r} has records already; choose another folder, or "
                'exist="number", "resume" or "overwrite"'
            )
        if self.exist == "overwrite" and self.path.exists():
            _delete_run(self.path)
        return self._open(self.path)

    def _start_numbered(self) -> Run:
        """Open the first folder of the family that no other run uses."""
        number = 1
        while True:
            path = self.path if number == 1 else self.path.with_name(f"{self.path.name}-{number}")
            number += 1
            if has_records(path):
                continue
            try:
                run = self._open(path)
            except RunBusyError:
                continue
            if run.records or run.done:  # another process was faster
                run.close()
                continue
            if path != self.path:
                log.warning("%s has records already; this run goes to %s", self.path, path)
            return run

    def again(self, name: str | None) -> Path:
        """Return the folder that a checkpoint belongs to.

        Args:
            name: name of the folder when the checkpoint was saved, or None if unknown.

        Returns:
            A folder of the same family as the folder that was asked for.

        Raises:
            FlatlensError: if the name belongs to another family, or if it is unknown and several
                folders of the family have records.
        """
        if name is not None:
            if not self._is_family(name):
                raise FlatlensError(
                    f"The checkpoint belongs to the run {name!r}, but run={str(self.path)!r}; give "
                    "the folder that the checkpoint was made with"
                )
            return self.path.with_name(name)
        folders = sorted(self.path.parent.glob(f"{_escaped(self.path.name)}*"))
        used = [path for path in folders if self._is_family(path.name) and has_records(path)]
        if len(used) > 1:
            names = ", ".join(path.name for path in used)
            raise FlatlensError(
                f"The checkpoint does not say to which of {names} it belongs; give that folder as "
                'run= with exist="resume"'
            )
        return used[0] if used else self.path

    def resume(self, path: Path) -> Run:
        """Open a folder of the family as it is."""
        return self._open(path)

    def _is_family(self, name: str) -> bool:
        own = self.path.name
        return name == own or bool(re.fullmatch(rf"{re.escape(own)}-[1-9]\d*", name))

    def _open(self, path: Path) -> Run:
        """Open a folder; an earlier run without a user config is accepted."""
        if self.config is None and has_records(path):
            return Run.open(path)
        # The config of an older folder lacks the loss. One without a precision has the default.
        defaults = {key: v for key, v in self.measured.items() if key == "measured_loss"}
        return Run.open(path, {**(self.config or {}), **self.measured}, defaults=defaults)


def has_records(folder: Path) -> bool:
    """Return whether a folder holds a run that was begun.

    >>> import tempfile
    >>> has_records(Path(tempfile.mkdtemp()))
    False
    """
    records = folder / RECORDS
    begun = any((folder / name).exists() for name in ("done", "checkpoint.safetensors"))
    return begun or (records.is_file() and records.stat().st_size > 0)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _delete_run(folder: Path) -> None:
    """Delete the files of a run, unless another process writes to it."""
    try:
        Run.open(folder).close()
    except RunBusyError:
        raise
    except FlatlensError:  # a damaged run is replaced, too
        pass
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    for path in (folder / "snapshots").glob("*.safetensors"):
        if path.stem.isdigit():
            path.unlink()
