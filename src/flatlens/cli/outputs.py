"""Check output files, so that no file is destroyed that flatlens did not write."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from flatlens.errors import FlatlensError


def check_output_file(path: Path, is_own: Callable[[Path], bool], what: str) -> None:
    """Raise if an output is neither new nor a regular file that flatlens wrote.

    Args:
        path: the file to write.
        is_own: tells whether an existing regular file was written by flatlens.
        what: the content of the file, such as "a report".

    Raises:
        FlatlensError: if the path is a folder, a device, a link, or a file of another kind.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise FlatlensError(f"Cannot write {path}: {error.strerror or error}.") from error
    if stat.S_ISDIR(mode):
        raise FlatlensError(f"{path} is a folder; name a file for {what}.")
    if not stat.S_ISREG(mode):
        raise FlatlensError(f"{path} is not a regular file; name another file for {what}.")
    if not is_own(path):
        raise FlatlensError(
            f"{path} exists and is not {what} of flatlens; name another file, or delete it first."
        )


def check_output_folder(folder: Path, names: Sequence[str] = ()) -> None:
    """Raise if a folder is something else, or if one of its files is not a regular file."""
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise FlatlensError(f"Cannot use {folder}: File exists and is not a folder.")
    for name in names:
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise FlatlensError(f"{path} is not a regular file; choose another --out.")


def begins_with(text: str, within: int = 10_000) -> Callable[[Path], bool]:
    """Return a test for files that contain ``text`` near their beginning."""

    def test(path: Path) -> bool:
        with path.open("rb") as file:
            return text.encode() in file.read(within)

    return test
