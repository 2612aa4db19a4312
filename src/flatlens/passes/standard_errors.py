"""Standard errors of a sketch, from the spread over its random directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from flatlens.passes.columns import Key, over_directions
from flatlens.probes import Probe


class Replicates:
    """Sums over the samples of one chunk by direction, of all columns that are means."""

    def __init__(self) -> None:
        self.count = 0
        self._series: dict[Key, list[Tensor]] = {}

    def add(self, columns: Mapping[Key, Tensor]) -> None:
        """Add one direction."""
        self.count += 1
        for key, column in columns.items():
            if over_directions(key) == "mean":
                self._series.setdefault(key, []).append(column.double().sum(0))

    def total(self, weights: Mapping[Key, float]) -> Tensor | None:
        """sum_k weight_k column_k by direction, or None where nothing is summed."""
        total = sum(weight * torch.stack(self._series[key]) for key, weight in weights.items())
        return total if isinstance(total, Tensor) else None

    def sharpness(self) -> Tensor:
        """The sum over samples of the squared gradients, by direction."""
        keys = [key for key in self._series if key[0] == "parameter" and key[-1] == "grad"]
        if not keys:
            return torch.zeros(2, device="cpu")
        return torch.stack([torch.stack(self._series[key]) for key in keys]).sum(0)


def network_errors(p: Probe, replicates: Sequence[Replicates], spread: float) -> dict[str, float]:
    """Standard errors of the network's quantities.

    Args:
        p: the probe.
        replicates: one per chunk.
        spread: summed squared standard errors of the samples' participation ratios.
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
        name: _error(dict.fromkeys(keys, 1.0), replicates, p.n) for name, keys in sums.items()
    }
    # sum_l ||W_l|| sqrt(mean_i w_il): its derivative by the means
    slopes: dict[Key, float] = {
        ("layer", i, "grad_weight"): float(0.5 * q.norm / np.sqrt(q.grad_weight.mean()))
        for i, q in enumerate(p.layers)
        if q.grad_weight.any()
    }
    errors["matrix_normalized_sharpness"] = _error(slopes, replicates, p.n)
    errors["local_dimension"] = spread**0.5 / p.n
    return errors


def layer_errors(p: Probe, replicates: Sequence[Replicates]) -> list[dict[str, float]]:
    """Standard errors of each layer's quantities."""
    columns = {
        "sharpness": ("grad_weight", "grad_bias"),
        "adaptive_sharpness": ("adaptive",),
        "sharpness_untied": ("untied", "untied_bias"),
    }
    return [
        {
            name: _error({("layer", i, column): 1.0 for column in summed}, replicates, p.n)
            for name, summed in columns.items()
        }
        for i in range(len(p.layers))
    ]


def _error(weights: Mapping[Key, float], replicates: Sequence[Replicates], n: int) -> float:
    """The standard error of sum_k weight_k mean_i column_k."""
    variance = 0.0
    for chunk in replicates:
        total = chunk.total(weights)
        if total is not None:
            variance += float(total.var()) / len(total)
    return variance**0.5 / n
