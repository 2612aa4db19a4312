"""Learn where each tensor keeps its samples, from runs on one sample and on two.

If the runs do not show it, samples are measured one at a time, which is slower but exact for any
network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flatlens.capture.inputs import Inputs, check_alone
from flatlens.capture.layout import Layout, find_layout
from flatlens.capture.recording import Call, CapturePlan
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.independence import NeedsSinglesError, check_inputs, check_owners
from flatlens.passes.names import layer_name

Run = Callable[[Inputs, CapturePlan], Forward]


@dataclass(frozen=True)
class Arrangement:
    """The positions of samples in each tensor of a forward pass.

    Attributes:
        plan: the plan of a recording.
        layouts: the layout of each call's input; None if samples are measured one at a time.
        alone: f of the first sample, if it has not been compared with a batch yet; else None.
        singles_because: why samples are measured one at a time, or "".
    """

    plan: CapturePlan
    layouts: tuple[Layout | None, ...]
    alone: Tensor | None = None
    singles_because: str = ""

    def one_at_a_time(self, why: str) -> Arrangement:
        """Return the arrangement that measures samples one at a time, for the reason given."""
        return replace(
            self,
            plan=replace(self.plan, batch_dims=None),
            layouts=(None,) * len(self.layouts),
            singles_because=why,
        )


def arrange(
    subject: Subject, run: Run, inputs: Inputs, solo: Forward, chunk: int, asked: int | None
) -> Arrangement:
    """Learn the arrangement of a network's samples.

    Args:
        subject: the network.
        run: the forward pass of the chosen strategy.
        inputs: the first batch.
        solo: the forward pass of its first sample.
        chunk: samples at a time; 1 if memory has no room for two graphs.
        asked: the chunk that the user asked for.
    """
    calls = solo.recording.calls
    clone = solo.recording.overwritten()
    start = Arrangement(CapturePlan(None, clone), (None,) * len(calls))
    if inputs.n == 1 or asked == 1:
        return replace(start, alone=solo.f.detach())
    first_two = inputs.take(slice(0, 2))
    again = partial(subject.outputs_alone, inputs.take(slice(0, 1)))
    if chunk == 1:
        check_alone(subject.outputs_alone(first_two)[:1], solo.f, again, subject.dtype)
        return start
    pair = run(first_two, CapturePlan())
    check_alone(pair.f[:1], solo.f, again, subject.dtype)
    if len(calls) != len(pair.recording.calls):
        check_inputs(pair)
        return start.one_at_a_time("the number of layer calls depends on the batch")
    dims = _batch_dims(solo.recording.events, pair.recording.events)
    pairs = zip(calls, pair.recording.calls, strict=True)
    arrangement = Arrangement(
        CapturePlan(dims, clone | pair.recording.overwritten()),
        tuple(call_layout(a, b) for a, b in pairs),
    )
    for call, layout in zip(calls, arrangement.layouts, strict=True):
        if layout is None:
            check_inputs(pair)
            name = layer_name(call.layer, subject)
            return arrangement.one_at_a_time(f"the rows of {name} cannot be assigned to samples")
    try:
        if pair.recording.events:  # run again with one copy of a parameter per sample
            pair = run(first_two, arrangement.plan)
        for i in range(2):
            check_owners(subject, pair, arrangement.layouts, slice(i, i + 1))
    except NeedsSinglesError as why:
        check_inputs(pair)
        return arrangement.one_at_a_time(str(why))
    return arrangement


def call_layout(single: Call, pair: Call) -> Layout | None:
    """Return the layout of a call's input; features and pixels cannot hold the samples."""
    layout = find_layout(single.x, pair.x)
    usable = layout is not None and all(
        call.layer.can_hold_samples(layout.dim) for call in (single, pair)
    )
    return layout if usable else None


def _batch_dims(single: list[torch.Size], pair: list[torch.Size]) -> tuple[int | None, ...] | None:
    """Find in each result the one dimension whose size went from 1 to 2 with the batch."""
    if len(single) != len(pair):
        return None
    dims: list[int | None] = []
    for a, b in zip(single, pair, strict=True):
        grown = [d for d in range(len(a)) if a[d] != b[d]] if len(a) == len(b) else []
        dims.append(grown[0] if len(grown) == 1 and (a[grown[0]], b[grown[0]]) == (1, 2) else None)
    return tuple(dims)
