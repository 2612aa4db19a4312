"""The precision that a network is measured in: its own, or a wider one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from flatlens import tuning
from flatlens.algebra.wide_tensor import HALF, free_scratch
from flatlens.capture.inputs import NotFiniteError
from flatlens.capture.no_trace import float_copy, in_float, name_of, precisions
from flatlens.capture.weights.widened import NOTE, widened
from flatlens.errors import FlatlensError, first_line
from flatlens.passes.precision import ComputesInFloat32Error, NeedsFloat64Error
from flatlens.passes.request import Precision
from flatlens.probes import Probe

TORCH_NAMES = ("Half", "BFloat16")  # torch's names of precisions that an operation does not support
# Measures a model in a precision; with notes its inputs are converted to that precision.
Attempt = Callable[[nn.Module, torch.dtype, list[str]], Probe]


def measured(model: nn.Module, precision: Precision, attempt: Attempt) -> Probe:
    """Measure a network.

    Args:
        model: any network.
        precision: "model" runs a half-precision network in its own precision, "wide" in float32.
            Networks of float32 and float64 are the same under both.
        attempt: measures it.

    Raises:
        FlatlensError: if the network cannot be measured, with the reason.
    """
    half = [d for d in precisions(model)[1] if d in HALF] if precision == "model" else []
    if half:
        return _in_half(model, max(half, key=lambda dtype: torch.finfo(dtype).eps), attempt)
    return _in_float(model, attempt)


def _in_half(model: nn.Module, half: torch.dtype, attempt: Attempt) -> Probe:
    """Measure a network in its own half precision.

    Raises:
        FlatlensError: if a number leaves the range of this precision (the message names the
            sample), or if an operation does not support it.
    """
    name = name_of(half)
    note = (
        f'precision="model": outputs and derivatives are computed in {name}; norms, spectra and '
        "sums of them in float32 and float64"
    )
    try:
        return attempt(model, half, [note])
    except NotFiniteError as error:
        raise FlatlensError(
            f"the {error.what} of sample {error.sample} is not finite in {name}; use the default, "
            'precision="wide", which computes in float32, or remove the sample'
        ) from error
    except (FlatlensError, RuntimeError) as error:
        if not any(word in str(error) for word in TORCH_NAMES):
            raise
        raise FlatlensError(
            f"the network does not run in {name} here ({first_line(error)}); use the default, "
            'precision="wide", which computes in float32'
        ) from error
    finally:
        free_scratch()


def _in_float(model: nn.Module, attempt: Attempt) -> Probe:
    """Measure a network in float32 or float64.

    Half-precision networks are widened: small ones are copied to float32, large ones layer by layer
    where they are used. A network whose small derivatives are lost in float32 is copied to float64.

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
                in_float(model)  # raises if the model cannot be measured
                return attempt(model, torch.float32, [NOTE])
        except Exception as error:
            if is_late(error) or not _is_of_torch(error):
                raise
    model, dtype, notes = in_float(model)
    try:
        return attempt(model, dtype, notes)
    except ComputesInFloat32Error:  # what is coarsest limits the digits
        return attempt(model, torch.float32, notes)


def mark_late(error: Exception) -> None:
    """Mark an error after the first batch: earlier batches are gone, so no retry is possible."""
    error.in_a_later_batch = True  # type: ignore[attr-defined]


def is_late(error: Exception) -> bool:
    """Whether an error came after the first batch."""
    return bool(getattr(error, "in_a_later_batch", False))


def _is_of_torch(error: BaseException | None) -> bool:
    """Whether torch raised an error, because an operation may not support widened parameters."""
    while error is not None:
        if not isinstance(error, FlatlensError):
            return True
        error = error.__cause__
    return False
