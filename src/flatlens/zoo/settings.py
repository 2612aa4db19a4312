"""The settings of a zoo: everything but the model that a record depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from flatlens.errors import FlatlensError
from flatlens.runs.layout import CONFIG
from flatlens.runs.run_config import read_config
from flatlens.training.placement import check_device
from flatlens.training.timm_models import CLASSES, weights_file
from flatlens.zoo.pictures import choose, digest, read_picture

OUTPUTS = {"sigmoid": torch.sigmoid, "logits": None}


@dataclass(frozen=True)
class Zoo:
    """The settings with which the models of a zoo are measured.

    Parameters
    ----------
    images
        Folder of pictures, looked through to any depth. A class number is read from the beginning
        of a name (012_cat.jpg) or of its folder, or from the order of 1000 class folders.
    n
        Number of pictures, chosen by their names.
    source
        "pretrained", "random", or a folder with weights by the model's name.
    outputs
        What is measured: sigmoid of the logits (as in the paper), or the logits.
    directions
        Random output directions per picture.
    perturbations
        Pairs of perturbed weights per picture for the sampled sharpness, Eq. 38; 0 for none.
    rho
        Size of the perturbations, relative to each weight.
    paper
        Also estimate both axes as the authors did: Eq. 46 with 50 perturbations per picture,
        Eq. 47 with 30 steps of Adam.
    seed
        Seed of the directions, the perturbations and random weights.
    threads
        CPU threads of torch in each process.
    device
        Where to compute: cpu, cuda or cuda:1.
    """

    images: str
    n: int = 100
    source: str = "pretrained"
    outputs: str = "sigmoid"
    directions: int = 8
    perturbations: int = 4
    rho: float = 0.1
    paper: bool = False
    seed: int = 0
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.outputs not in OUTPUTS:
            raise FlatlensError(f"outputs={self.outputs!r} is unknown; use sigmoid or logits.")
        if self.directions < 2 or self.perturbations == 1 or self.perturbations < 0:
            raise FlatlensError("Give two directions and two perturbations (or 0) or more.")
        if self.n < 2 or self.threads < 1 or not self.rho > 0:
            raise FlatlensError("Give two images or more, one thread or more, and rho above 0.")

    def identity(self, model: str) -> dict[str, Any]:
        """Return all settings that determine the record of a model; files count by content."""
        files, _ = choose(Path(self.images), self.n)
        source = self.source
        if source not in ("pretrained", "random"):
            source = f"file:{digest([weights_file(Path(source), model)])}"
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "device"}
        return {"model": model, **settings, "images": digest(files), "source": source}

    def check(self, engine: str = "local") -> None:
        """Raise for settings that would fail with every model."""
        check_source(self.source)
        check_device(self.device, here=engine == "local")  # workers of Dask may have other devices
        files, labels = choose(Path(self.images), self.n)
        for file in files:
            read_picture(file)
        if self.paper and labels is None:
            raise FlatlensError(
                f"Eq. 46 of the paper needs the classes of the images in {self.images}; begin "
                f"their names with a number below {CLASSES} (012_cat.jpg), or leave out --paper."
            )

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder with records of other settings: one figure shows the whole folder."""
        files, _ = choose(Path(self.images), self.n)
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        settings = {k: v for k, v in settings.items() if k not in ("device", "source", "images")}
        # images come near the end, because another n changes them too
        settings |= {"images": digest(files), "source": self.source == "random"}
        for path in sorted(folder.rglob(CONFIG)):
            stored = read_config(path)
            if not settings.keys() <= stored.keys():
                raise FlatlensError(f"{path.parent} is not a run of a zoo; choose another folder.")
            stored["source"] = stored["source"] == "random"
            for key, value in settings.items():
                if stored[key] != value:
                    raise FlatlensError(
                        f"{path.parent} was made with {_difference(key, stored[key], value)}; "
                        "choose another folder, or use the same settings."
                    )


def _difference(key: str, old: Any, new: Any) -> str:
    if key == "images":
        return "other images"
    if key == "source":
        return f"{'random' if old else 'trained'} weights"
    return f"{key}={old!r}, not {new!r}"


def check_source(source: str) -> None:
    """Refuse a source of weights that is neither a name nor a folder."""
    if source not in ("pretrained", "random") and not Path(source).is_dir():
        raise FlatlensError(f"{source} is not a folder; give one that has weights.")
