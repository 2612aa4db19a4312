"""Measure a chunk exactly: one vector-Jacobian product per output, everything else is algebra.

Autograd is asked only for the gradients at the captured edges. Weight gradients are never formed by
it.
"""

from __future__ import annotations

from torch import Tensor

from flatlens.algebra.buffers import Buffers
from flatlens.algebra.sums import side_by_side
from flatlens.capture.inputs import Inputs
from flatlens.capture.recording import CapturePlan
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.derivative_rows import (
    NeedsEachOutputError,
    Rows,
    Setup,
    check_head,
    collect,
    direct_mixture,
    set_up,
)
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.head import mixed_rows
from flatlens.passes.independence import Layouts
from flatlens.passes.layer_columns import Asked, all_columns
from flatlens.passes.request import Request


class Exact:
    """The strategy that measures every output.

    Args:
        subject: the network.
        request: what is asked for.
        buffers: memory for the rows.
    """

    def __init__(self, subject: Subject, request: Request, buffers: Buffers) -> None:
        self.subject, self.request, self.buffers = subject, request, buffers
        self.use_head = True  # until rounding is seen to spoil a head's rows

    def run(self, inputs: Inputs, plan: CapturePlan, start: int = 0) -> Forward:
        """Run the network once."""
        return self.subject.run(inputs, plan, start)

    def measure(self, inputs: Inputs, forward: Forward, layouts: Layouts) -> ChunkColumns:
        """Measure the samples of one forward pass.

        Where a head's rows are lost in rounding, every output gets a product of its own, after a
        new forward pass: the graph of the old one is gone.
        """
        try:
            return self._measure(forward, layouts)
        except NeedsEachOutputError:
            self.use_head = False
            again = self.run(inputs, forward.recording.plan, forward.start)
            return self._measure(again, layouts)

    def _measure(self, forward: Forward, layouts: Layouts) -> ChunkColumns:
        request = self.request
        setup = set_up(
            forward, layouts, self.subject.named, self.buffers,
            target=loss_directions(request, forward), plain=request.root is None,
            use_head=self.use_head, spectra=True,
        )  # fmt: skip
        asked = Asked(request.adaptive, request.exact_untied)
        return all_columns(setup, exact_rows(setup), asked)


def loss_directions(request: Request, forward: Forward) -> Tensor | None:
    """R^T of the loss for the samples of a forward pass, [b, k, N]; None where f is measured."""
    if request.root is None:
        return None
    return request.root.transposed(forward.f.detach(), forward.samples)


def exact_rows(setup: Setup) -> Rows:
    """Collect the rows of all products; a head's rows are compared with one product without it."""
    for i, positions in enumerate(setup.positions):
        positions.begin(setup.rows_of(i))
    head = setup.head
    direct = None if head is None else direct_mixture(setup)

    def take(call: int, v: int, grad: Tensor | None) -> None:
        setup.positions[call].take(v, grad)

    rows_by_edge = collect(setup, setup.directions, range(setup.count), False, take)
    if head is not None and direct is not None:
        for v in range(setup.outputs):
            take(head.call, v, head.jacobian[:, v])
        A = side_by_side([rows_by_edge[k] for k in setup.plan.inputs])
        check_head(direct, mixed_rows(head, A))
    return rows_by_edge
