"""Files into arrays: IDX (MNIST and its kin), CIFAR-10 binary and python, NumPy's npz.

A file that is cut short, damaged or of another kind is refused by its name, in one sentence;
what comes back is whole.
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

from flatlens.errors import FlatlensError, first_line

CIFAR_CLASSES = 10
CIFAR_IMAGE = (3, 32, 32)  # red, green and blue planes, each row by row
CIFAR_RECORD = 1 + math.prod(CIFAR_IMAGE)  # the label comes first
PICKLED = ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")  # in a batch


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
    return records[:, 1:].reshape(-1, *CIFAR_IMAGE), _checked(path, records[:, 0].tolist())


def read_cifar_python(
    path: Path,
) -> tuple[UInt8[np.ndarray, "n 3 32 32"], UInt8[np.ndarray, " n"]]:
    """The same of one batch in the python format: a pickled dict of `data` and `labels`.

    A pickle can call anything. Of this one nothing is called, not even NumPy: its names stand for
    the arguments that it has for them, and any other name than those of a batch is refused.
    """
    try:
        with path.open("rb") as stream:
            batch = _Batch(stream, encoding="bytes").load()
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # damaged pickles raise whatever their next byte leads to
        told = first_line(error).rstrip(".")
        raise FlatlensError(f"{path} is cut short or no CIFAR-10 batch: {told}.") from error
    labels: Any = batch.get(b"labels") if isinstance(batch, dict) else None
    content = _bytes(batch.get(b"data")) if isinstance(labels, list) else None
    if not content or len(content) != len(labels) * math.prod(CIFAR_IMAGE):
        raise FlatlensError(
            f"{path} is no CIFAR-10 batch: it should have a list of labels and as many rows of "
            f"{math.prod(CIFAR_IMAGE)} bytes as data."
        )
    pixels = np.frombuffer(content, np.uint8).reshape(-1, *CIFAR_IMAGE)
    return pixels, _checked(path, labels)


class _Stored:
    """What stands in a pickle for something of NumPy: the arguments and the state it came with."""

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
    """The content of a pickled array of unsigned bytes, its rows one after the other."""
    match getattr(array, "state", None):
        case (_, (_, _), _Stored(arguments=(b"u1", *_)), 0, bytes(content)):
            return content
    return None


def _checked(path: Path, labels: list[Any]) -> UInt8[np.ndarray, " n"]:
    """Labels of a batch as an array, all of them classes of CIFAR-10."""
    for place, label in enumerate(labels):
        if label not in range(CIFAR_CLASSES):
            raise FlatlensError(
                f"{path} is no CIFAR-10 batch: record {place} has the label {label}, "
                f"but the classes are 0 to {CIFAR_CLASSES - 1}."
            )
    return np.asarray(labels, np.uint8)


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, NDArray[np.generic]]:
    """Those of the arrays called `keys` that an npz file has; pickled objects are never loaded."""
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise FlatlensError(f"{path} is a single array; save it with numpy.savez(x=, y=).")
            arrays = {key: file[key] for key in keys if key in file.files}
    except FlatlensError:
        raise
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # damaged files raise whatever their next byte leads to
        if "Object arrays" in str(error):
            why = "it holds arrays of Python objects, which are never loaded; save numbers"
        else:
            why = "it is damaged or not a NumPy .npz file"
        raise FlatlensError(f"Cannot read {path}: {why}.") from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):  # a file in the archive that is none of NumPy's
            raise FlatlensError(f"{path}: {key} is not a NumPy array.")
    return arrays
