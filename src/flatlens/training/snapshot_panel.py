"""Further quantities of every snapshot of a run: spectrum and geometry."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import flatlens as fl
from flatlens.errors import FlatlensError
from flatlens.perturb import lambda_max
from flatlens.runs.layout import CONFIG, SNAPSHOTS
from flatlens.runs.run_config import read_config
from flatlens.training.config import Config
from flatlens.training.networks import build
from flatlens.training.placement import place
from flatlens.training.samples import load_data
from flatlens.training.surroundings import torch_settings
from flatlens.training.weight_files import read_state

GEOMETRY = ("participation_ratio", "intrinsic_dimension", "nc1")
SEPARATOR = "@"  # separates a quantity from the place where it was measured


def snapshot_panel(folder: Path) -> list[dict[str, Any]]:
    """Measure every snapshot of a run on the samples that its records are about.

    ``lambda_max`` is that of the loss of the training. ``stability_limit`` is (2 + 2 momentum)/lr:
    above it gradient descent with momentum is unstable on a quadratic (Cohen et al. 2021).
    Columns such as ``nc1@2.weight`` are those of ``representations`` at one place.

    Args:
        folder: a run folder of a training with ``snapshots``.

    Returns:
        One dict for each snapshot, with the key ``step``.

    Raises:
        FlatlensError: if the folder has no snapshots, or is damaged.
    """
    paths = sorted((folder / SNAPSHOTS).glob("*.safetensors"))
    if not paths:
        raise FlatlensError(f"{folder} has no snapshots; train it with snapshots = true.")
    config = Config.from_dict(read_config(folder / CONFIG), str(folder / CONFIG))
    records: list[dict[str, Any]] = []
    with torch_settings(config):
        torch.manual_seed(config.seed)
        network = build(config.model, **config.model_options)
        data = load_data(config)
        x, y = data.x_train[: config.samples], data.y_train[: config.samples]
        x, y = place(network, x, y, config.device, config.dtype)
        for path in paths:
            network.load_state_dict(read_state(path, wrappers=()))
            records.append({"step": int(path.stem), **_row(network, x, y, config)})
    return records


def _row(network: torch.nn.Module, x: Any, y: Any, config: Config) -> dict[str, float]:
    top = lambda_max(network, x, y, loss=config.loss)
    values = {
        "lambda_max": top.value if top.converged else math.nan,
        "stability_limit": (2 + 2 * config.momentum) / config.lr,
        "gauss_newton_lambda_max": fl.spectrum(network, x, loss=config.loss).lambda_max,
    }
    table = fl.representations(network, x, y, errors=False)
    for row in table.to_dict("records"):
        for name in GEOMETRY:
            values[f"{name}{SEPARATOR}{row['layer']}"] = float(row[name])
    return values
