"""Parameters that are distributed tensors: ``fully_shard`` (FSDP2) and tensor parallel networks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flatlens.capture.weights.swap import module_of, swapped
from flatlens.errors import FlatlensError, first_line

FULLY_SHARDED, TENSOR_PARALLEL = "torch.distributed.fsdp", "torch.distributed.tensor"
# Relative tolerance of outputs: sharded matrix products sum in another order, at worst in float32.
CLOSE = 1e-3

NOTE = "sharded parameters: each process gathered all of them and holds a whole copy"


@contextlib.contextmanager
def gathered_shards(
    model: nn.Module, run: Callable[[nn.Module], Tensor] | None
) -> Iterator[list[str]]:
    """Gather distributed parameters. Every process of their mesh must call this function.

    Args:
        model: any module.
        run: run the model on a sample, to compare outputs with and without gathered parameters.

    Yields:
        A note, if something was gathered.

    Raises:
        FlatlensError: if a tensor parallel network gives other outputs with gathered parameters.
    """
    if TENSOR_PARALLEL not in sys.modules:
        yield []
        return
    from torch.distributed.tensor import DTensor

    hooks = {module_of(hook) for module in model.modules() for hook in _forward_hooks(module)}
    sharded = any(name.startswith(FULLY_SHARDED) for name in hooks)
    if not sharded and not any(isinstance(p, DTensor) for p in model.parameters()):
        yield []
        return
    _reshard(model)
    by_tensor = not sharded or any(name.startswith(TENSOR_PARALLEL) for name in hooks)
    before = _outputs(model, run) if by_tensor else None

    def whole(p: Tensor) -> Tensor | None:
        if not isinstance(p, DTensor):
            return None
        # full_tensor of a replicated parameter is the parameter's own memory: copy it.
        full = p.full_tensor().detach().clone()
        return nn.Parameter(full, requires_grad=p.requires_grad)

    def of_a_wrapper(hook: Any) -> bool:
        return module_of(hook).startswith((FULLY_SHARDED, TENSOR_PARALLEL))

    with swapped(model, whole, of_a_wrapper):
        if before is not None:
            _compare(model, run, before)
        yield [NOTE]


def _forward_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _reshard(model: nn.Module) -> None:
    """Free gathered copies of an earlier forward pass, because training changes only the shards."""
    for module in model.modules():
        if any(module_of(h).startswith(FULLY_SHARDED) for h in _forward_hooks(module)):
            module.reshard()  # type: ignore[operator]


def _outputs(model: nn.Module, run: Callable[[nn.Module], Tensor] | None) -> Tensor:
    """Return the outputs of a tensor parallel network before gathering, in evaluation mode."""
    if run is None:
        raise FlatlensError(
            "the network is tensor parallel (DTensor parameters), which this function does not "
            "support; use measure or probe, or gather the parameters with full_tensor()"
        )
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            f = run(model)
        return f.full_tensor() if hasattr(f, "full_tensor") else f
    finally:
        for module, training in modes:
            module.training = training


def _compare(model: nn.Module, run: Callable[[nn.Module], Tensor] | None, before: Tensor) -> None:
    """Raise if the outputs of the network differ once its parameters are gathered."""
    reason = "its outputs change"
    try:
        after = _outputs(model, run)
        same = after.shape == before.shape and bool(
            (after - before).norm() <= CLOSE * before.norm()
        )
    except (FlatlensError, RuntimeError) as error:
        same, reason = False, first_line(error)
    if not same:
        raise FlatlensError(
            "the network is tensor parallel (DTensor parameters) and does not run with gathered "
            f"parameters ({reason}); measure the network before parallelize_module"
        )
