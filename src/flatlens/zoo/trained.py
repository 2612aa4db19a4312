"""Models that `flatlens train` trained, measured as the zoo measures published ones.

The images are the first test images of the run's own data. There are few outputs, so the pass is
exact, with one product per output instead of random directions and Lanczos.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatlens.errors import FlatlensError
from flatlens.passes.probing import probe
from flatlens.runs import Run, RunBusyError, read_runs
from flatlens.runs.layout import CHECKPOINT, CONFIG, RECORDS
from flatlens.runs.run_config import read_config
from flatlens.runs.tables import run_folders
from flatlens.training.config import Config
from flatlens.training.placement import place
from flatlens.training.progress import sweep_bar
from flatlens.training.samples import load_data
from flatlens.training.stored_network import check_checkpoint, stored_network
from flatlens.training.surroundings import torch_settings
from flatlens.zoo.figure_files import remove_figures
from flatlens.zoo.measure_model import quantities_of
from flatlens.zoo.settings import OUTPUTS, Zoo

if TYPE_CHECKING:
    import pandas as pd

IMAGES = "the first test images of the run"


def measure_trained(
    folder: Path, out: Path, n: int, *, facts: Mapping[str, str] | None = None, **settings: Any
) -> None:
    """Measure a trained run on its test images and write one record; skip what is done.

    Args:
        folder: the run folder of a training.
        out: the run folder of the measurement.
        n: number of test images.
        facts: texts that stand in the record beside the numbers.
        settings: further fields of `Zoo`.

    Raises:
        FlatlensError: if the run cannot be read or has fewer test images.
    """
    zoo_settings = Zoo(IMAGES, n, source="trained", **settings)
    check_checkpoint(folder)
    weights = hashlib.sha256((folder / CHECKPOINT).read_bytes()).hexdigest()[:16]
    identity = {
        "weights": weights,
        "n": n,
        "outputs": zoo_settings.outputs,
        "rho": zoo_settings.rho,
        "perturbations": zoo_settings.perturbations,
        "paper": zoo_settings.paper,
        "seed": zoo_settings.seed,
    }
    with Run.open(out, identity) as run:
        if not run.done:
            run.restore()
            run.append(_record(folder, zoo_settings) | dict(facts or {}))
            run.finish()


def _record(folder: Path, settings: Zoo) -> dict[str, Any]:
    config, network = stored_network(folder)
    network.eval()
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


def trained_folders(models: Sequence[str]) -> dict[str, Path]:
    """Return the run folders of trainings at or below the folders among some names of models.

    Args:
        models: what the user named: folders, or names of timm models.

    Returns:
        The folders by a short name. It is empty if no name is a folder.

    Raises:
        FlatlensError: if only some names are folders, or a folder has no run of `flatlens train`.
    """
    places = [Path(name) for name in models if Path(name).is_dir()]
    if not places:
        return {}
    if len(places) < len(models):
        raise FlatlensError(
            "Folders of runs and names of timm models are measured on other images; give one or "
            "the other."
        )
    folders: dict[str, Path] = {}
    for parent in places:
        below_parent = [f for f in run_folders(parent) if (f / CHECKPOINT).is_file()]
        if not below_parent:
            raise FlatlensError(f"{parent} has no run with a {CHECKPOINT}; train one first.")
        for folder in below_parent:
            inside = folder.relative_to(parent)
            folders[(Path(parent.resolve().name) / inside).as_posix()] = folder
    return folders


def models_of(folders: Mapping[str, Path]) -> dict[str, str]:
    """Return the name of the network that each run folder was trained with."""
    return {
        name: Config.from_dict(read_config(folder / CONFIG), str(folder / CONFIG)).model
        for name, folder in folders.items()
    }


def trained_zoo(
    folders: Mapping[str, Path], out: Path, n: int, *, progress: bool | None = None, **settings: Any
) -> pd.DataFrame:
    """Measure trained runs on their own test images, one run folder each below ``out``.

    Args:
        folders: run folders of trainings by the names to show.
        out: the folder for the records.
        n: number of test images.
        progress: show a progress bar. By default only on a terminal.
        settings: further fields of `Zoo`.

    Returns:
        ``read_runs(out)`` with `attrs` as those of `zoo`.

    Raises:
        FlatlensError: if no run can be measured.
    """
    skipped: dict[str, str] = {}
    busy: list[str] = []
    kinds = models_of(folders)
    with sweep_bar(len(folders), 0, progress) as show:
        for name, folder in folders.items():
            facts = {"model": name, "class": kinds[name]}
            try:
                measure_trained(folder, out / name, n, facts=facts, **settings)
            except RunBusyError:
                busy.append(name)
            except FlatlensError as error:
                skipped[name] = str(error)
            show(len(skipped), len(busy))
    if len(skipped) == len(folders):
        raise FlatlensError(next(iter(skipped.values())))
    frame = read_runs(out) if any(out.rglob(RECORDS)) else _nothing()
    if "model" not in frame:  # another process has not written its first record yet
        frame = _nothing()
    frame.attrs |= {"skipped": skipped, "busy": busy}
    remove_figures(out)
    return frame


def _nothing() -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({"run": [], "model": []})
