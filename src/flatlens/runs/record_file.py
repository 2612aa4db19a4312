"""`records.jsonl`: one record per line, appended completely or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.files.plain_json import as_json, restored
from flatlens.files.reading import LARGEST_LINES, opened, parse_json, read_bytes
from flatlens.files.schema import Field, checked

Record = dict[str, Any]

# `step` may be missing: other users of Run may count something else
SCHEMA = {"step": Field((int, float, str))}
CELL = Field((int, float, str, bool, list, dict, type(None)))


def encode(record: Mapping[str, Any], name: str) -> bytes:
    """Return a record as a line of JSON.

    Raises:
        FlatlensError: if JSON cannot hold the record. `name` says which record it is.
    """
    return (json.dumps(as_json(dict(record), name)) + "\n").encode()


def decode(line: bytes, where: str) -> Record:
    """Return the record of a line; the strings "inf", "-inf" and "nan" become numbers.

    Raises:
        FlatlensError: if the line is no record. `where` names the file and the line.
    """
    record = checked(parse_json(line, where), SCHEMA, where, others=CELL)
    return {key: restored(value) for key, value in record.items()}


@dataclass(frozen=True)
class Lines:
    """The records of a file up to the first damaged line.

    Args:
        records: the records, in order.
        ends: the byte offset at which the line of each record ends.
        damage: what is wrong with the next line, or None if all lines are good.
    """

    records: list[Record]
    ends: list[int]
    damage: FlatlensError | None


def parse(path: Path, content: bytes) -> Lines:
    """Split the content of a file of records; a last line without its end is dropped."""
    records: list[Record] = []
    ends: list[int] = []
    end = 0
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        end += len(line) + 1
        try:
            record = decode(line, f"Line {number} of {path}")
        except FlatlensError as error:
            reason = str(error).rstrip(".")
            message = f"{reason}; repair the line, or delete it and all lines after it."
            return Lines(records, ends, FlatlensError(message))
        records.append(record)
        ends.append(end)
    return Lines(records, ends, None)


def read(path: Path) -> list[Record]:
    """Return the completely written records of a file.

    Raises:
        FlatlensError: if the file cannot be read or a line is damaged.
    """
    lines = parse(path, read_bytes(path, LARGEST_LINES))
    if lines.damage is not None:
        raise lines.damage
    return lines.records


class RecordFile:
    """A file of records, open for appending.

    Args:
        path: the file. It is created.

    Attributes:
        records: the records in the file.
        damage: what is wrong with the first damaged line, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.touch()
        with opened(path):  # refuses what is no regular file
            self._file = path.open("r+b", buffering=0)
        content = self._file.read()
        lines = parse(path, content)
        self.records = lines.records
        self.damage = lines.damage
        self._ends = lines.ends
        self._digest = hashlib.sha256()
        self._digests = self._digests_of(content)

    def _digests_of(self, content: bytes) -> list[str]:
        """Return the checksum of the file up to the end of each line."""
        digest, digests, start = hashlib.sha256(), [], 0
        for end in self._ends:
            digest.update(content[start:end])
            digests.append(digest.hexdigest())
            start = end
        self._digest = digest
        return digests

    def checksum(self, count: int) -> str:
        """Return the SHA-256 of the first `count` lines."""
        return self._digests[count - 1] if count else hashlib.sha256().hexdigest()

    def append(self, line: bytes, record: Record) -> None:
        """Append one line and wait until it is on the disk.

        Raises:
            OSError: if the disk does not take it; the file is as before then.
        """
        end = self._end
        try:
            self._write(line, end)
            os.fsync(self._file.fileno())
        except BaseException:  # a full disk, Ctrl-C: the file is left as it was
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise
        self.records.append(record)
        self._ends.append(end + len(line))
        self._digest.update(line)
        self._digests.append(self._digest.hexdigest())

    def cut(self, count: int) -> None:
        """Keep the first `count` records and remove everything after them from the file."""
        del self.records[count:], self._ends[count:]
        if self._file.seek(0, os.SEEK_END) != self._end:
            self._file.truncate(self._end)
            os.fsync(self._file.fileno())
        if len(self._digests) > count:
            self._file.seek(0)
            self._digests = self._digests_of(self._file.read())

    def close(self) -> None:
        """Close the file; everything is on the disk already."""
        self._file.close()

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _write(self, line: bytes, offset: int) -> None:
        """Write a whole line; a full disk shortens a write before it refuses one."""
        self._file.seek(offset)
        while line:
            line = line[self._file.write(line) :]
