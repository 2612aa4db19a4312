"""Set up chunks with the network's head, or without it if rounding spoils the head's rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flatlens.algebra.buffers import Buffers
from flatlens.capture.inputs import Inputs
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.derivative_rows import NeedsEachOutputError, Setup, set_up
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.independence import Layouts
from flatlens.passes.request import Request


class HeadFallback:
    """Set up chunks with a head, until a check shows that rounding spoils the head's rows.

    Args:
        subject: the network.
        request: the request of the caller.
        buffers: memory for the rows.
    """

    def __init__(self, subject: Subject, request: Request, buffers: Buffers) -> None:
        self.subject, self.request, self.buffers = subject, request, buffers
        self.use_head = True

    def measure(
        self,
        inputs: Inputs,
        forward: Forward,
        layouts: Layouts,
        columns: Callable[[Setup], ChunkColumns],
    ) -> ChunkColumns:
        """Set up a chunk and return ``columns(setup)``.

        If rounding spoils the head's rows, every output gets its own product. This takes a new
        forward pass, because the graph of the old one is freed.
        """
        try:
            return columns(self._set_up(forward, layouts))
        except NeedsEachOutputError:
            self.use_head = False
            again = self.subject.run(inputs, forward.recording.plan, forward.start)
            return columns(self._set_up(again, layouts))

    def _set_up(self, forward: Forward, layouts: Layouts) -> Setup:
        return set_up(
            forward, layouts, self.subject.named, self.buffers,
            target=loss_directions(self.request, forward), plain=self.request.root is None,
            use_head=self.use_head, needs=self.request.needs,
        )  # fmt: skip


def loss_directions(request: Request, forward: Forward) -> Tensor | None:
    """Return R^T of the loss for some samples, [b, k, N]; None if f itself is measured."""
    if request.root is None:
        return None
    return request.root.transposed(forward.f.detach(), forward.samples)
