"""Parameters in the flat shards of ``FullyShardedDataParallel`` (FSDP1)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch import Tensor, nn

from flatlens.capture.weights.swap import swapped

NOTE = "FullyShardedDataParallel: each process gathered all parameters and holds them twice"


@contextlib.contextmanager
def summoned(model: nn.Module) -> Iterator[list[str]]:
    """Gather the parameters of ``FullyShardedDataParallel``, and call the modules inside directly.

    Every process must call this function.

    Yields:
        A note, if something was gathered.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        yield []
        return
    wrappers = [m for m in model.modules() if isinstance(m, fsdp.FullyShardedDataParallel)]
    if not wrappers:
        yield []
        return
    # FSDP frees the memory of its parameters. Results of the measurement may share it, so copy it.
    with (
        fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False),
        swapped(model, _copy),
    ):
        try:
            for wrapper in wrappers:
                wrapper.__dict__["forward"] = wrapper.module
            yield [NOTE]
        finally:
            for wrapper in wrappers:
                del wrapper.__dict__["forward"]


def _copy(p: Tensor) -> Tensor:
    return nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
