"""Files into arrays: IDX (MNIST and its kin), CIFAR-10 binary, NumPy's npz.

A file that is cut short, damaged or of another kind is refused by its name, in one sentence;
what comes back is whole.
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from numpy.typing import NDArray

from flatlens.errors import FlatlensError

CIFAR_CLASSES = 10
CIFAR_IMAGE = (3, 32, 32)  # red, green and blue planes, each row by row
CIFAR_RECORD = 1 + math.prod(CIFAR_IMAGE)  # the label comes first


def read_idx(path: Path, axes: int) -> UInt8[np.ndarray, ...]:
    """The array of unsigned bytes in a gzipped IDX file that must have so many axes.

    Two zero bytes, 8 for unsigned bytes, the number of axes; the axes as big-endian 32-bit
    integers; the entries, last axis fastest.
    """
    try:
        with gzip.open(path) as stream:
            magic = stream.read(4)
            if magic != bytes((0, 0, 8, axes)):
                raise FlatlensError(
                    f"{path} is no IDX file of bytes with {axes} axes: it begins with "
                    f"{magic.hex() or 'nothing'} instead of 000008{axes:02x}."
                )
            header = stream.read(4 * axes)
            shape = struct.unpack(f">{axes}I", header) if len(header) == 4 * axes else ()
            promised = math.prod(shape) if shape else 0
            content = stream.read(promised + 1)  # one more, to see the end of the file
    except (EOFError, zlib.error) as error:
        raise FlatlensError(f"{path} is cut short or damaged: {error}.") from error
    except gzip.BadGzipFile as error:
        raise FlatlensError(f"{path} is damaged or no gzip file: {error}.") from error
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    if not promised or len(content) != promised:
        there = "more" if len(content) > promised else f"{len(content)}"
        sizes = " x ".join(map(str, shape)) or "whole"
        raise FlatlensError(
            f"{path} is cut short or damaged: its header should promise as many bytes as follow, "
            f"but it says {sizes} and there are {there}."
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_cifar(path: Path) -> tuple[UInt8[np.ndarray, "n 3 32 32"], UInt8[np.ndarray, " n"]]:
    """Images and labels of one CIFAR-10 batch in the binary format: label and pixels in turn."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    if not len(content) or len(content) % CIFAR_RECORD:
        raise FlatlensError(
            f"{path} is cut short or no CIFAR-10 batch: its {len(content)} bytes are not a "
            f"whole number of records of {CIFAR_RECORD} bytes."
        )
    records = content.reshape(-1, CIFAR_RECORD)
    labels = records[:, 0]
    if (wrong := labels >= CIFAR_CLASSES).any():
        place = int(wrong.argmax())
        raise FlatlensError(
            f"{path} is no CIFAR-10 batch: record {place} has the label {labels[place]}, "
            f"but the classes are 0 to {CIFAR_CLASSES - 1}."
        )
    return records[:, 1:].reshape(-1, *CIFAR_IMAGE), labels


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, NDArray[np.generic]]:
    """Those of the arrays called `keys` that an npz file has; pickled objects are never loaded."""
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise FlatlensError(f"{path} is a single array; save it with numpy.savez(x=, y=).")
            return {key: file[key] for key in keys if key in file.files}
    except FlatlensError:
        raise
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if "Object arrays" in str(error):
            why = "it holds arrays of Python objects, which are never loaded; save numbers"
        else:
            why = "it is not a NumPy .npz file"
        raise FlatlensError(f"Cannot read {path}: {why}.") from error
