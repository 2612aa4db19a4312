"""Change tensors inside a forward pass, to take forward-mode derivatives along the changes.

A *place* names a tensor of one forward pass so that it can be recognised in the next one. The
passes run the same operations, so a tensor is known by the number of the autograd node that made
it, counted from the start of the pass. A parameter has no such node and is the same in all passes.
Two kinds of tensors are new leaves in each pass and are recognised by their order. These are the
embedding of an integer input by a frozen table, and a constant that feeds a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from flatlens.capture.inputs import Inputs

Change = Callable[[Tensor], Tensor]


class Place(NamedTuple):
    """The place where a tensor is made in a forward pass.

    Attributes:
        kind: how the tensor is recognised.
        number: number of the node, of the embedding, or of the constant; for a parameter its id.
        output: which result of the node it is.
    """

    kind: Literal["node", "parameter", "embedding", "constant"]
    number: int
    output: int = 0


def node_number(node: Node | None) -> int:
    """Return the number that torch gave to an autograd node when it was made."""
    number: int = -1 if node is None else node._sequence_nr()
    return number


def next_number() -> int:
    """Return the number that the next autograd node of this thread gets."""
    with torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        return node_number(leaf.clone().grad_fn) + 1


def place_of(edge: GradientEdge, start: int) -> Place:
    """Return the place of the tensor that an edge stands for.

    Args:
        edge: an edge of a node, or of a parameter.
        start: the number of the first node of the forward pass.
    """
    if hasattr(edge.node, "variable"):
        return Place("parameter", id(edge.node.variable))
    return Place("node", node_number(edge.node) - start, edge.output_nr)


class Injection:
    """Replace some tensors of one forward pass, for everything that reads them.

    Where a function returns the tensor, its result is replaced. Where it first appears as an
    argument, or was changed in place, it is replaced in the arguments from then on.

    Args:
        changes: the change of the tensor at each place.

    Attributes:
        pending: the places that the pass has not reached yet.
    """

    def __init__(self, changes: Mapping[Place, Change]) -> None:
        self.pending = dict(changes)
        self._start = 0
        self._embeddings = 0
        self._constants = 0
        self._instead: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the old tensor stays alive

    def begin(self, start: int, fed: Inputs) -> Inputs:
        """Start a pass whose first node has the number ``start``, and change its inputs."""
        self._start = start
        changes = {id(t): self._change_of(t) for t in fed.tensors}  # before new nodes are made

        def change(_: Any, t: Tensor) -> Tensor:
            change_of_t = changes[id(t)]
            return t if change_of_t is None else change_of_t(t)

        return fed.map_named(change)

    def embedding(self, z: Tensor) -> Tensor:
        """Change the embedding of an integer input, in the order of the embeddings."""
        self._embeddings += 1
        return self._counted(Place("embedding", self._embeddings - 1), z)

    def alias(self, alias: Tensor, constant: bool) -> Tensor:
        """Change the alias of an input that one layer alone reads.

        Args:
            alias: the alias of the layer's input.
            constant: whether the input depends on nothing that has a derivative.
        """
        if not constant:
            change = self._change_of(alias)
            return alias if change is None else change(alias)
        self._constants += 1
        return self._counted(Place("constant", self._constants - 1), alias)

    def arguments(self, arguments: Any) -> Any:
        """Change the arguments of a function."""
        return _mapped(self._argument, arguments)

    def result(self, result: Any) -> Any:
        """Change the result of a function."""
        return _mapped(self._met, result) if self.pending else result

    def _argument(self, t: Tensor) -> Tensor:
        if id(t) in self._instead:
            return self._instead[id(t)][1]
        return self._met(t) if self.pending else t

    def _met(self, t: Tensor) -> Tensor:
        change = self._change_of(t)
        if change is None:
            return t
        changed = change(t)
        self._instead[id(t)] = (t, changed)
        return changed

    def _change_of(self, t: Tensor) -> Change | None:
        if not (t.requires_grad and self.pending):
            return None
        if t.grad_fn is None:
            return self.pending.pop(Place("parameter", id(t)), None)
        number = node_number(t.grad_fn) - self._start
        return self.pending.pop(Place("node", number, t.output_nr), None)

    def _counted(self, place: Place, t: Tensor) -> Tensor:
        change = self.pending.pop(place, None)
        return t if change is None else change(t)


def _mapped(change: Change, value: Any) -> Any:
    """Change all tensors inside a value. A shape stays a ``torch.Size`` and is not taken apart."""
    return pytree.tree_map_only(
        Tensor, change, value, is_leaf=lambda leaf: isinstance(leaf, torch.Size)
    )


class InjectionMode(TorchFunctionMode):
    """Shows every function that runs inside this mode to an injection."""

    def __init__(self, injection: Injection) -> None:
        super().__init__()
        self.injection = injection

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.injection.arguments((args, kwargs or {}))
        return self.injection.result(func(*args, **kwargs))
