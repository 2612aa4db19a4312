"""Fetch published data sets into the cache folder: download, unpack, verify.

A file gets its final name only when it is complete and its checksum is right. The next fetch
therefore completes one that was killed at any moment.
"""

from __future__ import annotations

import contextlib
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from flatlens.data.download import Tick, alone, download
from flatlens.data.places import by_hand, cache, find, folders, is_complete, matches, status, verify
from flatlens.data.published import PUBLISHED, Published, published
from flatlens.errors import FlatlensError
from flatlens.files.replacing import TEMPORARY

__all__ = ["PUBLISHED", "Published", "download", "fetch", "find", "unpack", "verify"]


def fetch(name: str) -> Path:
    """Download the missing files of a data set into the cache folder and verify all of them.

    A data set that is complete in FLATLENS_DATA or in the cache folder is not fetched again.

    Args:
        name: fashion-mnist or cifar10.

    Returns:
        The folder of the data set.

    Raises:
        FlatlensError: if a file cannot be downloaded, unpacked or verified.
    """
    source = published(name)
    for folder in folders(name):
        if is_complete(name, folder):
            return folder
    target = cache(name)
    with _progress() as tick:
        for file, checksum in source.downloads.items():
            if status(target / file, checksum) != "good":
                try:
                    download(f"{source.base}/{file}", target / file, checksum, tick(file))
                except FlatlensError as error:
                    raise FlatlensError(
                        f"{str(error).rstrip('.')}; try again, or {by_hand(name)}."
                    ) from error
            if file not in source.files:
                unpack(target / file, target, source.files)
    wrong = [f for f, checksum in source.files.items() if status(target / f, checksum) != "good"]
    if wrong:
        raise FlatlensError(
            f"{target} is not complete after the download: {', '.join(wrong)} is missing or not "
            f"the published file; try again, or {by_hand(name)}."
        )
    return target


def unpack(archive: Path, folder: Path, files: Mapping[str, str]) -> None:
    """Take files out of a tar archive, check them, and remove the archive.

    The files are unpacked into a new folder and renamed when all of them are right. A process that
    is killed leaves the archive, so the next fetch unpacks it again.

    Args:
        archive: the archive.
        folder: the folder that takes the files.
        files: path in the archive -> checksum. No other file is taken.

    Raises:
        FlatlensError: if the archive is damaged, lacks a file or has another one in its place.
    """
    with alone(archive, f"Another process is unpacking {archive}."):
        for left in folder.glob(f"{TEMPORARY}*-unpacked"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            new = Path(tempfile.mkdtemp(prefix=TEMPORARY, suffix="-unpacked", dir=folder))
            try:
                _extract(archive, new, files)
                for file in files:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    (new / file).replace(folder / file)
            finally:
                shutil.rmtree(new, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                archive.unlink()
        except OSError as error:
            raise FlatlensError(
                f"Cannot unpack {archive} into {folder}: {error.strerror or error}."
            ) from error


def _extract(archive: Path, new: Path, files: Mapping[str, str]) -> None:
    """Copy files of a tar archive into a new folder and compare their checksums."""
    try:
        with tarfile.open(archive) as tar:
            for name, checksum in files.items():
                content = tar.extractfile(name)
                if content is None:
                    raise FlatlensError(f"{archive}: {name} is not a file.")
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                with content, (new / name).open("wb") as stream:
                    shutil.copyfileobj(content, stream)
                if not matches(new / name, checksum):
                    raise FlatlensError(f"{archive}: {name} is not the published file.")
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise FlatlensError(f"Cannot unpack {archive}: {error}.") from error


@contextmanager
def _progress() -> Iterator[Callable[[str], Tick]]:
    """Show one progress bar per file on standard error, on a terminal only."""
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def bar(file: str) -> Tick:
            task = bars.add_task(file, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield bar
