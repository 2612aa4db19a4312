"""The result of a task, and how the files of a run reach the driver.

A driver marks its output folder with a token, an empty file with a random name. A worker that sees
the token shares the driver's disk and writes in place. Any other worker writes to a temporary
folder and sends the files back with the outcome.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flatlens.files.replacing import replacing
from flatlens.runs import Run, RunBusyError

TOKEN = re.compile(r"\.sweep-[0-9a-f]{32}")
Status = Literal["done", "failed", "refused", "lost", "busy"]

# torch has one global generator and one number of threads per process, but a Dask worker may have
# several threads.
_ONE_TASK_PER_PROCESS = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """The result of one task.

    Attributes:
        status: "done"; "failed" (an exception, which may not happen again); "refused" (a
            FlatlensError, which would happen again); "lost" (the worker died); or "busy" (another
            process is writing the run).
        error: the traceback or message, empty if there is none.
        files: the run's files by name, if the worker does not share the driver's disk.
    """

    status: Status
    error: str = ""
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Return the exception at the end of the error, which says what went wrong, as one line."""
        lines = self.error.strip().splitlines()
        if self.status == "lost" and lines and lines[-1].startswith("Its worker process"):
            return lines[-1]
        frames = [k for k, line in enumerate(lines) if line.startswith("  ")]
        last = dict.fromkeys(lines[frames[-1] + 1 if frames else 0 :])  # each line once
        return " ".join(" ".join(last).split())[:500]


@dataclass(frozen=True)
class Workplace:
    """The folder in which a worker writes its run, and whether the driver sees it."""

    folder: Path
    shared: bool

    def finished(self) -> Outcome:
        """Return the outcome of a finished run, with its files if the driver does not see them."""
        if self.shared:
            return Outcome("done")
        paths = [path for path in self.folder.rglob("*") if path.is_file() and path.name != "lock"]
        names = [path.relative_to(self.folder).as_posix() for path in paths]
        contents = [path.read_bytes() for path in paths]
        return Outcome("done", files=dict(zip(names, contents, strict=True)))


@contextlib.contextmanager
def workplace(out: str, token: str, name: str) -> Iterator[Workplace]:
    """Give a worker a folder for the run ``name``; only one task at a time runs in a process."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE_TASK_PER_PROCESS)
        shared = (Path(out) / token).exists()
        root = out if shared else stack.enter_context(tempfile.TemporaryDirectory())
        yield Workplace(Path(root) / name, shared)


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Keep a token file in ``folder`` while the driver runs, and yield its name.

    Tokens of drivers that were killed are removed. The file holds the machine and the process id of
    its driver.
    """
    for old in folder.glob(".sweep-*"):
        if TOKEN.fullmatch(old.name) and _is_stale(old):
            old.unlink(missing_ok=True)
    token = f".sweep-{uuid.uuid4().hex}"
    (folder / token).write_text(f"{platform.node()} {os.getpid()}\n")
    try:
        yield token
    finally:
        (folder / token).unlink(missing_ok=True)


def _is_stale(token: Path) -> bool:
    """Tell whether the driver that wrote a token ran on this machine and is gone."""
    try:
        machine, _, process = token.read_text().strip().rpartition(" ")
        if machine != platform.node():
            return False
        os.kill(int(process), 0)  # signal 0 fails if there is no such process
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # another user's process, or not our file
        return False
    return False


def store_files(folder: Path, files: Mapping[str, bytes], open_run: Callable[[], Run]) -> bool:
    """Write the files that a worker sent into ``folder``, unless the run is done there already.

    Args:
        folder: the folder of the run.
        files: contents by name. The file ``done`` is written last.
        open_run: opens the run and takes its lock, because another sweep may also write to it.

    Returns:
        False if another process is writing the run, else True.
    """
    try:
        with open_run() as run:
            names = [] if run.done else sorted(files, key="done".__eq__)
            for name in names:
                with replacing(folder / name) as temporary:
                    temporary.write_bytes(files[name])
    except RunBusyError:
        return False
    return True
