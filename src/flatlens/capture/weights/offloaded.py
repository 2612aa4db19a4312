"""Parameters that accelerate keeps in main memory or on a disk until their module runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

NOTE = "offloaded parameters: all of them were loaded for the measurement"


@contextlib.contextmanager
def loaded(model: nn.Module) -> Iterator[list[str]]:
    """Load the offloaded parameters; the hooks of accelerate keep moving inputs between devices.

    A hook would unload a weight after its forward pass, and derivatives need the weight again.

    Yields:
        A note, if something was loaded.
    """
    offloading = [
        (module, hook)
        for module in model.modules()
        for hook in _hooks(getattr(module, "_hf_hook", None))
        if getattr(hook, "offload", False) and hasattr(hook, "weights_map")
    ]
    if not offloading:
        yield []
        return
    saved = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    tied = _Tied()
    try:
        for module, hook in offloading:
            _load(module, hook, tied)
            hook.offload = False
        yield [NOTE]
    finally:
        for module, parameters, buffers in saved:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for _, hook in offloading:
            hook.offload = True


def _hooks(hook: Any) -> list[Any]:
    """Return the hooks that a (possibly sequential) hook of accelerate consists of."""
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _load(module: nn.Module, hook: Any, tied: _Tied) -> None:
    """Load the tensors of one hook into their module."""
    inner = module.modules() if hook.place_submodules else [module]
    prefixes = {id(m): name for name, m in module.named_modules()}
    for owner in inner:
        prefix = prefixes[id(owner)]
        for registry in (owner._parameters, owner._buffers):
            for name, t in registry.items():
                if t is None or not t.is_meta:
                    continue
                full_name = f"{prefix}.{name}" if prefix else name
                value = hook.weights_map[full_name].to(hook.execution_device)
                is_tied = full_name in hook.tied_params_names
                registry[name] = tied.stand_in(t, value, is_tied)  # type: ignore[assignment]


class _Tied:
    """The parameters that modules shared before offloading, so that they share them again."""

    def __init__(self) -> None:
        self.by_memory: dict[tuple[Any, ...], Tensor] = {}
        self.named: list[Tensor] = []

    def stand_in(self, meta: Tensor, value: Tensor, is_tied: bool) -> Tensor:
        """Return the loaded tensor that replaces an offloaded one.

        Args:
            meta: the tensor on the meta device.
            value: its values.
            is_tied: whether accelerate says that several modules share it.
        """
        if not isinstance(meta, nn.Parameter):
            return value
        place = (value.data_ptr(), value.shape, value.stride())
        known = self.by_memory.get(place)
        if known is None and is_tied:  # tensors from the disk do not share memory
            known = next((p for p in self.named if _equal(p, value)), None)
        if known is None:
            known = nn.Parameter(value, requires_grad=meta.requires_grad)
            self.by_memory[place] = known
            if is_tied:
                self.named.append(known)
        return known


def _equal(p: Tensor, value: Tensor) -> bool:
    return p.shape == value.shape and p.device == value.device and torch.equal(p.detach(), value)
