"""Check that samples do not depend on one another, and that each row is assigned to its sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor

from flatlens.algebra.looks import unusual
from flatlens.capture.inputs import COUPLED, Inputs, check_alone
from flatlens.capture.layout import Layout, closeness
from flatlens.capture.recording import CapturePlan, Recording
from flatlens.errors import FlatlensError
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.names import layer_name
from flatlens.passes.products import gradients

Layouts = Sequence[Layout | None]


class NeedsSinglesError(Exception):
    """Raised if a batch must be measured one sample at a time; the message is the reason."""


def check_subset(
    subject: Subject,
    run: Callable[[Inputs, CapturePlan], Forward],
    inputs: Inputs,
    forward: Forward,
    plan: CapturePlan,
    layouts: Layouts,
) -> None:
    """Run a subset of the batch again: its outputs and layer inputs must match the full batch.

    Raises:
        FlatlensError: if a sample's output changes with the other samples.
        NeedsSinglesError: if the rows of a layer cannot be assigned to samples.
    """
    if inputs.n == 1:
        return
    calls, batch = forward.recording.calls, inputs.n
    subset = slice(1, None, max(2, batch // 4 | 1))  # an odd step mixes even and odd
    few = run(inputs.take(subset), plan)
    again = partial(subject.outputs_alone, inputs.take(subset))
    check_alone(forward.f[subset], few.f, again, subject.dtype)
    if not len(calls) == len(few.recording.calls) == len(layouts):
        raise NeedsSinglesError("the number of layer calls depends on the samples")
    matches = [
        _matches(layout, call.x, batch, other.x, len(few.f), subset)
        for call, other, layout in zip(calls, few.recording.calls, layouts, strict=True)
    ]
    if matches and unusual(~_together(matches).all()):
        call = calls[_together(matches).tolist().index(False)]
        name = layer_name(call.layer, subject)
        raise NeedsSinglesError(
            f"the order of samples inside the input of {name} changes from batch to batch"
        )
    if len(few.f) > 1 and _values_cannot_identify(few.recording, layouts):
        check_owners(subject, few, layouts, slice(0, len(few.f) // 2))


def _matches(
    layout: Layout | None, x: Tensor, batch: int, x_few: Tensor, few: int, subset: slice
) -> Bool[Tensor, ""]:
    """Compare a layer's input of a subset with the full batch; the result is not read yet."""
    differs = torch.zeros((), dtype=torch.bool, device=x.device)
    if layout is None or not (layout.fits(x, batch) and layout.fits(x_few, few)):
        return differs
    a, b = layout.split(x, batch)[subset], layout.split(x_few, few)
    return closeness(a, b) if a.shape == b.shape else differs


def _together(flags: Sequence[Bool[Tensor, ""]]) -> Bool[Tensor, " k"]:
    """Stack truth values, because on a device each read makes the host wait."""
    return torch.stack([flag.to(flags[0].device) for flag in flags])


def _values_cannot_identify(recording: Recording, layouts: Layouts) -> bool:
    """Whether some samples have identical rows, so that values cannot identify a sample."""
    if recording.copies or recording.lookups:
        return True
    equal = []
    for call, layout in zip(recording.calls, layouts, strict=True):
        assert layout is not None
        sample, other, *_ = layout.split(call.x, recording.batch)
        equal.append((sample == other).all())
    return bool(equal) and unusual(_together(equal).any())


def check_inputs(forward: Forward) -> None:
    """Raise if the outputs of a sample have a derivative with respect to another sample's input.

    The check needs no layer, so it also works if samples are then measured one at a time.

    Raises:
        FlatlensError: if they reach the input of another sample.
    """
    batch = len(forward.f)
    for i in range(batch):
        mixed = (forward.f[i] * forward.f[i].detach().cos()).sum()
        others = _others(batch, slice(i, i + 1), forward.f)
        for grad in gradients(mixed, forward.edges, True):
            if grad is not None:
                size = grad.abs()
                if bool(_reach(size, others)):
                    raise FlatlensError(COUPLED)


def check_owners(subject: Subject, forward: Forward, layouts: Layouts, subset: slice) -> None:
    """Raise if the outputs of some samples have a derivative at a row of another sample.

    Raises:
        FlatlensError: if they reach the input of another sample.
        NeedsSinglesError: if they reach a row that was assigned to another sample.
    """
    recording, batch = forward.recording, len(forward.f)
    if len(recording.calls) != len(layouts):
        raise NeedsSinglesError("the number of layer calls depends on the batch")
    places = [(edge, Layout()) for edge in forward.edges]
    for call, layout in zip(recording.calls, layouts, strict=True):
        if layout is None or not layout.fits(call.x, batch):
            name = layer_name(call.layer, subject)
            raise NeedsSinglesError(f"the rows of {name} cannot be assigned to samples")
        places += [(e, layout) for e in (call.out, call.through, call.total) if e is not None]
    places += [(copies.edge, Layout(copies.dim)) for copies in recording.copies]
    places += [(lookup.edge, Layout()) for lookup in recording.lookups]
    mixed = (forward.f[subset] * forward.f[subset].detach().cos()).sum()
    grads = gradients(mixed, [edge for edge, _ in places], True)
    others = _others(batch, subset, forward.f)
    reached = []
    for grad, (_, layout) in zip(grads, places, strict=True):
        size = forward.f.new_zeros(batch) if grad is None else layout.split(grad, batch).abs()
        reached.append(_reach(size, others))
    if reached and unusual(_together(reached).any()):
        if any(_together(reached).tolist()[: len(forward.edges)]):
            raise FlatlensError(COUPLED)
        raise NeedsSinglesError("rows of one sample reach the outputs of another")


def _others(batch: int, subset: slice, like: Tensor) -> Tensor:
    """Return the indices of all samples outside a subset."""
    inside = range(batch)[subset]
    return torch.tensor([i for i in range(batch) if i not in inside], device=like.device)


def _reach(size: Tensor, others: Tensor) -> Tensor:
    """Return whether the derivative of some samples is nonzero at other samples."""
    if not size.numel():
        return torch.zeros((), dtype=torch.bool, device=size.device)
    return size.index_select(0, others.to(size.device)).max() > 1e-6 * size.max()
