"""Random data sets that need no file: `synthetic:gaussians`, `synthetic:teacher`.

Each has `n` samples to train and `n` others to test from the same distribution. They depend on
`seed` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from flatlens.data.memory import refuse_beyond_memory
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
    """Draw one Gaussian cloud per class around a random centre of length 1.

    Args:
        n: number of samples to train, and as many to test.
        dim: number of inputs.
        classes: number of classes.
        noise: standard deviation of every coordinate.
        seed: seed of all random numbers.
        shape: shape of an input, such as (3, 32, 32), in place of `dim`.

    Returns:
        Inputs and classes of 2 n samples.

    Raises:
        FlatlensError: if a number is out of range, or the arrays do not fit into memory.

    >>> x, y = gaussians(n=3, dim=2, classes=2)
    >>> x.shape, y.shape
    ((6, 2), (6,))
    """
    shape = (dim,) if shape is None else tuple(shape)
    dim = math.prod(shape)
    _check(n=n, dim=min(shape), classes=classes, noise=noise, seed=seed)
    _refuse_too_many(4 * n * dim + classes * dim)
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
    """Draw normal inputs, labelled by a random network dim-hidden-classes (tanh).

    Args:
        n: number of samples to train, and as many to test.
        dim: number of inputs.
        classes: number of classes.
        noise: standard deviation of the noise on the network's outputs, which have size about 1.
            The label is the largest output after the noise was added.
        seed: seed of all random numbers.
        hidden: number of hidden units.

    Returns:
        Inputs and classes of 2 n samples.

    Raises:
        FlatlensError: if a number is out of range, or the arrays do not fit into memory.
    """
    _check(n=n, dim=dim, classes=classes, noise=noise, seed=seed, hidden=hidden)
    _refuse_too_many(2 * n * (dim + 2 * hidden + 3 * classes) + hidden * (dim + classes))
    draw = np.random.default_rng(seed)
    first_weight = draw.normal(size=(dim, hidden)) / math.sqrt(dim)
    second_weight = draw.normal(size=(hidden, classes)) / math.sqrt(hidden)
    x = draw.normal(size=(2 * n, dim))
    outputs = np.tanh(x @ first_weight) @ second_weight
    return x, (outputs + noise * draw.normal(size=outputs.shape)).argmax(axis=1)


def _check(noise: float, seed: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise FlatlensError(f"{name}={count} of synthetic data must be at least 1.")
    if not (noise >= 0 and math.isfinite(noise)) or seed < 0:
        raise FlatlensError(
            f"noise={noise} and seed={seed} of synthetic data must be finite and not negative."
        )


def _refuse_too_many(entries: int) -> None:
    """Refuse arrays beyond the memory: float64 numbers, and their copy in float32."""
    refuse_beyond_memory(12 * entries, "This synthetic data")


KINDS: dict[str, Callable[..., Arrays]] = {"gaussians": gaussians, "teacher": teacher}
