"""Derivatives and activations that are exactly 0 in float32 though they are not 0.

A chain of two weights of 1e-30 has the derivative 1e-60, which is 0 in float32. The activation
after such a chain is 0, too. A dead unit gives a true 0. To distinguish the two cases, samples with
a 0 run again in both precisions. A network that is measured in half precision on request gets a
note instead.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from flatlens.capture.inputs import Inputs
from flatlens.capture.layout import Layout, split
from flatlens.capture.no_trace import float_copy
from flatlens.capture.recording import CapturePlan
from flatlens.errors import FlatlensError
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.independence import Layouts
from flatlens.passes.precision import NeedsFloat64Error
from flatlens.passes.products import gradients

ZERO_IN_HALF_PRECISION = (
    "a derivative or an activation of some sample is exactly 0 in half precision; where that is "
    'rounding and no dead unit, precision="wide" finds the number'
)


def zero_samples(chunk: ChunkColumns) -> Bool[Tensor, " b"]:
    """Return which samples have a derivative, or an input of a layer, that is exactly 0."""
    columns = chunk.columns
    sizes = [v[:, 0] for key, v in columns.items() if key[-1] == "singular"]
    if not sizes:
        measured = [name for name, path in chunk.paths.items() if path not in ("unused", "frozen")]
        sizes = [columns["parameter", name, "grad"] for name in measured]
    sizes += [v for key, v in columns.items() if key[-1] == "x_norm"]
    if not sizes:
        return torch.zeros(len(columns["output",]), dtype=torch.bool)
    return torch.stack([size.double() == 0 for size in sizes]).any(0)


def check_zeros(
    subject: Subject, inputs: Inputs, plan: CapturePlan, layouts: Layouts, start: int
) -> str:
    """Raise if a 0 in float32 is another number in float64.

    Args:
        subject: a float32 network.
        inputs: the samples of one chunk.
        plan: what earlier runs found out.
        layouts: where the samples lie in the inputs of the layers.
        start: the number of the first sample.

    Returns:
        A note if the network does not run in float64, else "".

    Raises:
        NeedsFloat64Error: if float32 lost a derivative or an activation of some sample.
    """
    single = _present(subject.run(inputs, plan, start), layouts)
    try:
        model = float_copy(subject.model, torch.float64)
        copied = Subject(model, torch.float64, subject.output, list(model.named_parameters()))
        double = _present(copied.run(inputs.floats(torch.float64), plan, start), layouts)
    except (FlatlensError, RuntimeError):
        return (
            f"a derivative or activation of sample {start} or a later one is exactly 0; the model "
            "does not run in float64, so it is not known whether float32 lost it"
        )
    places = min(single.shape[1], double.shape[1])
    lost = (double[:, :places] & ~single[:, :places]).any(1)
    if bool(lost.any()):
        raise NeedsFloat64Error(start + int(lost.nonzero()[0]))
    return ""


def _present(forward: Forward, layouts: Layouts) -> Bool[Tensor, "b k"]:
    """Return which derivatives and activations of each sample have an entry that is not 0.

    The derivative is that of a random combination of the outputs. It is 0 only where all are.
    """
    f, calls = forward.f, forward.recording.calls
    if len(calls) != len(layouts):  # the other precision calls other layers
        calls, layouts = [], ()
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(f.shape[1], generator=generator, dtype=torch.float64, device="cpu").to(f)
    edges = [*forward.edges, *(call.total or call.through for call in calls)]
    grads = gradients((f * v).sum(), edges, retain=False)
    activations = [call.x.detach() for call in calls]
    owners: list[Layout | None] = [*(Layout() for _ in forward.edges), *layouts, *layouts]
    absent = torch.zeros(len(f), dtype=torch.bool, device=f.device)
    return torch.stack(
        [
            absent if t is None else split(t, layout, len(f)).flatten(1).any(1)
            for t, layout in zip([*grads, *activations], owners, strict=True)
        ],
        1,
    )
