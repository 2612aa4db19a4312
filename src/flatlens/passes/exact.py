"""Measure a chunk exactly, with one vector-Jacobian product per output.

Autograd computes only the gradients at the captured edges, never weight gradients. Everything else
is algebra.
"""

from __future__ import annotations

from torch import Tensor

from flatlens.algebra.buffers import Buffers
from flatlens.algebra.sums import side_by_side
from flatlens.capture.inputs import Inputs
from flatlens.capture.recording import CapturePlan
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.derivative_rows import (
    Rows,
    Setup,
    check_head,
    collect,
    direct_mixture,
)
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.head import mixed_rows
from flatlens.passes.head_fallback import HeadFallback
from flatlens.passes.independence import Layouts
from flatlens.passes.layer_columns import all_columns
from flatlens.passes.request import Request


class Exact:
    """The strategy that measures every output.

    Args:
        subject: the network.
        request: the request of the caller.
        buffers: memory for the rows.
    """

    def __init__(self, subject: Subject, request: Request, buffers: Buffers) -> None:
        self.subject, self.request = subject, request
        self.chunks = HeadFallback(subject, request, buffers)

    def run(self, inputs: Inputs, plan: CapturePlan, start: int = 0) -> Forward:
        """Run the network once."""
        return self.subject.run(inputs, plan, start)

    def measure(self, inputs: Inputs, forward: Forward, layouts: Layouts) -> ChunkColumns:
        """Measure the samples of one forward pass."""
        return self.chunks.measure(inputs, forward, layouts, self._columns)

    def _columns(self, setup: Setup) -> ChunkColumns:
        request = self.request
        return all_columns(setup, exact_rows(setup), request.needs, request.exact_untied)


def exact_rows(setup: Setup) -> Rows:
    """Collect the rows of all products; check a head's rows against one product without it."""
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
        check_head(direct, mixed_rows(head, A), setup.forward.precision)
    return rows_by_edge
