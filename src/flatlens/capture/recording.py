"""The record of one forward pass: the calls of layers, and each parameter's other uses.

Nothing is measured here. For each call the autograd *edges* are recorded:

- ``total``    where df/dx of the tensor that enters the layer arrives (A of ``docs/theory.md``);
- ``through``  the same for an alias that this layer alone reads (B);
- ``out``      where df/dz of the layer's output arrives (J).

Some functions broadcast a parameter: norm layers, scales, class tokens, position embeddings. They
get one copy of it per sample, and autograd delivers per-sample gradients at the copies. A
parameter's uses are also counted in the autograd graph. If the graph has more uses than were
recorded, the parameter takes the slow path.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from flatlens.algebra.wide_tensor import HALF, stored
from flatlens.capture.graph import Graph, viewed_leaf
from flatlens.capture.injection import Injection
from flatlens.capture.layer import Layer
from flatlens.errors import FlatlensError

WEIGHT_NODES = 64  # largest number of operations that compute a weight from parameters


@dataclass(frozen=True)
class Call:
    """One use of a layer.

    ``parameter`` is the parameter that the layer's weight is, or is a view of. If the weight is
    computed in another way, ``parameter`` is the weight itself.
    """

    layer: Layer
    x: Tensor
    through: GradientEdge
    total: GradientEdge | None
    out: GradientEdge
    versions: tuple[tuple[Tensor, int], tuple[Tensor, int]]
    parameter: Tensor


@dataclass(frozen=True)
class Copies:
    """A parameter used with one copy per sample; ``dim`` is where the copies are stacked."""

    parameter: Tensor
    edge: GradientEdge
    dim: int


@dataclass(frozen=True)
class Lookup:
    """The rows of a table (an embedding) that each sample takes, samples first.

    ``padding`` is the row without a gradient, or -1. ``source`` is the edge of rows that were
    looked up once and copied for each sample.
    """

    parameter: Tensor
    edge: GradientEdge
    indices: Tensor
    padding: int
    source: GradientEdge | None = None


@dataclass(frozen=True)
class CapturePlan:
    """Facts from earlier forward passes that the next recording needs.

    An event is a parameter that is broadcast against a result. ``batch_dims`` gives for each event
    the dimension of the result that holds the samples. ``clone`` lists the calls whose tensors are
    overwritten in place; None clones all.
    """

    batch_dims: tuple[int | None, ...] | None = None
    clone: frozenset[int] | None = None


class KnownParameters:
    """The parameters of a model by identity.

    Attributes:
        names: the name of each parameter by id.
        storages: the addresses of their memory.
        half: whether some parameter or buffer is in half precision.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.storages = {stored(p).untyped_storage().data_ptr() for p in model.parameters()}
        self.half = any(t.dtype in HALF for t in (*model.parameters(), *model.buffers()))

    def trainable(self, value: Any) -> bool:
        """Whether a value is a parameter that needs a gradient."""
        return isinstance(value, Tensor) and id(value) in self.names and value.requires_grad

    def is_parameter(self, t: Tensor) -> bool:
        """Whether a tensor is a parameter, trainable or not."""
        return id(t) in self.names

    def make_weight(self, t: Tensor, data: Container[Node | None] = ()) -> bool:
        """Whether ``t`` is a parameter, a view of one, or computed from parameters alone.

        At most ``WEIGHT_NODES`` nodes are visited, because a weight is computed in a few steps and
        this check runs for every operand of every product.

        Args:
            t: a tensor.
            data: nodes of results that depend on the samples.
        """
        if id(t) in self.names or id(t._base) in self.names:
            return True
        if t.grad_fn is None:
            return not t.requires_grad and stored(t).untyped_storage().data_ptr() in self.storages
        queue, seen = [t.grad_fn], {t.grad_fn}
        while queue:
            node = queue.pop()
            if node in data or len(seen) > WEIGHT_NODES:
                return False
            if hasattr(node, "variable") and id(node.variable) not in self.names:
                return False
            new = {child for child, _ in node.next_functions if child is not None} - seen
            seen |= new
            queue.extend(new)
        return True

    def alone_make(self, t: Tensor) -> bool:
        """Whether ``t`` is computed from parameters alone, or is a view of a frozen one."""
        if t.requires_grad:
            return Graph(t).leaves <= self.names.keys()
        return stored(t).untyped_storage().data_ptr() in self.storages


