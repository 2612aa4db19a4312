"""Rebuild the network of a run folder, running no code that the user did not ask for."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from flatlens.errors import FlatlensError
from flatlens.files.reading import opened
from flatlens.runs.layout import CHECKPOINT, CONFIG
from flatlens.runs.run_config import read_config
from flatlens.training.config import Config
from flatlens.training.networks import build
from flatlens.training.state import below
from flatlens.training.trust import check_trusted
from flatlens.training.weight_files import read_state


def stored_network(
    folder: Path, *, models: Collection[str] = (), trust: bool = False
) -> tuple[Config, nn.Module]:
    """Build the network of a run folder with the weights of its last checkpoint.

    A run folder can come from a stranger. Only models that flatlens itself names are rebuilt,
    unless the caller allows more.

    Args:
        folder: a run folder of `flatlens train`, `sweep` or `reproduce`.
        models: model factories of the user that may run.
        trust: whether any factory that the folder names may run.

    Returns:
        The config of the run and its network.

    Raises:
        FlatlensError: if the folder is no run of `flatlens train`, names a factory that is not
            allowed, or its files do not fit.
    """
    check_checkpoint(folder)
    config = Config.from_dict(read_config(folder / CONFIG), str(folder / CONFIG))
    check_trusted([config.model], str(folder), trust=trust, named=models)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # for buffers that are random and not stored
        network = build(config.model, **config.network_options)
    try:
        network.load_state_dict(below("network.", read_state(folder / CHECKPOINT)))
    except RuntimeError as error:
        raise FlatlensError(f"{folder / CHECKPOINT} does not fit {config.model}.") from error
    return config, network


def check_checkpoint(folder: Path) -> None:
    """Refuse a run folder without a checkpoint, or with a link or a pipe in its place."""
    path = folder / CHECKPOINT
    if not path.exists() and not path.is_symlink():
        raise FlatlensError(f"{folder} has no {CHECKPOINT} to measure; train the run first.")
    with opened(path):
        pass
