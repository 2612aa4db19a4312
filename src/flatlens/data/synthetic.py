"""Made-up data sets for which no file is needed: `synthetic:gaussians`, `synthetic:teacher`.

Each gives `n` samples to train and `n` others to test, drawn alike and settled by `seed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from flatlens.errors import FlatlensError

Arrays = tuple[Float[np.ndarray, "m ..."], Int[np.ndarray, " m"]]


def gaussians(
    n: int = 1_000,
    dim: int = 20,
    classes: int = 10,
    noise: float = 0.25,
    seed: int = 0,
    shape: Sequence[int] | None = None,
) -> Arrays:
    """One cloud a class: a random centre at distance 1 from 0, and `noise` in every coordinate.

    `shape`, such as (3, 32, 32), takes the place of `dim` for networks that read images.

    >>> x, y = gaussians(n=3, dim=2, classes=2)
    >>> x.shape, y.shape
    ((6, 2), (6,))
    """
    shape = (dim,) if shape is None else tuple(shape)
    dim = math.prod(shape)
    _check(n=n, dim=min(shape), classes=classes, noise=noise, seed=seed)
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(classes, dim))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    y = draw.integers(classes, size=2 * n)
    x = centres[y] + noise * draw.normal(size=(2 * n, dim))
    return x.reshape(2 * n, *shape), y


def teacher(
    n: int = 1_000,
    dim: int = 20,
    classes: int = 10,
    noise: float = 0.0,
    seed: int = 0,
    hidden: int = 20,
) -> Arrays:
    """Normal inputs, labelled by a random network dim-hidden-classes (tanh).

    The label is its largest output after normal numbers of size `noise` were added; without them
    an output has size about 1.
    """
    _check(n=n, dim=dim, classes=classes, noise=noise, seed=seed, hidden=hidden)
    draw = np.random.default_rng(seed)
    first = draw.normal(size=(dim, hidden)) / math.sqrt(dim)
    second = draw.normal(size=(hidden, classes)) / math.sqrt(hidden)
    x = draw.normal(size=(2 * n, dim))
    outputs = np.tanh(x @ first) @ second
    return x, (outputs + noise * draw.normal(size=outputs.shape)).argmax(axis=1)


def _check(noise: float, seed: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise FlatlensError(f"{name}={count} of synthetic data must be at least 1.")
    if not (noise >= 0 and math.isfinite(noise)) or seed < 0:
        raise FlatlensError(
            f"noise={noise} and seed={seed} of synthetic data must be finite and not negative."
        )


KINDS: dict[str, Callable[..., Arrays]] = {"gaussians": gaussians, "teacher": teacher}
