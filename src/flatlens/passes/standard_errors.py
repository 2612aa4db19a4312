"""Standard errors of a sketch, from the spread over its random directions.

An estimate +- t(m - 1) times its error covers the exact value in 93 to 97 % of cases, from two
directions on (``algebra/student.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatlens.algebra.student import log_scale_error
from flatlens.metrics import METRICS, matrix_normalized_sharpness, mls, nmls
from flatlens.passes.columns import by_slot, over_directions
from flatlens.passes.needs import INPUT_SPECTRUM
from flatlens.passes.segments import Key
from flatlens.per_sample import norm_per_sample, used_by
from flatlens.probes import Probe


class Replicates:
    """Sums over the samples of one chunk, for each direction and each column that is a mean.

    Attributes:
        count: number of directions.
        samples: number of samples of the chunk.
    """

    def __init__(self) -> None:
        self.count = 0
        self.samples = 0
        self._series: dict[Key, list[Tensor]] = {}

    def add(self, columns: Mapping[Key, Tensor]) -> None:
        """Add one direction."""
        self.count += 1
        for key, column in columns.items():
            self.samples = len(column)
            if over_directions(key) == "mean":
                self._series.setdefault(key, []).append(column.double().sum(0))

    def count_layers_by_slot(self, numbers: list[int]) -> None:
        """Count layers by slot; ``numbers`` holds the slot of each call."""
        self._series = by_slot(self._series, numbers)

    def total(self, weights: Mapping[Key, float]) -> Tensor | None:
        """Return sum_k weight_k column_k for each direction, or None if nothing is summed.

        A layer that no sample of the chunk uses contributes nothing.
        """
        total = sum(
            weight * torch.stack(self._series[key])
            for key, weight in weights.items()
            if key in self._series
        )
        return total if isinstance(total, Tensor) else None

    def sharpness(self) -> Tensor:
        """Return the sum over samples of the squared gradients, for each direction."""
        keys = [key for key in self._series if key[0] == "parameter" and key[-1] == "grad"]
        if not keys:
            return torch.zeros(2, device="cpu")
        return torch.stack([torch.stack(self._series[key]) for key in keys]).sum(0)


@dataclass(frozen=True)
class ProductErrors:
    """The largest errors of sigma_1 that errors of products with the Jacobian can cause.

    Attributes:
        at_input: errors at the input, summed over samples.
        at_layers: errors at layers, summed over samples and layers.
    """

    at_input: float
    at_layers: float

    def of_quantities(self, p: Probe, needs: frozenset[str]) -> dict[str, float]:
        """Return the errors of the quantities that are computed from largest singular values."""
        errors = {}
        for total, base, names in (
            (self.at_input, mls, {"mls": 1, "normalized_mls": 2}),
            (self.at_layers, nmls, {"nmls": 1, "nmls_through": 1, "weighted_nmls": 1}),
        ):
            size = float(base.samples(p).mean()) if base.needs <= needs else np.nan
            for name, power in names.items():
                if METRICS[name].needs <= needs and not np.isnan(size):
                    relative = total / (p.n * size) if size > 0 else 0.0
                    errors[name] = power * relative * float(METRICS[name](p))
        return errors


def network_errors(
    p: Probe, replicates: Sequence[Replicates], spread: float, needs: frozenset[str]
) -> dict[str, float]:
    """Compute the standard errors of the network's requested quantities.

    Args:
        p: the probe.
        replicates: one per chunk.
        spread: summed squared standard errors of the samples' participation ratios.
        needs: names of ``passes.needs`` that the pass computed.
    """
    layers = range(len(p.layers))
    sums: dict[str, list[Key]] = {
        "sharpness": [("parameter", q.name, "grad") for q in p.parameters],
        "adaptive_sharpness": [("parameter", q.name, "adaptive") for q in p.parameters],
        "sharpness_untied": [
            ("layer", i, name) for i in layers for name in ("untied", "untied_bias")
        ],
        "input_invariant_mls": [("input", "invariant")],
    }
    errors = {
        name: _mean_error(dict.fromkeys(keys, 1.0), replicates, p.n)
        for name, keys in sums.items()
        if METRICS[name].needs <= needs
    }
    if matrix_normalized_sharpness.needs <= needs:
        plain, value = _normalized_error(p, replicates), matrix_normalized_sharpness(p)
        errors["matrix_normalized_sharpness"] = log_scale_error(value, plain, _fewest(replicates))
    if INPUT_SPECTRUM in needs:
        errors["local_dimension"] = spread**0.5 / p.n
    return errors


def layer_errors(p: Probe, replicates: Sequence[Replicates]) -> list[dict[str, float]]:
    """Compute the standard errors of each layer's quantities."""
    columns = {
        "sharpness": ("grad_weight", "grad_bias"),
        "adaptive_sharpness": ("adaptive",),
        "sharpness_untied": ("untied", "untied_bias"),
    }
    return [
        {
            name: _mean_error(
                {("layer", i, column): 1.0 for column in summed}, replicates, int(used_by(q).sum())
            )
            for name, summed in columns.items()
            if not np.isnan(getattr(q, summed[0])).all()
        }
        for i, q in enumerate(p.layers)
    ]


def _normalized_error(p: Probe, replicates: Sequence[Replicates]) -> float:
    """Return the standard error of sum_l sqrt(mean_i ||W_il||^2 w_il), linearised in w_il."""
    norms = [norm_per_sample(q) for q in p.layers]
    roots = [
        float(np.sqrt((k**2 * q.grad_weight).mean())) for k, q in zip(norms, p.layers, strict=True)
    ]
    totals, start = [], 0
    for chunk in replicates:  # all samples of a chunk use the same weights
        slopes: dict[Key, float] = {
            ("layer", i, "grad_weight"): float(0.5 * k[start] ** 2 / root)
            for i, (k, root) in enumerate(zip(norms, roots, strict=True))
            if root > 0
        }
        totals.append(chunk.total(slopes))
        start += chunk.samples
    variance = 0.0
    for squared_error in _squared_errors(totals):
        variance += squared_error
    return variance**0.5 / p.n


def _mean_error(weights: Mapping[Key, float], replicates: Sequence[Replicates], n: int) -> float:
    """Return the standard error of sum_k weight_k mean_i column_k, which is a mean of squares."""
    totals = [total for r in replicates if (total := r.total(weights)) is not None]
    means = torch.stack([total.mean() for total in totals]).tolist() if totals else []
    value = sum(means) / n
    return log_scale_error(value, _error(weights, replicates, n), _fewest(replicates))


def _fewest(replicates: Sequence[Replicates]) -> int:
    """Return the smallest number of directions of any chunk."""
    return min(r.count for r in replicates)


def _error(weights: Mapping[Key, float], replicates: Sequence[Replicates], n: int) -> float:
    """Return the plain standard error of sum_k weight_k mean_i column_k."""
    variance = 0.0
    for squared_error in _squared_errors([chunk.total(weights) for chunk in replicates]):
        variance += squared_error
    return variance**0.5 / n


def _squared_errors(totals: Sequence[Tensor | None]) -> list[float]:
    """Return the squared standard error of each total over directions, read at once."""
    present = [total for total in totals if total is not None]
    if not present:
        return []
    variances = torch.stack([total.var() for total in present]).tolist()
    pairs = zip(variances, present, strict=True)
    return [variance / len(total) for variance, total in pairs]
