"""Norm layers and PReLU: their affine part is split off, so that it can have a copy per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatlens.capture.recording import Recording
from flatlens.errors import FlatlensError


def affine(
    recording: Recording,
    normed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    view: tuple[int, ...],
) -> Tensor:
    """Return normed * weight + bias, with the parameters reshaped to ``view``."""
    event = recording.new_event(normed.shape)
    if weight is not None:
        normed = normed * recording.per_sample(weight, normed.shape, event, view)
    if bias is not None:
        normed = normed + recording.per_sample(bias, normed.shape, event, view)
    return normed


def channel_view(x: Tensor) -> tuple[int, ...]:
    """The shape under which one number per channel broadcasts against ``x``."""
    return (x.shape[1], *(1,) * (x.dim() - 2))


def standardised(input: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Batch norm in evaluation mode, without its affine part, as a formula.

    For one sample torch's own backward pass is wrong where the gradient arrives with channels last
    (torch 2.13 on the CPU).
    """
    view = channel_view(input)
    return (input - mean.reshape(view)) * (var.reshape(view) + eps).rsqrt()


def _layer_norm(
    recording: Recording,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normed = F.layer_norm(input, normalized_shape, None, None, eps)
    return affine(recording, normed, weight, bias, tuple(normalized_shape))


def _rms_norm(
    recording: Recording,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    normed = F.rms_norm(input, normalized_shape, None, eps)
    return affine(recording, normed, weight, None, tuple(normalized_shape))


def _group_norm(
    recording: Recording,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normed = F.group_norm(input, num_groups, None, None, eps)
    return affine(recording, normed, weight, bias, channel_view(input))


def _batch_norm(
    recording: Recording,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training and running_mean is None and recording.parameters.alone_make(input):
        return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)
    if training:
        where = recording.parameters.names.get(id(weight), "a BatchNorm layer")
        raise FlatlensError(
            f"{where.removesuffix('.weight')} normalises with the statistics of the batch, so "
            "samples depend on one another; give it running statistics (track_running_stats=True, "
            "trained or calibrated)"
        )
    if running_mean is None or running_var is None:  # torch raises and says what it needs
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    normed = standardised(input, running_mean, running_var, eps)
    return affine(recording, normed, weight, bias, channel_view(input))


def _instance_norm(
    recording: Recording,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    normed = F.instance_norm(
        input, running_mean, running_var, None, None, use_input_stats, momentum, eps
    )
    return affine(recording, normed, weight, bias, channel_view(input))


def _prelu(recording: Recording, input: Tensor, weight: Tensor) -> Tensor:
    view = channel_view(input) if weight.numel() > 1 else (1,) * max(input.dim() - 1, 0)
    slope = recording.per_sample(weight, input.shape, recording.new_event(input.shape), view)
    return torch.where(input > 0, input, slope * input)


def _handler(rewrite: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda recording, func, args, kwargs: rewrite(recording, *args, **kwargs)


HANDLERS: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _handler(_layer_norm),
    F.rms_norm: _handler(_rms_norm),
    F.group_norm: _handler(_group_norm),
    F.batch_norm: _handler(_batch_norm),
    F.instance_norm: _handler(_instance_norm),
    F.prelu: _handler(_prelu),
}
