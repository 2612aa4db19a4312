"""Replace parameters and hooks of modules, and put the old ones back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextlib.contextmanager
def swapped(
    model: nn.Module,
    parameter: Callable[[Tensor], Tensor | None],
    drop: Callable[[Any], bool] = lambda hook: False,
) -> Iterator[None]:
    """Replace parameters and drop forward hooks inside a ``with`` block.

    A parameter that several modules share is replaced by one tensor.

    Args:
        model: the module; its children are included.
        parameter: returns the replacement of a parameter, or None to keep it.
        drop: whether to drop a hook.
    """
    saved = [
        (module, {name: dict(module.__dict__[name]) for name in ("_parameters", *HOOKS)})
        for module in model.modules()
        if "_parameters" in module.__dict__
    ]
    stand_ins: dict[int, Tensor | None] = {}
    try:
        for module, registries in saved:
            for name, p in registries["_parameters"].items():
                if p is None:
                    continue
                if id(p) not in stand_ins:
                    stand_ins[id(p)] = parameter(p)
                if (stand_in := stand_ins[id(p)]) is not None:
                    module.__dict__["_parameters"][name] = stand_in
            for hooks in HOOKS:
                for key, hook in registries[hooks].items():
                    if drop(hook):
                        del module.__dict__[hooks][key]
        yield
    finally:
        for module, registries in saved:
            for name, known in registries.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(known)


def module_of(hook: Any) -> str:
    """Return the name of the Python module that defines a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))
