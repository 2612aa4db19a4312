"""Download a file completely and check it; a stopped download is resumed.

A file gets its final name only when it is complete and its checksum is right. Until then it is
called NAME.part, and the next attempt appends to it. Only the standard library is used for the
network.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flatlens.data.places import matches
from flatlens.errors import FlatlensError
from flatlens.runs.lock import BusyError, acquire

BLOCK = 1 << 16  # bytes read at a time
TIMEOUT = 30.0  # seconds without a byte after which a server counts as gone

Tick = Callable[[int, int | None], object]  # bytes so far, bytes in all if known


def download(url: str, path: Path, checksum: str, tick: Tick = lambda done, total: None) -> None:
    """Download a file and check it.

    Bytes go to `path`.part. Bytes of an earlier attempt are not requested again (HTTP Range). A
    resumed file with a wrong checksum is downloaded again from the start, because its first part
    may be of another version.

    Args:
        url: the address.
        path: the file to write.
        checksum: the published checksum, written algorithm:hexdigest.
        tick: called with the bytes so far and, if known, the total number of bytes.

    Raises:
        FlatlensError: if the server, the checksum or the disk fails, or another process is
            downloading the same file.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(part, f"Another process is downloading {part}."):
            if path.is_file() and matches(path, checksum):
                return  # another process has just finished it
            _complete(url, part, checksum, tick)
            part.replace(path)
    except OSError as error:
        raise FlatlensError(f"Cannot write {part}: {error.strerror or error}.") from error


def _complete(url: str, part: Path, checksum: str, tick: Tick) -> None:
    """Append to a file until it is complete, and check it."""
    with part.open("ab") as stream:
        resumed = stream.tell() > 0
        _receive(url, stream, tick)
        if not matches(part, checksum) and resumed:
            stream.truncate(0)
            _receive(url, stream, tick)
        os.fsync(stream.fileno())
    if not matches(part, checksum):
        part.unlink()
        raise FlatlensError(f"The file at {url} is not the published one: {checksum} fails.")


@contextmanager
def alone(path: Path, message: str) -> Iterator[None]:
    """Hold a lock beside a file, so that two processes do not mix their bytes.

    The lock ends with the process. Its file is removed by its holder.

    Raises:
        FlatlensError: with `message`, if another process holds the lock.
    """
    lock_file = path.with_name(f"{path.name}.lock")
    try:
        lock = acquire(lock_file)
    except BusyError as error:
        raise FlatlensError(message) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows keeps an open file
            lock_file.unlink()
        lock.release()


def _receive(url: str, stream: IO[bytes], tick: Tick) -> None:
    """Append the missing bytes of `url` to a file."""
    start = stream.seek(0, os.SEEK_END)
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    with _open(url, request) as response:
        if response is None:  # the file is complete already
            return
        if response.status != http.client.PARTIAL_CONTENT:
            stream.truncate(0)
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        done = start
        tick(done, total)
        while block := _read(url, response):
            stream.write(block)
            done += len(block)
            tick(done, total)
        stream.flush()
        if total is not None and done < total:
            raise FlatlensError(f"{url} broke off after {done:,} of {total:,} bytes.")


@contextmanager
def _open(url: str, request: urllib.request.Request) -> Iterator[http.client.HTTPResponse | None]:
    """Return the response, or None if the server says that the range lies past the end."""
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise FlatlensError(f"{url} answers {error.code} {error.reason}.") from error
        yield None
        return
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FlatlensError(f"Cannot reach {url}: {reason}.") from error
    with response:
        yield response


def _read(url: str, response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(BLOCK)  # bytes that have arrived: none is lost if the rest fails
    except (OSError, http.client.HTTPException) as error:
        raise FlatlensError(f"{url} broke off: {error}.") from error
