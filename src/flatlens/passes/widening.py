"""The precision that a network is measured in: its own, or a wider one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from flatlens import tuning
from flatlens.algebra.wide_tensor import HALF
from flatlens.capture.no_trace import float_copy, in_float
from flatlens.capture.weights.widened import NOTE, widened
from flatlens.errors import FlatlensError
from flatlens.passes.precision import NeedsFloat64Error
from flatlens.probes import Probe

# Measures a model in a precision; notes say that it is not the user's model.
Attempt = Callable[[nn.Module, torch.dtype, list[str]], Probe]


def measured_in_float(model: nn.Module, attempt: Attempt) -> Probe:
    """Measure a network in float32 or float64.

    Half-precision networks are widened: small ones are copied to float32, large ones layer by layer
    where they are used. A network whose small derivatives are lost in float32 is copied to float64.

    Args:
        model: any network.
        attempt: measures it.

    Raises:
        FlatlensError: if the network cannot be measured, with the reason.
    """
    try:
        return _in_float32(model, attempt)
    except NeedsFloat64Error as error:
        if is_late(error):
            raise
        note = "small derivatives are lost in float32: measured on a float64 copy of the model"
        return attempt(float_copy(model, torch.float64), torch.float64, [note])


def _in_float32(model: nn.Module, attempt: Attempt) -> Probe:
    """Measure a network in its own precision, a half-precision one in float32."""
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.dtype in HALF)
    if size > tuning.LARGEST_COPIED_BYTES:
        try:
            with widened(model):
                in_float(model)  # it refuses what cannot be measured
                return attempt(model, torch.float32, [NOTE])
        except Exception as error:
            if is_late(error) or not _is_of_torch(error):
                raise
    model, dtype, notes = in_float(model)
    return attempt(model, dtype, notes)


def mark_late(error: Exception) -> None:
    """Note that batches before the failing one are gone, so that nothing can be tried again."""
    error.in_a_later_batch = True  # type: ignore[attr-defined]


def is_late(error: Exception) -> bool:
    """Whether an error came after the first batch."""
    return bool(getattr(error, "in_a_later_batch", False))


def _is_of_torch(error: BaseException | None) -> bool:
    """Whether torch is behind an error: some operation may not know widened parameters."""
    while error is not None:
        if not isinstance(error, FlatlensError):
            return True
        error = error.__cause__
    return False
