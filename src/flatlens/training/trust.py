"""Decide whose code may run: models of flatlens, and code that the user names.

A run folder or a TOML file can come from a stranger. It may name a model that flatlens itself
knows. Any other model, and any function as a quantity, is code: it runs only if the user gives the
same name or says --trust.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

from flatlens.errors import FlatlensError

OWN_MODELS = frozenset(("mlp", "lenet", "vgg", "vgg11", "resnet18", "vit"))
OWN_PREFIXES = ("timm:", "hf:")  # model collections that flatlens reads by name


def is_own_model(model: str) -> bool:
    """Return whether flatlens itself knows the model, so that building it runs no foreign code.

    >>> is_own_model("mlp"), is_own_model("timm:resnet18"), is_own_model("subprocess:getoutput")
    (True, True, False)
    """
    return model in OWN_MODELS or model.startswith(OWN_PREFIXES)


def check_trusted(
    names: Iterable[str],
    where: str,
    *,
    trust: bool = False,
    named: Collection[str] = (),
    option: Literal["model", "quantities"] = "model",
) -> None:
    """Raise if a file names models or quantities whose code the user did not ask to run.

    Args:
        names: names of models, or of quantities, that the file holds.
        where: the file or folder, for the message.
        trust: the user trusts the file.
        named: factories, or functions, that the user named on the command line.
        option: the option of the command line that takes such names.

    Raises:
        FlatlensError: if a name stands for code, is not among ``named``, and ``trust`` is False.
    """
    noun = "model" if option == "model" else "quantity"
    for name in names:
        is_known = option == "model" and is_own_model(name)
        # a name without a colon is not code; it is refused as unknown later
        if ":" in name and not (trust or is_known or name in named):
            raise FlatlensError(
                f"{where} names the {noun} {name!r}, which is code that is not part of flatlens; "
                f"to run it give --{option} {name}, or --trust if you trust the whole file "
                f"({'models' if option == 'model' else option}=[{name!r}] or trust=True in Python)."
            )


def import_factory(model: str, folder: Path | str) -> None:
    """Import the module of a factory or function, looking for it in ``folder`` first.

    The folder leads the search path only during this import. Afterwards it comes last, so that the
    module can still import its neighbours but no file there can shadow an installed package.

    Args:
        model: name of a model (nothing happens if flatlens itself knows it) or of a function.
        folder: where the user's modules are.

    Raises:
        FlatlensError: if the import fails, or the module calls ``sys.exit``.
    """
    module, colon, _ = model.partition(":")
    if is_own_model(model) or not colon or module in sys.modules:
        return
    place = str(folder)
    sys.path.insert(0, place)
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise FlatlensError(_message(model, error)) from error
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)


def _message(model: str, error: BaseException) -> str:
    """Describe a failed import: what was raised, and where in the user's file."""
    reason = f"{type(error).__name__}: {error}".rstrip(".")[:300]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"Cannot import {model!r}: {reason}{where}."
