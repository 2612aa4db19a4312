"""Several processes, each with a share of the samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatlens.errors import FlatlensError
from flatlens.probes import merge


def needs_group() -> None:
    """Raise if there is no process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise FlatlensError(
            "distributed=True needs a process group; call torch.distributed.init_process_group"
        )


def gathered(mine: Any) -> Any:
    """Gather an object (a probe or targets) from every process of the default group, by rank."""
    needs_group()
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine.cpu() if isinstance(mine, Tensor) else mine)
    return torch.cat(everyone) if isinstance(mine, Tensor) else merge(*everyone)
