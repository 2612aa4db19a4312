"""Vector-Jacobian products: ask autograd for the derivatives at the captured edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from flatlens import tuning
from flatlens.algebra.wide_tensor import HALF
from flatlens.errors import FlatlensError

Gradients = Sequence[Tensor | None]


def gradients(scalar: Tensor, edges: Sequence[GradientEdge], retain: bool) -> Gradients:
    """Return the derivatives of a scalar at each edge, none of them sparse.

    Derivatives of a half-precision network are returned in float32.
    """
    if not edges:  # a network without parameters
        return []
    try:
        grads = torch.autograd.grad(scalar, edges, retain_graph=retain, allow_unused=True)
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise FlatlensError(
                "the model changes its weights or activations in place while autograd still needs "
                "them; apply such a constraint outside of forward, or through .data"
            ) from error
        if not (isinstance(error, CheckpointError) or "heckpoint" in str(error)):
            raise
        raise FlatlensError(
            "the model recomputes activations (gradient checkpointing), which hides its layers; "
            "switch that off while measuring"
        ) from error
    return [None if g is None else _widened(g.to_dense() if g.is_sparse else g) for g in grads]


def _widened(g: Tensor) -> Tensor:
    return g.float() if g.dtype in HALF else g


class Products:
    """The products v^T df at all edges, for one direction v after another.

    Args:
        f: the outputs, [b, N].
        edges: where to compute the derivatives.
        batched: whether to compute several products in one call. A product of few rows spends its
            time reading the weights.
    """

    def __init__(self, f: Tensor, edges: Sequence[GradientEdge], batched: bool) -> None:
        self.f, self.edges, self.batched = f, edges, batched

    def each(
        self, directions: Tensor | None, span: range, retain: bool
    ) -> Iterator[tuple[int, Gradients]]:
        """Yield (place in the span, derivatives at all edges) for each direction of ``span``.

        Args:
            directions: [b, k, N]; None means each output separately.
            span: which directions.
            retain: whether the graph must outlive the last product.
        """
        if self.batched:
            try:
                yield from self._batched(directions, span)
                return
            except RuntimeError:
                self.batched = False  # some operation has no batching rule
        for place, v in enumerate(span):
            picked = self.f[:, v] if directions is None else self.f * directions[:, v]
            yield place, gradients(picked.sum(), self.edges, retain or place + 1 < len(span))

    def _batched(self, directions: Tensor | None, span: range) -> Iterator[tuple[int, Gradients]]:
        if directions is None:
            outputs = torch.arange(span.start, span.stop, device=self.f.device)
            output_directions = F.one_hot(outputs, self.f.shape[1]).to(self.f).unsqueeze(1)
        else:
            output_directions = directions[:, span.start : span.stop].movedim(1, 0)
        place = 0
        for several in output_directions.split(max(1, tuning.BATCHED_ROWS // len(self.f))):
            grads = torch.autograd.grad(
                self.f,
                self.edges,
                several.expand(-1, *self.f.shape),
                retain_graph=True,  # kept, as it may fail midway
                allow_unused=True,
                is_grads_batched=True,
            )
            for j in range(len(several)):
                yield place + j, [None if g is None else _widened(g[j]) for g in grads]
            place += len(several)
