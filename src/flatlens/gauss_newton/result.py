"""``Spectrum``: the eigenvalues of the Gauss-Newton matrix and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from flatlens.algebra.block_lanczos import SpectralDensity
from flatlens.arguments import check_integer, no_type_check, real_number
from flatlens.errors import FlatlensError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = np.ndarray
FindVectors = Callable[[int], list[dict[str, Tensor]]]


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of G = (1/n) sum_i J_i^T H_i J_i; ``flatlens.spectrum`` returns it.

    J_i is the derivative of the outputs of sample i by all trainable parameters, and H_i the
    Hessian of the loss by the outputs (the identity for the loss of the paper). The eigenvalues
    that are not zero are also those of the empirical neural tangent kernel divided by n.

    Attributes:
        values: eigenvalues, largest first: all that are not zero where ``exact``, else the top
            ones.
        trace: Tr G, equal to ``gauss_newton_trace`` (and to ``sharpness`` for the paper's loss).
        trace_se: its standard error; 0 unless outputs were sampled.
        n: number of samples.
        parameters: number of trainable entries P, the size of G.
        loss: name of the loss.
        exact: whether ``values`` come from the whole Gram matrix.
        residuals: for each value, a distance within which G has an eigenvalue; 0 where exact.
        tolerance: share of ``lambda_max`` that a residual may reach.
        layers: eigenvalues of the diagonal block of each layer, if they were asked for.
        density: estimated density of all eigenvalues where not exact.
        notes: what the user should know.
    """

    values: Float[Array, " k"]
    trace: float
    trace_se: float
    n: int
    parameters: int
    loss: str
    exact: bool
    residuals: Float[Array, " k"]
    tolerance: float = 0.0
    layers: dict[str, Array] = field(default_factory=dict)
    density: SpectralDensity | None = None
    notes: tuple[str, ...] = ()
    find_vectors: FindVectors | None = field(default=None, repr=False, compare=False)

    @property
    def lambda_max(self) -> float:
        """The largest eigenvalue of G. (That of the Hessian is ``perturb.lambda_max``.)"""
        return float(self.values[0]) if len(self.values) else 0.0

    @property
    def converged(self) -> Bool[Array, " k"]:
        """Whether each value is within the tolerance of an eigenvalue."""
        return self.residuals <= self.tolerance * self.lambda_max

    @property
    def rank(self) -> int:
        """Number of eigenvalues above rounding; where not exact, of those in ``values``."""
        return int((self.values > 0).sum())

    @property
    def condition(self) -> float:
        """The largest eigenvalue over the smallest that is not zero; NaN where not exact."""
        if not self.exact:
            return float("nan")
        return self.lambda_max / float(self.values[-1]) if len(self.values) else float("nan")

    @property
    def participation_ratio(self) -> float:
        """(sum lambda)^2 / sum lambda^2: the number of directions that share the curvature.

        It is 1 where a single direction has all of it, and the rank where all are equal.
        """
        squares = self._sum(np.square)[0]
        return self.trace**2 / squares if squares > 0 else 0.0

    @property
    def participation_ratio_se(self) -> float:
        """Standard error of ``participation_ratio``; 0 where exact."""
        squares, error = self._sum(np.square)
        if squares == 0:
            return 0.0
        relative = np.hypot(2 * self.trace_se / max(self.trace, 1e-300), error / squares)
        return float(self.participation_ratio * relative)

    @no_type_check
    def effective_dimension(self, ridge: float) -> float:
        """Return sum_j lambda_j / (lambda_j + ridge): directions that are sharper than the ridge.

        MacKay (1992) calls it the number of well-determined parameters; it counts an eigenvalue far
        above the ridge as 1 and one far below as 0.

        Args:
            ridge: a positive number, such as the strength of weight decay.

        Raises:
            FlatlensError: if the ridge is not a positive number.
        """
        return self._sum(_shrinkage(ridge))[0]

    @no_type_check
    def effective_dimension_se(self, ridge: float) -> float:
        """Return the standard error of ``effective_dimension``; 0 where exact."""
        return self._sum(_shrinkage(ridge))[1]

    def _sum(self, function: Callable[[Array], Array]) -> tuple[float, float]:
        """Sum a function with f(0) = 0 over all eigenvalues; return it with its standard error."""
        if self.density is not None:
            return self.density.sum_of(function)
        return float(function(self.values).sum()), 0.0

    @no_type_check
    def vectors(self, k: int = 1) -> list[dict[str, Tensor]]:
        """Return the unit eigenvectors of the k largest eigenvalues, shaped like the parameters.

        Each vector takes one more backward pass over all samples. Its sign is arbitrary.

        Args:
            k: number of vectors.

        Returns:
            One dict per vector, with a tensor for the name of each trainable parameter.

        Raises:
            FlatlensError: if there are fewer values, or the model has changed since.
        """
        check_integer("k", k, 1)
        if k > self.rank:
            raise FlatlensError(
                f"k={k} is more than the number of values above zero, {self.rank}; give a lower k"
            )
        if self.find_vectors is None:
            raise FlatlensError("this spectrum has no model; compute it again with fl.spectrum")
        return self.find_vectors(k)

    @no_type_check
    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the eigenvalues by rank, on logarithmic axes.

        Args:
            ax: axes of matplotlib to draw into. None makes a new figure.

        Returns:
            The axes.
        """
        from flatlens.gauss_newton.plots import spectrum_plot

        return spectrum_plot(self, ax)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as a flat dict."""
        return {
            "lambda_max": self.lambda_max,
            "trace": self.trace,
            "participation_ratio": self.participation_ratio,
            "condition": self.condition,
            "rank": self.rank,
            "converged": bool(self.converged.all()),
            "exact": self.exact,
        }

    def __str__(self) -> str:
        how = "exact" if self.exact else "estimated"
        lines = [
            f"Gauss-Newton spectrum of {self.n} samples, loss {self.loss}, {how}",
            f"  eigenvalues           {len(self.values)} of {self.parameters}",
            f"  lambda_max            {self.lambda_max:.6g}",
            f"  trace                 {self.trace:.6g}",
            f"  participation ratio   {self.participation_ratio:.4g}",
            f"  condition             {self.condition:.3g}",
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _shrinkage(ridge: Any) -> Callable[[Array], Array]:
    number = real_number("ridge", ridge)
    if not number > 0:
        raise FlatlensError(f"ridge={ridge!r} is not positive; give a number above 0")
    return lambda values: values / (values + number)
