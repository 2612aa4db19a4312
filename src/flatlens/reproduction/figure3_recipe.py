"""The models of Figure 3 that we train: families x recipes, from `recipes/fig3.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.training.config import Config


@dataclass(frozen=True)
class Trained:
    """One model of the figure: its family, how it was trained, and the config of that training."""

    family: str
    recipe: str
    config: Config


@dataclass(frozen=True)
class Figure3Recipe:
    """All models of a scale, how many test images are measured, and the accuracy they need."""

    models: list[Trained]
    images: int
    accuracy: float  # per cent of the test images

    @property
    def configs(self) -> list[Config]:
        return [model.config for model in self.models]


def figure3_recipe(scale: str) -> Figure3Recipe:
    """Read the models of a scale.

    Raises:
        FlatlensError: if there is no such scale.

    >>> len(figure3_recipe("desk").models), len(figure3_recipe("night").models)
    (12, 24)
    """
    content = _content()
    scales = content["scales"]
    if scale not in scales:
        raise FlatlensError(f"The recipe fig3 has no scale {scale}; use {', '.join(scales)}.")
    settings = dict(scales[scale])
    images = settings.pop("images", content["images"])
    accuracy = settings.pop("accuracy", content["accuracy"])
    return Figure3Recipe(list(_models(content, settings)), images, accuracy)


def figure3_scales() -> tuple[str, ...]:
    """Return the scales that Figure 3 can be trained at.

    >>> figure3_scales()
    ('desk', 'night', 'smoke')
    """
    return tuple(_content()["scales"])


def _content() -> dict[str, Any]:
    source = resources.files("flatlens.reproduction") / "recipes" / "fig3.toml"
    return tomllib.loads(source.read_text(encoding="utf-8"))


def _models(content: dict[str, Any], settings: dict[str, Any]) -> Iterator[Trained]:
    families = settings.pop("families", list(content["families"]))
    chosen = settings.pop("recipes", list(content["recipes"]))
    smaller = settings.pop("model_options", {})
    for recipe in chosen:
        for family in families:
            network = content["families"][family]
            own = network.get("recipes", {}).get(recipe, {})
            fields = content["base"] | content["recipes"][recipe] | own | settings
            fields |= {"model": network["model"]}
            fields |= {"model_options": network["model_options"] | smaller}
            yield Trained(family, recipe, Config.from_dict(fields, "fig3.toml"))
