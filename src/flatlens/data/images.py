"""Read images from class folders, PATH/class/image.png, with Pillow (extra `images`).

Classes are the names of the folders in sorted order. The order of the images mixes the classes and
depends only on their names, so that the first few images are a fair sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from flatlens.data.memory import refuse_beyond_memory
from flatlens.errors import FlatlensError

SUFFIXES = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}  # Pillow's names for grey and colour


Part = tuple[UInt8[np.ndarray, "_ c h w"], Int[np.ndarray, " _"]]  # images, class numbers


def read(
    path: Path, size: int | Sequence[int] | None = None, channels: int = 3
) -> tuple[list[str], Part, Part]:
    """Read a folder of images.

    Args:
        path: the folder.
        size: one number, or height and width, to which all images are scaled. None keeps them.
        channels: 3 for colour, 1 for grey.

    Returns:
        Names of the classes; images and class numbers to train; the same to test (may be empty).

    Raises:
        FlatlensError: if the folder has no images, or one of them cannot be read.
    """
    shape = (size,) if isinstance(size, int) else tuple(size or ())
    if len(shape) > 2 or any(pixels < 1 for pixels in shape):
        raise FlatlensError(f"size={size!r} of {path} is not one or two numbers of pixels.")
    if channels not in MODES:
        raise FlatlensError(f"channels={channels} of {path} must be 3 (colour) or 1 (grey).")
    one_size = (shape[0], shape[-1]) if shape else None
    train, test = split_folders(path)
    names = class_names(train)
    x, y = read_part(train, names, one_size, channels)
    if empty := set(range(len(names))) - set(y.tolist()):
        raise FlatlensError(f"{train / names[min(empty)]} has no images.")
    if test is None:
        return names, (x, y), (x[:0], y[:0])
    x_test, y_test = read_part(test, names, one_size, channels)
    if x_test.shape[1:] != x.shape[1:]:
        raise FlatlensError(
            f"Images in {test} have {_pixels(x_test[0])} pixels, in {train} {_pixels(x[0])}; "
            "give size= to bring all to one size."
        )
    return names, (x, y), (x_test, y_test)


def split_folders(path: Path) -> tuple[Path, Path | None]:
    """Return the folder to train on and, if there, the one to test on: train/ and test/ or val/."""
    if not path.is_dir():
        raise FlatlensError(f"{path} is not a folder.")
    if not (path / "train").is_dir():
        return path, None
    tests = (path / name for name in ("test", "val"))
    return path / "train", next((t for t in tests if t.is_dir()), None)


def class_names(folder: Path) -> list[str]:
    """Return the names of the classes, in the order of their numbers."""
    names = sorted(f.name for f in folder.iterdir() if f.is_dir() and f.name[0] != ".")
    if not names:
        raise FlatlensError(f"{folder} has no class folders; images are looked for as class/*.png.")
    return names


def read_part(
    folder: Path, names: Sequence[str], size: tuple[int, int] | None, channels: int
) -> Part:
    """Read images and class numbers of one folder; `size` is height and width, None keeps them."""
    if extra := set(class_names(folder)) - set(names):
        raise FlatlensError(f"{folder / min(extra)} is a class that the training folder lacks.")
    files = [
        (file, label)
        for label, name in enumerate(names)
        if (folder / name).is_dir()
        for file in (folder / name).iterdir()
        if file.suffix.lower() in SUFFIXES and file.name[0] != "."
    ]
    if not files:
        raise FlatlensError(f"{folder} has no images ({', '.join(SUFFIXES)}) in its class folders.")
    pixels_of_image = size or (1, 1)
    needed = 5 * len(files) * channels * pixels_of_image[0] * pixels_of_image[1]
    refuse_beyond_memory(needed, f"The images of {folder}")  # bytes and float32
    files.sort(key=lambda item: _mixed(item[0]))
    images: list[UInt8[np.ndarray, "c h w"]] = []
    for file, _ in files:
        image = read_image(file, size, channels)
        if images and image.shape != images[0].shape:
            raise FlatlensError(
                f"{file} has {_pixels(image)} pixels, but {files[0][0]} has {_pixels(images[0])}; "
                "give size= to bring all to one size."
            )
        images.append(image)
    return np.stack(images), np.array([label for _, label in files])


def read_image(
    file: Path, size: tuple[int, int] | None, channels: int
) -> UInt8[np.ndarray, "c h w"]:
    """Read one image; to change its size, its largest middle part of that shape is scaled."""
    if not file.is_file():  # opening a pipe would wait forever
        raise FlatlensError(f"{file} is not a regular file.")
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise FlatlensError(
            "Reading images needs Pillow: pip install 'flatlens[images]'."
        ) from error
    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # 16 and 32 bit: eight bits would cut them off
                raise FlatlensError(f"{file} has more than 8 bits a pixel (mode {image.mode}).")
            pixels = image.convert(MODES[channels])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, FlatlensError):
            raise
        raise FlatlensError(f"Cannot read {file}: it is cut short or no image.") from error
    if size is not None:
        height, width = size
        pixels = ImageOps.fit(pixels, (width, height), Image.Resampling.BILINEAR)
    array = np.asarray(pixels, np.uint8)
    return np.ascontiguousarray(array.reshape(*array.shape[:2], channels).transpose(2, 0, 1))


def _mixed(file: Path) -> str:
    """Return a key that mixes the classes, from class and file name alone."""
    return hashlib.sha256(f"{file.parent.name}/{file.name}".encode()).hexdigest()


def _pixels(image: UInt8[np.ndarray, "c h w"]) -> str:
    return f"{image.shape[1]} x {image.shape[2]}"
