"""Measure the network of a run folder at its last checkpoint; nothing is written."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import flatlens as fl
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.measurement import Measurement
from flatlens.training.placement import place
from flatlens.training.samples import load_data
from flatlens.training.stored_network import stored_network
from flatlens.training.surroundings import torch_settings


@no_type_check
@typed_arguments
def measure_run(
    folder: Path | str, *, models: Collection[str] = (), trust: bool = False
) -> Measurement:
    """Measure a run on the samples of its records.

    Only models that flatlens itself names are rebuilt (`mlp`, ..., `vit`, `timm:NAME`), because a
    run folder can come from a stranger.

    Args:
        folder: a run folder of `flatlens train`, `sweep` or `reproduce`. Other run folders do not
            say how to build their network.
        models: model factories of your own that may run, such as `["mymodel:build"]`.
        trust: let any factory run that the folder names.

    Raises:
        FlatlensError: if the folder has no checkpoint, is damaged, or names a model factory that
            is not allowed.
    """
    config, network = stored_network(Path(folder), models=models, trust=trust)
    with torch_settings(config):
        data = load_data(config)
        x, y = data.x_train[: config.samples], data.y_train[: config.samples]
        return fl.measure(network, *place(network, x, y, config.device, config.dtype))
