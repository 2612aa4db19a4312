"""The pictures that a zoo measures its models on."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatlens.data import images
from flatlens.errors import FlatlensError
from flatlens.training.timm_models import CLASSES


def choose(folder: Path, n: int) -> tuple[list[Path], list[int] | None]:
    """Choose n pictures of a folder, in an order that depends on their names alone.

    Args:
        folder: looked through to any depth; hidden files are skipped.
        n: number of pictures.

    Returns:
        The files, and their class numbers if every file has one.

    Raises:
        FlatlensError: if there is no such folder or it has too few pictures.
    """
    if not folder.is_dir():
        raise FlatlensError(f"{folder} is not a folder.")
    files = [p for p in folder.rglob("*") if p.suffix.lower() in images.SUFFIXES]
    files = [p for p in files if p.is_file() and p.name[0] != "."]
    if n > len(files):
        raise FlatlensError(f"{n:,} images were asked for, but {folder} has only {len(files):,}.")
    names = {p: p.relative_to(folder).as_posix() for p in files}
    files.sort(key=lambda p: hashlib.sha256(names[p].encode(errors="surrogateescape")).hexdigest())
    folders = sorted({p.parent.name for p in files})
    order = {name: k for k, name in enumerate(folders)} if len(folders) == CLASSES else {}
    labels = [_label(p, order) for p in files[:n]]
    known = [label for label in labels if label is not None]
    return files[:n], known if len(known) == n else None


def _label(file: Path, order: Mapping[str, int]) -> int | None:
    """Read the class from the name of a file or its folder, or from the order of class folders."""
    for name in (file.name, file.parent.name):
        number = re.match(r"\d+(?=_|$)", name)
        if number and int(number[0]) < CLASSES:  # not 2024_0.jpg
            return int(number[0])
    return order.get(file.parent.name)


def read_picture(file: Path) -> Any:
    """Read a picture as an RGB image of Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise FlatlensError(
            "Reading images needs the package Pillow: pip install 'flatlens[zoo]'."
        ) from error
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FlatlensError(f"Cannot read {file}: it is cut short or no image.") from error


def digest(files: Sequence[Path]) -> str:
    """Return a short hash of the contents of files; unchanged files are read only once."""
    return _digest(tuple((f, f.stat().st_mtime_ns, f.stat().st_size) for f in files))


@functools.lru_cache(maxsize=4)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    contents = (hashlib.sha256(file.read_bytes()).digest() for file, _, _ in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]
