"""`done`: the mark of a finished run, with the number and the checksum of its records.

With them a reader detects records that were cut or changed afterwards. The empty `done` of flatlens
0.1.0 has no number and no checksum, and is accepted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from flatlens.errors import FlatlensError, counted
from flatlens.files.reading import LARGEST_LINES, parse_json, read_bytes
from flatlens.files.replacing import write_whole
from flatlens.files.schema import Field, checked
from flatlens.runs.layout import DONE, RECORDS

SCHEMA = {
    "records": Field((int,), required=True, low=0),
    "sha256": Field((str,), required=True),
}


def write(folder: Path, count: int, checksum: str) -> None:
    """Mark a run as finished."""
    content = {"records": count, "sha256": checksum}
    write_whole(folder / DONE, (json.dumps(content) + "\n").encode())


@dataclass(frozen=True)
class Promise:
    """The number and checksum of a finished run's records; `count` is None if unknown."""

    count: int | None = None
    checksum: str = ""

    def fault(self, count: int, checksum: str) -> str | None:
        """Describe how `count` records with a checksum differ from the promise, or return None."""
        if self.count is None:
            return None
        if count != self.count:
            return f"it has {counted(count, 'record')}, but the run ended with {self.count}"
        if checksum != self.checksum:
            return "it was changed after the run ended, for its checksum differs"
        return None


def read(folder: Path) -> Promise | None:
    """Return what `done` promises, or None if the run is not finished.

    Read it before the records: a run that is being written may finish in between.

    Raises:
        FlatlensError: if `done` is damaged or no regular file.
    """
    path = folder / DONE
    if not path.exists() and not path.is_symlink():
        return None
    text = read_bytes(path, limit=4096)
    if not text.strip():
        return Promise()
    content = checked(parse_json(text, str(path)), SCHEMA, str(path))
    return Promise(content["records"], content["sha256"])


def check(path: Path, promise: Promise | None, content: bytes) -> None:
    """Compare the bytes of `records.jsonl` with the promise of `done`.

    Raises:
        FlatlensError: if records were lost or changed after the run ended.
    """
    if promise is None:
        return
    fault = promise.fault(content.count(b"\n"), hashlib.sha256(content).hexdigest())
    if fault is not None:
        raise FlatlensError(f"{path} is damaged: {fault}; train the run again to repair it.")


def is_finished(folder: Path | str) -> bool:
    """Whether a run is finished and its records have not changed since.

    Example:
        >>> is_finished("no/such/run")
        False
    """
    folder = Path(folder)
    records = folder / RECORDS
    try:
        promise = read(folder)
        if promise is None:
            return False
        if promise.count is not None:
            check(records, promise, read_bytes(records, LARGEST_LINES))
    except FlatlensError:
        return False
    return True
