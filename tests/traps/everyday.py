"""The few traps that `make test-fast` looks at: one or two of each family that matters daily."""

from collections.abc import Iterable
from typing import Any

import pytest

EVERYDAY = frozenset({
    "plain_mlp", "inplace_relu", "residual", "module_called_twice", "tied_linear_linear",
    "frozen_weight", "parameter_used_by_matmul", "conv2d_plain", "conv_grouped", "batchnorm2d_eval",
    "layernorm_on_tokens", "embedding_into_a_linear", "attention_self_batch_first",
    "tokens_time_first", "samples_scattered_over_experts", "gru", "weight_norm", "one_sample",
    "more_outputs_than_inputs", "output_in_a_dict", "lenet", "narrow_head", "dead_relu",
    "experts_in_one_parameter",
})  # fmt: skip


def mostly_slow(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test; all but those of EVERYDAY are marked `slow`."""
    return [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.slow) for n in names]
