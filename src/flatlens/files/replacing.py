"""Write files completely or not at all.

A file is written under a temporary name in the same folder, flushed to the disk and then renamed. A
reader sees the old file or the new one. A process that is killed leaves at most the temporary file.
Its name is unique, because it begins with `TEMPORARY` and names the machine and the process. The
next writer of the same file on that machine removes it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flatlens.errors import FlatlensError

TEMPORARY = ".flatlens-unfinished-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds.

    Args:
        path: the file to write. Its folder is created.

    Raises:
        FlatlensError: if the disk is full or refuses the file. The message names `path`.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with replacing(folder / "a.txt") as temporary:
    ...     _ = temporary.write_text("whole")
    >>> [file.name for file in folder.iterdir()]
    ['a.txt']
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        prefix = f"{TEMPORARY}{_machine()}-{os.getpid()}-"
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=_ending(path), dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        temporary.chmod(0o644)  # mkstemp's 600 would stay otherwise
        _flush(temporary)
        temporary.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        if temporary is not None and not _concerns(error, temporary):
            raise  # the block failed for another reason
        reason = error.strerror or error
        raise FlatlensError(f"Cannot write {path}: {reason}; nothing was changed.") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically; it is on the disk when this returns."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def is_temporary(path: Path) -> bool:
    """Whether `replacing` created this file and did not rename it."""
    return path.name.startswith(TEMPORARY)


def _ending(path: Path) -> str:
    return f"-{path.name[-100:]}"


def _machine() -> str:
    """Return a short name of this machine, because process ids mean nothing on another one."""
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of `path` whose writer on this machine is dead."""
    start, end = re.escape(f"{TEMPORARY}{_machine()}-"), re.escape(_ending(path))
    pattern = re.compile(rf"{start}(\d+)-[a-z0-9_]+{end}")
    for file in os.scandir(path.parent):
        match = pattern.fullmatch(file.name)
        if match and not _is_alive(int(match[1])):
            with contextlib.suppress(OSError):
                Path(file.path).unlink()


def _is_alive(process: int) -> bool:
    """Whether a process may be running; on Windows always True, as asking would end the process."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _concerns(error: OSError, temporary: Path) -> bool:
    """Whether an error is about the file being written; a full disk names no file."""
    return error.filename is None or str(error.filename) == str(temporary)


def _flush(file: Path) -> None:
    handle = os.open(file, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush_folder(folder: Path) -> None:
    """Flush the folder, so that the new name is on the disk; Windows has no such call."""
    with contextlib.suppress(PermissionError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
