"""``Run``: a folder that can be reopened after its writer was killed at any moment.

The files of the folder are listed in :mod:`flatlens.runs.layout`. All of them open in pandas,
DuckDB or a text editor. Numbers are written so that they read back bit for bit. JSON has no
infinities, so these are the strings "inf", "-inf" and "nan". Every quantity of all runs below a
folder, in DuckDB:

    SELECT * FROM read_json_auto('runs/**/records.jsonl', filename=true, union_by_name=true)

(A column with an infinity in it is text there: `CAST(log_volume AS DOUBLE)` makes it a number.)
Records hold no times, so that two runs compare byte for byte. Times go to `timing.jsonl`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from torch import Tensor

from flatlens.arguments import no_type_check, typed_arguments
from flatlens.errors import FlatlensError, counted
from flatlens.files.plain_json import as_json
from flatlens.files.replacing import is_temporary
from flatlens.runs import checkpoints, done_file
from flatlens.runs.layout import CHECKPOINT, CONFIG, DONE, LOCK, RECORDS, SNAPSHOTS
from flatlens.runs.lock import BusyError, RunBusyError, acquire
from flatlens.runs.record_file import Record, RecordFile, decode, encode
from flatlens.runs.run_config import first_difference, read_config, write_config

ABANDONED = 3600  # seconds after which a temporary file of another writer counts as left behind

# temporary names of flatlens 0.1.0
OLD_TEMPORARY = re.compile(
    r"\.(config\.json|checkpoint\.safetensors|done|\d{8,}\.safetensors)\.new"
)


class Run:
    """One run folder, open for writing; ``with Run.open(...) as run`` closes it.

    Attributes:
        folder: the folder.
        config: the config of the run.
        records: the records, in order.
        damage: how the records of a finished run have changed, or None. Call `repair` to make the
            run unfinished again.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.config: dict[str, Any] = {}
        self.damage: str | None = None
        self._lock: FileLock | None = None
        self._lines: RecordFile | None = None
        try:
            with _named("open the run", self.folder):
                self._open(None if config is None else dict(config), dict(defaults or {}))
        except BaseException:
            self.close()
            raise
        self.records: list[Record] = self._open_lines.records

    @classmethod
    @no_type_check
    @typed_arguments
    def open(
        cls,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
    ) -> Run:
        """Create the folder of a run, or reopen it.

        A last line of the records that was cut short when the writer died is dropped. Files that a
        killed writer of flatlens left unfinished are removed; other files are left alone.

        Args:
            folder: the folder.
            config: the config of the run. A folder with another config is refused, unless it has
                neither records nor a checkpoint. None accepts the config that the folder has.
            defaults: values of keys that the config in an older folder lacks.

        Raises:
            RunBusyError: if the run is open elsewhere.
            FlatlensError: if the folder cannot be written, has another config, or is damaged.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp() + "/runs/a"
            >>> with Run.open(folder, {"lr": 0.1}) as run:
            ...     run.append({"step": 0, "sharpness": 2.5, "log_volume": float("-inf")})
            >>> with Run.open(folder) as run:
            ...     run.config, run.records
            ({'lr': 0.1}, [{'step': 0, 'sharpness': 2.5, 'log_volume': -inf}])
        """
        return cls(folder, config, defaults=defaults)

    def _open(self, config: dict[str, Any] | None, defaults: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = acquire(self.folder / LOCK)
        except BusyError:
            raise RunBusyError(
                f"The run {self.folder} is open elsewhere, in this process or another; wait for "
                "it, close it, or choose another folder."
            ) from None
        self._configure(config, defaults)
        _remove_unfinished(self.folder)
        _remove_unfinished(self.folder / SNAPSHOTS)
        self._lines = RecordFile(self.folder / RECORDS)
        self._compare_with_done(self._lines)

    def _configure(self, config: dict[str, Any] | None, defaults: dict[str, Any]) -> None:
        """Read the config, or write it if the run is new."""
        path = self.folder / CONFIG
        wanted = None if config is None else as_json(config, f"The config of {self.folder}")
        if path.exists() or path.is_symlink():
            self.config = defaults | read_config(path)
            difference = None if wanted is None else first_difference(self.config, wanted)
            if difference is None:
                return
            if not self._is_empty():
                key, old, new = difference
                raise FlatlensError(
                    f"The run {self.folder} was made with {key}={old}, not {new}; choose another "
                    "folder, or the config it has."
                )
        elif (self.folder / RECORDS).exists():
            raise FlatlensError(
                f"{self.folder} has records but no {CONFIG}; restore it, or choose another folder."
            )
        self.config = wanted or {}
        write_config(path, self.config)

    def _is_empty(self) -> bool:
        records = self.folder / RECORDS
        begun = (self.folder / CHECKPOINT).exists() or self.done
        return not begun and not (records.exists() and records.stat().st_size)

    def _compare_with_done(self, lines: RecordFile) -> None:
        """Set `damage`, or drop what follows the last whole record."""
        try:
            promise = done_file.read(self.folder)
        except FlatlensError as error:
            self.damage = str(error).rstrip(".")
            return
        count = len(lines.records)
        if promise is None or promise.count is None:
            if lines.damage is not None:
                raise lines.damage
        else:
            # text after the last record of a finished run is not a record
            count = min(count, promise.count)
            fault = promise.fault(count, lines.checksum(count))
            if fault is not None:
                self.damage = f"{lines.path} is damaged: {fault}"
                return
        lines.cut(count)

    def repair(self) -> None:
        """Make a damaged finished run unfinished, so that it can be trained again.

        Training resumes from the checkpoint if the records up to it are still there, else it
        starts again. A run without damage is left as it is.
        """
        lines = self._open_lines
        if self.damage is None:
            return
        with _named("write", self.folder):
            if not self._fits(lines):
                (self.folder / CHECKPOINT).unlink(missing_ok=True)
            (self.folder / DONE).unlink(missing_ok=True)
            lines.cut(len(lines.records))
        self.damage = None

    def _fits(self, lines: RecordFile) -> bool:
        """Whether the records up to the checkpoint have not changed since it was written."""
        try:
            saved = checkpoints.read(self.folder / CHECKPOINT)
        except FlatlensError:
            return False
        known = saved.checksum is not None and saved.records <= len(lines.records)
        return known and lines.checksum(saved.records) == saved.checksum

    @no_type_check
    @typed_arguments
    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record and wait until the disk has it; it is there whole or not at all.

        Raises:
            FlatlensError: if the run is finished or closed, if JSON cannot hold the record, or if
                the disk refuses it.
        """
        lines = self._open_lines
        if self.done:
            raise FlatlensError(f"The run {self.folder} is finished; it takes no more records.")
        line = encode(record, f"The record of {self.folder}")
        with _named("write", lines.path):
            lines.append(line, decode(line, f"The record of {self.folder}"))

    @no_type_check
    @typed_arguments
    def cut(self, count: int) -> None:
        """Keep the first ``count`` records; those after them are to be computed again."""
        lines = self._open_lines
        with _named("write", lines.path):
            lines.cut(count)

    @no_type_check
    @typed_arguments
    def log(self, name: str, entry: Mapping[str, Any]) -> None:
        """Add a line to a file beside the records: ``timing.jsonl`` for the name "timing".

        Use it for values that differ from one execution to the next. The line is not written
        through to the disk.
        """
        self._check_open()
        path = self.folder / f"{name}.jsonl"
        with _named("write", path), path.open("ab") as file:
            file.write(encode(entry, f"The entry of {path}"))

    @no_type_check
    @typed_arguments
    def checkpoint(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Replace the checkpoint atomically.

        Args:
            tensors: tensors by name.
            meta: anything that JSON can hold.
        """
        lines = self._open_lines
        count = len(lines.records)
        description = {"records": count, "meta": dict(meta), "sha256": lines.checksum(count)}
        checkpoints.write(self.folder / CHECKPOINT, tensors, description)

    @no_type_check
    @typed_arguments
    def snapshot(self, step: int, tensors: Mapping[str, Tensor]) -> Path:
        """Write the weights of one step to ``snapshots/STEP.safetensors`` atomically."""
        self._check_open()
        path = self.folder / SNAPSHOTS / f"{step:08d}.safetensors"
        checkpoints.write(path, tensors, {"step": step})
        return path

    def restore(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return tensors (on the CPU) and meta of the last checkpoint, or None without one.

        Records after the checkpoint are removed: a run that resumes from it writes them again.
        Without a checkpoint all records are removed, because the run starts again. A finished run
        keeps all its records.

        Raises:
            FlatlensError: if the checkpoint is damaged, or if records from before it are missing
                or were changed.
        """
        lines = self._open_lines
        path = self.folder / CHECKPOINT
        if not path.exists():
            if not self.done:
                self.cut(0)
            return None
        saved = checkpoints.read(path)
        count, there = saved.records, len(lines.records)
        if count > there:
            raise FlatlensError(
                f"{path} belongs to {counted(count, 'record')}, but {RECORDS} has {there}; "
                "delete the checkpoint to start the run again."
            )
        if saved.checksum is not None and saved.checksum != lines.checksum(count):
            raise FlatlensError(
                f"{lines.path} was changed after {path} was written; delete the checkpoint to "
                "start the run again."
            )
        if not self.done:
            self.cut(count)
        return saved.tensors, saved.meta

    def finish(self) -> None:
        """Mark the run as finished; the mark holds the number and the checksum of its records."""
        lines = self._open_lines
        count = len(lines.records)
        done_file.write(self.folder, count, lines.checksum(count))

    @property
    def done(self) -> bool:
        """Whether the run is marked as finished."""
        return (self.folder / DONE).exists()

    def close(self) -> None:
        """Free the lock; records and checkpoint are on the disk already."""
        # an object whose __init__ raised has no attributes
        lines, lock = getattr(self, "_lines", None), getattr(self, "_lock", None)
        self._lines = self._lock = None
        if lines is not None:
            lines.close()
        if lock is not None:
            lock.release()

    __del__ = close

    def _check_open(self) -> None:
        # a forked child does not hold the lock, and must not write
        if self._lock is None or not self._lock.is_locked:
            raise FlatlensError(f"The run {self.folder} is closed; open it again with Run.open.")

    @property
    def _open_lines(self) -> RecordFile:
        self._check_open()
        assert self._lines is not None
        return self._lines

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {counted(len(self.records), 'record')})"


def _remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that a killed writer of this run left in a folder.

    Files that only the holder of the lock writes are leftovers. Others (the error of a sweep) may
    still be in use, unless they are old.
    """
    own = (CONFIG, CHECKPOINT, DONE, ".safetensors")
    for file in folder.iterdir() if folder.is_dir() else ():
        old_name = OLD_TEMPORARY.fullmatch(file.name) is not None
        if not (is_temporary(file) or old_name) or file.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):
            abandoned = time.time() - file.lstat().st_mtime > ABANDONED
            if old_name or file.name.endswith(own) or abandoned:
                file.unlink()


@contextlib.contextmanager
def _named(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a FlatlensError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise FlatlensError(
            f"Cannot {action} {path}: {reason}; what was written before is kept."
        ) from error