class Recording:
    """The record of one forward pass over ``batch`` samples.

    Attributes:
        calls: the calls of layers, in order.
        copies: parameters with one copy per sample.
        lookups: rows of tables that samples took.
        events: shapes of the results that parameters were broadcast against; trial runs compare
            them.
        embedded: embeddings of integer inputs, with the edge where their derivative arrives.
        data: nodes of the results of layers, which depend on the samples.
        scratch: data that a kind of layer shares between its functions, by name.
        scores: entries of the scores of ``scaled_dot_product_attention``, over all its calls.
        injection: the changes of tensors in this pass, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: int,
        plan: CapturePlan,
        tokens: Sequence[Tensor] = (),
        injection: Injection | None = None,
    ) -> None:
        self.batch, self.plan, self.tokens = batch, plan, tokens
        self.injection = injection
        self.model = model
        self.parameters = KnownParameters(model)
        self.calls: list[Call] = []
        self.copies: list[Copies] = []
        self.lookups: list[Lookup] = []
        self.events: list[torch.Size] = []
        self.embedded: list[tuple[Tensor, GradientEdge]] = []
        self.data: set[Node | None] = set()
        self.scratch: dict[str, dict[int, Any]] = {}
        self.scores = 0

    # -- layers ----------------------------------------------------------------------------------

    def alias(self, x: Tensor) -> tuple[Tensor, GradientEdge | None]:
        """Return an alias of a layer's input that only this layer reads, and the input's edge."""
        if x.is_complex():
            raise FlatlensError("a layer reads complex numbers; only real networks are measured")
        constant = not x.requires_grad
        alias = x.detach().requires_grad_() if constant else x.view_as(x)
        if self.injection is not None:
            alias = self.injection.alias(alias, constant)
        return alias, None if constant else get_gradient_edge(x)

    def add_call(
        self, layer: Layer, x: Tensor, alias: Tensor, total: GradientEdge | None, z: Tensor
    ) -> Tensor:
        """Record a call and return its output.

        A later in-place operation on z would move z's edge. If one follows, a clone is returned.
        If x or z has no entries, there is no call to measure.
        """
        if not (z.requires_grad and x.numel() and z.numel()):
            return z
        if z.dtype in HALF and not self.parameters.half:
            raise FlatlensError(
                f"the model computes in {str(z.dtype).removeprefix('torch.')} inside its forward "
                "(autocast?); switch that off, so that it is measured in its own precision"
            )
        self.data.add(z.grad_fn)
        clone = self.plan.clone is None or len(self.calls) in self.plan.clone
        given = z.clone() if clone else z
        leaf = viewed_leaf(layer.weight)
        self.calls.append(
            Call(
                layer,
                x.detach().clone() if clone else x.detach(),
                get_gradient_edge(alias),
                total,
                get_gradient_edge(z),
                ((x, x._version), (given, given._version)),
                leaf if leaf is not None and self.parameters.trainable(leaf) else layer.weight,
            )
        )
        return given

    def overwritten(self) -> frozenset[int]:
        """The calls whose input or output was changed in place after the call."""
        return frozenset(
            i for i, c in enumerate(self.calls) if any(t._version != v for t, v in c.versions)
        )

    # -- one copy of a parameter per sample --------------------------------------------------------

    def new_event(self, shape: torch.Size) -> int:
        """Record a broadcast of a parameter against a result of ``shape``; return its number."""
        self.events.append(shape)
        return len(self.events) - 1

    def batch_dim(self, event: int) -> int | None:
        """Return the dimension of an event's result that holds the samples, or None if unknown."""
        dims = self.plan.batch_dims
        if dims is None:
            return 0 if self.batch == 1 else None
        return dims[event] if event < len(dims) else None

    def per_sample(
        self, p: Tensor, shape: torch.Size, event: int, view: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return ``p``, reshaped to ``view``, with one copy per sample in a result of ``shape``.

        If the dimension of the samples is unknown, or ``p`` already extends over it, ``p`` itself
        is returned. The count of its uses then sends ``p`` down the slow path.
        """
        view = tuple(p.shape) if view is None else view
        dim = self.batch_dim(event)
        aligned = (1,) * (len(shape) - len(view)) + view
        if (
            not self.parameters.trainable(p)
            or dim is None
            or len(aligned) != len(shape)
            or aligned[dim] != 1
            or shape[dim] != self.batch
        ):
            return p.reshape(view)
        copies = p.reshape(aligned).expand(*aligned[:dim], self.batch, *aligned[dim + 1 :])
        self.copies.append(Copies(p, get_gradient_edge(copies), dim))
        return copies
