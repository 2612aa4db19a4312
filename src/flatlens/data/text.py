"""Text files as sequences of tokens: `text:FILE?tokenizer=gpt2&length=64`.

The samples are consecutive pieces of `length` tokens. The target of a sample is the token that
follows it. The first nine tenths of the pieces train, the rest tests.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch

from flatlens.compat import make_torchvision_importable
from flatlens.data.arrays import Data
from flatlens.errors import FlatlensError, first_line

BYTES = "bytes"
MOST_BYTES = 1 << 30


def read_text(path: Path, tokenizer: str = BYTES, length: int = 64) -> Data:
    """Read a text file as sequences of tokens.

    Args:
        path: a file in UTF-8.
        tokenizer: "bytes" (256 tokens), or the name or folder of a tokenizer of Transformers.
        length: tokens of a sequence.

    Raises:
        FlatlensError: if the file cannot be read or is too short, or the tokenizer is unknown.
    """
    if length < 1:
        raise FlatlensError(f"length={length} of {path} is not a number of tokens; give 1 or more.")
    text = _text(path)
    tokens, classes = _tokens(text, tokenizer)
    pieces = (len(tokens) - 1) // length
    if pieces < 2:
        raise FlatlensError(
            f"{path} has {len(tokens):,} tokens; two sequences of length={length} need "
            f"{2 * length + 1:,}."
        )
    x = torch.tensor(tokens[: pieces * length]).reshape(pieces, length)
    y = torch.tensor(tokens[length : pieces * length + 1 : length])
    n = max(1, min(pieces - 1, pieces * 9 // 10))
    return Data(x[:n], y[:n], x[n:], y[n:], classes=classes)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise FlatlensError(f"{path} is larger than 1 GiB; give a part of it.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise FlatlensError(f"{path} is not UTF-8 text (byte {error.start}).") from error


def _tokens(text: str, tokenizer: str) -> tuple[list[int], int]:
    """Return the tokens, and how many different ones there can be."""
    if tokenizer == BYTES:
        return list(text.encode()), 256
    make_torchvision_importable()
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise FlatlensError(
            "A tokenizer needs pip install 'flatlens[transformers]'; tokenizer=bytes needs nothing."
        ) from error
    try:
        encoder = library.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except Exception as error:  # of the hub, a file, or a tokenizer's own code
        raise FlatlensError(
            f"Cannot load the tokenizer {tokenizer}: {first_line(error).rstrip('.')}."
        ) from error
    return encoder(text, add_special_tokens=False)["input_ids"], len(encoder)
