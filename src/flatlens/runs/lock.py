"""The lock of a run folder: one writer at a time, on every system."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from flatlens.errors import FlatlensError


class RunBusyError(FlatlensError):
    """Another process, or another Run in this process, is writing to the folder."""


class BusyError(FlatlensError):
    """Raised if the lock of a file is held elsewhere."""


def acquire(path: Path) -> FileLock:
    """Take the lock of a file without waiting.

    The system frees the lock when the process ends, for whatever reason. A forked child does not
    hold it. The file itself stays, because removing it would let two processes lock two different
    files.

    Args:
        path: the lock file. It is created.

    Raises:
        BusyError: if the lock is held elsewhere, in this process or another.
    """
    lock = FileLock(path, blocking=False, thread_local=False, mode=0o644)
    try:
        lock.acquire()
    except (Timeout, RuntimeError):  # RuntimeError: held by this very thread
        raise BusyError(f"{path} is locked elsewhere.") from None
    return lock
