"""Read arrays from files: IDX (MNIST and relatives), CIFAR-10 (binary and Python), NumPy's npz.

A file that is cut short, damaged, too large or of another kind raises a FlatlensError that names
it. No code from a file is ever run.
"""

from __future__ import annotations

import gzip
import math
import pickle
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from numpy.typing import NDArray

from flatlens.data.memory import refuse_beyond_memory
from flatlens.errors import FlatlensError, first_line

CIFAR_CLASSES = 10
CIFAR_IMAGE = (3, 32, 32)  # red, green and blue planes, each row by row
CIFAR_RECORD = 1 + math.prod(CIFAR_IMAGE)  # the label comes first
LARGEST_IDX = 1 << 29  # bytes of an array; FashionMNIST has 47 million
PICKLED = ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")  # in a batch


def read_idx(path: Path, axes: int) -> UInt8[np.ndarray, " ..."]:
    """Read an array of unsigned bytes from a gzipped IDX file.

    The format: two zero bytes, 8 for unsigned bytes, the number of axes; the axes as big-endian
    32-bit integers; the entries, last axis fastest.

    Args:
        path: the file.
        axes: number of axes that the array must have.

    Raises:
        FlatlensError: if the file is missing, damaged, or of another kind.
    """
    _check_regular(path)
    shape: tuple[int, ...] = ()
    try:
        with gzip.open(path) as stream:
            magic = stream.read(4)
            if magic != bytes((0, 0, 8, axes)):
                raise FlatlensError(
                    f"{path} is not an IDX file of bytes with {axes} axes: it begins with "
                    f"{magic.hex() or 'nothing'} instead of 000008{axes:02x}."
                )
            header = stream.read(4 * axes)
            shape = struct.unpack(f">{axes}I", header) if len(header) == 4 * axes else ()
            promised = math.prod(shape) if shape else 0
            if promised > LARGEST_IDX:
                raise OverflowError
            content = stream.read(promised + 1)  # one byte more, to check the end of the file
    except FlatlensError:
        raise
    except (EOFError, zlib.error) as error:
        raise FlatlensError(f"{path} is cut short or damaged: {error}.") from error
    except (OverflowError, MemoryError) as error:
        raise FlatlensError(
            f"{path} is damaged: its header promises {' x '.join(map(str, shape))} bytes."
        ) from error
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
    """Read images and labels of a CIFAR-10 batch in the binary format: label and pixels in turn."""
    _check_regular(path)
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
    return records[:, 1:].reshape(-1, *CIFAR_IMAGE), _checked(path, records[:, 0].tolist())


def read_cifar_python(
    path: Path,
) -> tuple[UInt8[np.ndarray, "n 3 32 32"], UInt8[np.ndarray, " n"]]:
    """Read images and labels of a CIFAR-10 batch in the Python format: a pickled dict.

    A pickle can call anything. Here nothing is called, not even NumPy: the three names of a batch
    become plain containers of their arguments, and every other name is refused.
    """
    _check_regular(path)
    try:
        with path.open("rb") as stream:
            batch = _Batch(stream, encoding="bytes").load()
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # a damaged pickle may raise anything
        reason = first_line(error).rstrip(".")
        raise FlatlensError(f"{path} is cut short or no CIFAR-10 batch: {reason}.") from error
    labels: Any = batch.get(b"labels") if isinstance(batch, dict) else None
    content = _bytes(batch.get(b"data")) if isinstance(labels, list) else None
    if not content or len(content) != len(labels) * math.prod(CIFAR_IMAGE):
        raise FlatlensError(
            f"{path} is not a CIFAR-10 batch: it should have a list of labels and as many rows of "
            f"{math.prod(CIFAR_IMAGE)} bytes as data."
        )
    pixels = np.frombuffer(content, np.uint8).reshape(-1, *CIFAR_IMAGE)
    return pixels, _checked(path, labels)


class _Stored:
    """Placeholder for a NumPy object in a pickle: its arguments and its state, never called."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Batch(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Stored]:
        if f"{module}.{name}" not in PICKLED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which was not called")
        return _Stored


def _bytes(array: Any) -> bytes | None:
    """Return the content of a pickled array of unsigned bytes, row after row, or None."""
    match getattr(array, "state", None):
        case (_, (_, _), _Stored(arguments=(b"u1", *_)), 0, bytes(content)):
            return content
    return None


def _checked(path: Path, labels: list[Any]) -> UInt8[np.ndarray, " n"]:
    """Return the labels of a batch as an array; all of them must be classes of CIFAR-10."""
    for place, label in enumerate(labels):
        if label not in range(CIFAR_CLASSES):
            raise FlatlensError(
                f"{path} is not a CIFAR-10 batch: record {place} has the label {label}, "
                f"but the classes are 0 to {CIFAR_CLASSES - 1}."
            )
    return np.asarray(labels, np.uint8)


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, NDArray[np.generic]]:
    """Read the arrays with the given names that an npz file has.

    Args:
        path: the file.
        keys: names of the arrays; names that the file lacks are left out.

    Raises:
        FlatlensError: if the file is damaged, holds Python objects (which are never loaded), or
            unpacks to more than the memory of this machine.
    """
    _check_regular(path)
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise FlatlensError(f"{path} is a single array; save it with numpy.savez(x=, y=).")
            available = [key for key in keys if key in file.files]
            _check_unpacked_size(path, file, available)
            arrays = {key: file[key] for key in available}
    except FlatlensError:
        raise
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # a damaged file may raise anything
        if "Object arrays" in str(error):
            reason = "it holds arrays of Python objects, which are never loaded; save numbers"
        else:
            reason = "it is damaged or not a NumPy .npz file"
        raise FlatlensError(f"Cannot read {path}: {reason}.") from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):  # another kind of file in the archive
            raise FlatlensError(f"{path}: {key} is not a NumPy array.")
    return arrays


def _check_unpacked_size(path: Path, file: Any, keys: Sequence[str]) -> None:
    """Refuse an archive that unpacks to more than the memory of this machine."""
    sizes = {info.filename.removesuffix(".npy"): info.file_size for info in file.zip.infolist()}
    refuse_beyond_memory(2 * sum(sizes.get(key, 0) for key in keys), f"The arrays of {path}")


def _check_regular(path: Path) -> None:
    """Refuse a pipe, a device or a folder; opening a pipe would wait forever."""
    if path.exists() and not path.is_file():
        raise FlatlensError(f"Cannot read {path}: it is not a regular file.")
