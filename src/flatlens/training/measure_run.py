"""The network of a run folder, measured as it was at its last checkpoint; nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import flatlens as fl
from flatlens.errors import FlatlensError
from flatlens.measurement import Measurement
from flatlens.runs.layout import CHECKPOINT, CONFIG
from flatlens.training.config import Config
from flatlens.training.networks import build
from flatlens.training.placement import place
from flatlens.training.train import _below, _load, _torch_settings
from flatlens.training.weight_files import read_state


def measure_run(folder: Path) -> Measurement:
    """Quantities, layers and inequalities on the samples that the run itself was measured on.

    For runs of `flatlens train`, `sweep` and `reproduce`: others do not say how to build their
    network.
    """
    if not (folder / CHECKPOINT).is_file():
        raise FlatlensError(f"{folder} has no {CHECKPOINT} to measure.")
    try:
        config = Config.from_dict(json.loads((folder / CONFIG).read_text())["config"], str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise FlatlensError(f"{folder / CONFIG} is missing or damaged ({error}).") from error
    with _torch_settings(config):
        torch.manual_seed(config.seed)
        network = build(config.model, **config.model_options)
        try:
            network.load_state_dict(_below("network.", read_state(folder / CHECKPOINT)))
        except RuntimeError as error:
            raise FlatlensError(f"{folder / CHECKPOINT} does not fit {config.model}.") from error
        data = _load(config)
        x, y = data.x_train[: config.samples], data.y_train[: config.samples]
        return fl.measure(network, *place(network, x, y, config.device, config.dtype))
