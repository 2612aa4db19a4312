"""The numbers of one layer as a row of ``m.layers``."""

from __future__ import annotations

import functools
from typing import Any

from flatlens.metrics import dimension, layer_log_volumes
from flatlens.per_sample import (
    calls_that_share_the_gradient,
    mean_over_users,
    norm_per_sample,
    used_by,
    where_used,
)
from flatlens.probes import LayerProbe, Probe


def layer_row(p: Probe, layer: LayerProbe) -> dict[str, Any]:
    """Return one layer's numbers as a row of ``m.layers``; means over the samples that use it.

    ``sharpness`` and ``adaptive_sharpness`` belong to the layer's parameters, with all uses
    together. Rows that share a parameter therefore repeat its share of S, and their sum is larger
    than S. ``sharing_ratio`` also covers all calls; it is NaN if the parameter has uses that are
    not such calls.
    """
    mean = functools.partial(mean_over_users, layer)
    tied = mean(layer.grad_weight)
    # All calls of the samples that use this layer; the gradient of the weight is their sum.
    untied = sum(mean(where_used(q, q.untied)) for q in calls_that_share_the_gradient(p, layer))
    return {
        "name": layer.name,
        "kind": layer.kind,
        "weight": layer.weight,
        "positions": layer.positions,
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "norm": mean_norm(layer),
        "x_norm": mean(layer.x_norm),
        "mls": mean(layer.singular[:, 0]),
        "mls_through": mean(layer.singular_through[:, 0]),
        "log_volume": mean(layer_log_volumes(layer)),
        "local_dimension": mean(dimension(layer)),
        "sharpness": tied + mean(layer.grad_bias),
        "adaptive_sharpness": mean(layer.adaptive),
        "sharpness_untied": mean(layer.untied) + mean(layer.untied_bias),
        "sharing_ratio": tied / untied if untied > 0 else float("nan"),
        "bypass": float(layer.bypass.max()),
        "samples": int(used_by(layer).sum()),
    }


def mean_norm(layer: LayerProbe) -> float:
    """Return mean_i ||W_il|| over the samples that use the layer.

    The largest norm is factored out of the mean, so that equal norms give exactly that norm.
    """
    norms = norm_per_sample(layer)
    largest = float(norms.max())
    return largest * mean_over_users(layer, norms / largest) if largest > 0 else 0.0
