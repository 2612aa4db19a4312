"""Models that `flatlens train` trained, measured as the zoo measures published ones.

The images are the first test images of the run's own data. There are few outputs, so the pass is
exact: one product for each output in place of random directions and Lanczos.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatlens.errors import FlatlensError
from flatlens.passes.probing import probe
from flatlens.runs import Run
from flatlens.runs.layout import CHECKPOINT, CONFIG
from flatlens.training.config import Config
from flatlens.training.networks import build
from flatlens.training.placement import place
from flatlens.training.samples import load_data
from flatlens.training.state import below
from flatlens.training.surroundings import torch_settings
from flatlens.training.weight_files import read_state
from flatlens.zoo.measure_model import quantities_of
from flatlens.zoo.settings import OUTPUTS, Zoo

IMAGES = "the first test images of the run"


def trained_network(folder: Path) -> tuple[Config, nn.Module]:
    """Build the network of a run folder with the weights of its last checkpoint.

    Raises:
        FlatlensError: if the folder is no run of `flatlens train`, or its files do not fit.
    """
    if not (folder / CHECKPOINT).is_file():
        raise FlatlensError(f"{folder} has no {CHECKPOINT}; train the run first.")
    try:
        config = Config.from_dict(json.loads((folder / CONFIG).read_text())["config"], str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlatlensError(f"{folder / CONFIG} is missing or damaged ({error}).") from error
    network = build(config.model, **config.network_options)
    try:
        network.load_state_dict(below("network.", read_state(folder / CHECKPOINT)))
    except RuntimeError as error:
        raise FlatlensError(f"{folder / CHECKPOINT} does not fit {config.model}.") from error
    return config, network.eval()


def measure_trained(folder: Path, out: Path, n: int, **settings: Any) -> None:
    """Measure a trained run on its test images and write one record; skip what is done.

    Args:
        folder: the run folder of a training.
        out: the run folder of the measurement.
        n: number of test images.
        settings: further fields of `Zoo`.

    Raises:
        FlatlensError: if the run cannot be read or has fewer test images.
    """
    wanted = Zoo(IMAGES, n, source="trained", **settings)
    checkpoint = folder / CHECKPOINT
    if not checkpoint.is_file():
        raise FlatlensError(f"{folder} has no {CHECKPOINT}; train the run first.")
    weights = hashlib.sha256(checkpoint.read_bytes()).hexdigest()[:16]
    identity = {
        "weights": weights, "n": n, "outputs": wanted.outputs, "rho": wanted.rho,
        "perturbations": wanted.perturbations, "paper": wanted.paper, "seed": wanted.seed,
    }  # fmt: skip
    with Run.open(out, identity) as run:
        if not run.done:
            run.restore()
            run.append(_record(folder, wanted))
            run.finish()


def _record(folder: Path, settings: Zoo) -> dict[str, Any]:
    config, network = trained_network(folder)
    with torch_settings(config):
        data = load_data(config)
        if len(data.x_test) < settings.n:
            raise FlatlensError(f"{config.data} has only {len(data.x_test)} test images.")
        x, y = data.x_test[: settings.n], data.y_test[: settings.n]
        x, y = place(network, x, y, config.device, config.dtype)
        torch.manual_seed(settings.seed)
        p = probe(network, x, output=OUTPUTS[settings.outputs])
        sizes = {"parameters": sum(q.numel() for q in network.parameters()), "pixels": x.shape[-1]}
        return {"step": 0, **sizes} | quantities_of(network, x, y.tolist(), p, settings, None)
