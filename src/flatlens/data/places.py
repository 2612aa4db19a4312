"""Find published data sets on this machine, and verify their files.

Each data set has a folder of its own name: in the folder that the environment variable
FLATLENS_DATA names or, second, in the cache folder.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

from flatlens.data.published import published
from flatlens.errors import FlatlensError

Status = Literal["good", "missing", "different"]


def cache(name: str) -> Path:
    """Return the folder of a data set below the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "flatlens" / name


def folders(name: str) -> list[Path]:
    """Return the folders where a data set may lie, in the order in which they are searched."""
    named = os.environ.get("FLATLENS_DATA")
    return [*([Path(named) / name] if named else []), cache(name)]


def find(name: str) -> Path | None:
    """Return the first folder that has all files of a data set, without checking them."""
    source = published(name)
    return next((folder for folder in folders(name) if source.complete_format(folder)), None)


def locate(name: str) -> list[Path]:
    """Return the files of a data set, all of them in one folder.

    Raises:
        FlatlensError: if no folder has all of them. The message says what to do.
    """
    for folder in folders(name):
        if files := published(name).complete_format(folder):
            return [folder / file for file in files]
    raise FlatlensError(
        f"The data {name} is not here: run flatlens data fetch {name}, or {by_hand(name)}."
    )


def by_hand(name: str) -> str:
    """Describe which files to put where when there is no network."""
    files = list(published(name).files)
    first_folder, *others = folders(name)
    missing = [file for file in files if not (first_folder / file).is_file()] or files
    place = f"{first_folder}" if others else f"{name} in a folder that you name in FLATLENS_DATA"
    return (
        f"put {', '.join(missing)} into {place} (FLATLENS_DATA is looked at first), "
        f"or all of its {len(files)} files into {cache(name)}"
    )


def verify(name: str) -> dict[Path, Status]:
    """Compare each file of a data set with its published checksum, in the folder where it is."""
    source, folder = published(name), find(name) or folders(name)[0]
    files = source.complete_format(folder) or source.files
    return {folder / f: status(folder / f, checksum) for f, checksum in files.items()}


def is_complete(name: str, folder: Path) -> bool:
    """Whether a folder has all files of a data set with the published checksums."""
    source = published(name)
    files = source.complete_format(folder) or source.files
    return all(status(folder / f, checksum) == "good" for f, checksum in files.items())


def status(path: Path, checksum: str) -> Status:
    """Return whether a file is there and has a checksum."""
    if not path.is_file():
        return "missing"
    return "good" if matches(path, checksum) else "different"


def matches(path: Path, checksum: str) -> bool:
    """Whether a file has a checksum, written as md5:..., sha1:... or sha256:...

    Raises:
        FlatlensError: if the file cannot be read.
    """
    algorithm, _, expected = checksum.partition(":")
    try:
        with path.open("rb") as stream:
            # Builds that forbid MD5 for security allow it with usedforsecurity=False.
            digest = hashlib.file_digest(
                stream, lambda: hashlib.new(algorithm, usedforsecurity=False)
            ).hexdigest()
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    return digest == expected
