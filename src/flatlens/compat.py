"""Make torchvision importable if its build does not match the installed torch.

The torchvision of the package index is not built for the CPU-only torch. Its import then fails
("operator torchvision::nms does not exist"), and so do the imports of timm, lightning and
transformers. Two operators are declared here, without an implementation, so that the import
succeeds. Nothing in this package calls them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[Any] = []  # a library's declarations last as long as the library


def make_torchvision_importable() -> None:
    """Declare the missing operators; call this before importing a library that uses torchvision.

    >>> make_torchvision_importable()
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            library.define(operator + SCHEMA)
        _declared.append(library)
        importlib.import_module("torchvision")
