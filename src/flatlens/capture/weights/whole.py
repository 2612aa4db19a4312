"""Gather the parameters of a network while it is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from flatlens.capture.weights.flat_shards import summoned
from flatlens.capture.weights.offloaded import loaded
from flatlens.capture.weights.sharded import gathered_shards
from flatlens.errors import FlatlensError

Run = Callable[[nn.Module], Tensor]


@contextlib.contextmanager
def whole_weights(model: nn.Module, run: Run | None = None) -> Iterator[list[str]]:
    """Give every module its whole parameters, and restore the previous state at the end.

    Inside, the model is an ordinary one: parameters are plain tensors, and no hook of a wrapper
    moves them. Each process holds all parameters. A model that is neither sharded nor offloaded is
    not touched.

    Args:
        model: any module.
        run: run the model on a sample. Tensor parallel networks need it: their outputs must be the
            same with gathered parameters.

    Yields:
        Notes for the user.

    Raises:
        FlatlensError: if parameters cannot be gathered; the message names the wrapper.
    """
    _refuse_zero(model)
    with contextlib.ExitStack() as stack:
        notes = stack.enter_context(loaded(model))
        notes += stack.enter_context(summoned(model))
        notes += stack.enter_context(gathered_shards(model, run))
        yield notes


def _refuse_zero(model: nn.Module) -> None:
    """Raise for the sharded parameters of DeepSpeed, which are empty outside of their module."""
    for name, p in model.named_parameters():
        if hasattr(p, "ds_id") and p.numel() != getattr(p, "ds_numel", p.numel()):
            raise FlatlensError(
                f"{name} is sharded by DeepSpeed ZeRO-3, which is not supported; measure inside "
                "deepspeed.zero.GatheredParameters(model.parameters())"
            )
