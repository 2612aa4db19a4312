"""The figures that a zoo wrote itself, so that it never deletes or replaces a user's file.

The names and checksums of the figures are in a manifest beside them. A file that is not in the
manifest, or that was changed since, belongs to the user.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from flatlens.errors import FlatlensError
from flatlens.files.reading import read_json
from flatlens.files.replacing import replacing
from flatlens.files.schema import Field, checked

MANIFEST = ".flatlens-figures.json"
FIGURE = "figure3"
FIGURE_FILES = (f"{FIGURE}.pdf", f"{FIGURE}.png")


def note_figures(folder: Path, files: Iterable[Path]) -> None:
    """Write the manifest of the figures that were just drawn."""
    content = {file.name: _checksum(file) for file in files}
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def remove_figures(folder: Path) -> None:
    """Delete the figures that flatlens wrote into ``folder``, and nothing else."""
    for file in _own_files(folder):
        file.unlink(missing_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)


def check_figures(folder: Path) -> None:
    """Refuse to draw where a file of the user has the name of a figure."""
    own_names = {file.name for file in _own_files(folder)}
    for name in FIGURE_FILES:
        path = folder / name
        if name not in own_names and (path.is_symlink() or path.exists()):
            raise FlatlensError(
                f"{path} was not written by flatlens zoo, or was changed since; move it, or choose "
                "another --out."
            )


def _own_files(folder: Path) -> list[Path]:
    """List the figures of the manifest that are still as they were written."""
    try:
        content = checked(read_json(folder / MANIFEST), {}, MANIFEST, others=Field((str,)))
    except FlatlensError:  # no manifest, or a damaged one
        return []
    checksums = {name: content[name] for name in FIGURE_FILES if name in content}
    files = {folder / name: checksum for name, checksum in checksums.items()}
    return [
        path
        for path, checksum in files.items()
        if path.is_file() and not path.is_symlink() and _checksum(path) == checksum
    ]


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
