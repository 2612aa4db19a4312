"""Standard errors by leaving out groups of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float, Int

Array = np.ndarray


def groups_of(n: int, groups: int, seed: int) -> Iterator[Int[Array, " k"]]:
    """Split n samples at random into groups of nearly equal size."""
    order = np.random.default_rng(seed).permutation(n)
    yield from np.array_split(order, min(groups, n))


def standard_errors(
    estimate: Callable[[Int[Array, " k"]], Float[Array, " q"]], n: int, groups: int, seed: int
) -> Float[Array, " q"]:
    """Return the delete-a-group jackknife errors of some statistics (Kott 2001).

    With G groups, and the statistic t_g of all samples except group g, the squared error is (G -
    1)/G sum_g (t_g - mean t)^2.

    Args:
        estimate: a function that takes the samples to leave out and returns the statistics of the
            others.
        n: number of samples.
        groups: number of groups.
        seed: seed of the split into groups.

    Returns:
        One error per statistic; NaN if a statistic is unknown without some group.

    >>> values = np.arange(40.0)
    >>> error = standard_errors(lambda out: np.array([np.delete(values, out).mean()]), 40, 40, 0)
    >>> bool(np.isclose(error[0], values.std(ddof=1) / 40**0.5))
    True
    """
    replicates = np.stack([estimate(left_out) for left_out in groups_of(n, groups, seed)])
    count = len(replicates)
    deviations = replicates - replicates.mean(0)
    return np.sqrt((count - 1) / count * (deviations**2).sum(0))
