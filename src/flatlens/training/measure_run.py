"""Measure the network of a run folder at its last checkpoint; nothing is written."""

from __future__ import annotations

from pathlib import Path

import torch

import flatlens as fl
from flatlens.errors import FlatlensError
from flatlens.measurement import Measurement
from flatlens.runs.layout import CHECKPOINT, CONFIG
from flatlens.runs.run_config import read_config
from flatlens.training.config import Config
from flatlens.training.networks import build
from flatlens.training.placement import place
from flatlens.training.samples import load_data
from flatlens.training.state import below
from flatlens.training.surroundings import torch_settings
from flatlens.training.weight_files import read_state


def measure_run(folder: Path) -> Measurement:
    """Measure a run on the samples that its records are about.

    Args:
        folder: a run folder of `flatlens train`, `sweep` or `reproduce`. Other run folders do not
            say how to build their network.

    Raises:
        FlatlensError: if the folder has no checkpoint, or is damaged.
    """
    if not (folder / CHECKPOINT).is_file():
        raise FlatlensError(f"{folder} has no {CHECKPOINT} to measure.")
    config = Config.from_dict(read_config(folder / CONFIG), str(folder / CONFIG))
    with torch_settings(config):
        torch.manual_seed(config.seed)
        network = build(config.model, **config.network_options)
        try:
            network.load_state_dict(below("network.", read_state(folder / CHECKPOINT)))
        except RuntimeError as error:
            raise FlatlensError(f"{folder / CHECKPOINT} does not fit {config.model}.") from error
        data = load_data(config)
        x, y = data.x_train[: config.samples], data.y_train[: config.samples]
        return fl.measure(network, *place(network, x, y, config.device, config.dtype))
