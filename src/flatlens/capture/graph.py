"""Questions about the autograd graph behind an output."""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

RESHAPES = {  # the same entries in the same order
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"),
    *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
    "ToCopyBackward0",  # a change of precision, inside half-precision networks
}
# Selections, which take some entries in their order. A selection of all entries is a reshape: a
# model picks the only sample out of its batch, or puts it back.
SELECTIONS = {
    *("SelectBackward0", "SliceBackward0", "UnbindBackward0", "SplitBackward0"),
    *("IndexBackward0", "IndexSelectBackward0", "CatBackward0", "StackBackward0"),
}
ORDERS = {"TransposeBackward0", "PermuteBackward0", "TBackward0"}  # another order
VIEWS = RESHAPES | ORDERS | {"CloneBackward0"}  # each entry occurs exactly once


class Graph:
    """The autograd graph behind an output: which nodes it reaches, and what reads what.

    Attributes:
        nodes: all nodes that the output depends on.
        readers: for each edge (node, output number), the nodes that read it.
    """

    def __init__(self, output: Tensor) -> None:
        self.readers: dict[tuple[Node, int], list[Node]] = {}
        self._leaves: dict[int, Node] = {}
        start = get_gradient_edge(output).node
        self.nodes: set[Node] = {start}
        queue = [start]
        while queue:
            node = queue.pop()
            for child, index in node.next_functions:
                if child is None:
                    continue
                self.readers.setdefault((child, index), []).append(node)
                if child not in self.nodes:
                    self.nodes.add(child)
                    queue.append(child)
                    if hasattr(child, "variable"):
                        self._leaves[id(child.variable)] = child

    @property
    def leaves(self) -> set[int]:
        """The ids of the leaves that the output depends on."""
        return set(self._leaves)

    def uses(self, leaf: Tensor) -> int:
        """Count how often a leaf is used. Each reader of a view of it (a transpose) counts."""
        node = self._leaves.get(id(leaf))
        return 0 if node is None else self._uses(node, 0)

    def _uses(self, node: Node, index: int) -> int:
        return sum(
            self._uses(reader, 0) if reader.name() in VIEWS else 1
            for reader in self.readers.get((node, index), [])
        )

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Whether some result on the way to the output has this precision."""
        return any(
            metadata.dtype == dtype
            for node in self.nodes
            for metadata in getattr(node, "_input_metadata", ())
        )

    def leaf(self, t: Tensor) -> Node | None:
        """The node of a leaf, or None where the output does not depend on it."""
        return self._leaves.get(id(t))

    @cached_property
    def readers_by_node(self) -> dict[Any, list[Any]]:
        """The nodes that read any result of a node."""
        by_node: dict[Any, list[Any]] = {}
        for (node, _), readers in self.readers.items():
            by_node.setdefault(node, []).extend(readers)
        return by_node

    def read_once(self, edge: GradientEdge) -> bool:
        """Whether exactly one node reads the tensor that ``edge`` stands for."""
        return len(self.readers.get((edge.node, edge.output_nr), [])) == 1

    def below_reshapes(self, edge: GradientEdge) -> tuple[GradientEdge, bool]:
        """Return the edge below all reshapes, and whether nothing else reads what they reshape."""
        read_once = True
        while edge.node.name() in RESHAPES or _takes_all(edge):
            node, index = edge.node.next_functions[0]
            assert node is not None  # a view of something that needs no gradient has no node
            edge = GradientEdge(node, index)
            read_once = read_once and self.read_once(edge)
        return edge, read_once

    def below_views(
        self, edge: GradientEdge, ends: Container[tuple[Node, int]] = ()
    ) -> tuple[GradientEdge, bool, bool]:
        """Return the edge below all reshapes, permutations and copies of a tensor.

        Args:
            edge: where to start.
            ends: edges to stop at, as (node, output number).

        Returns:
            The edge, whether nothing else reads what they reshape, and whether a permutation
            changes the order of the entries.
        """
        read_once, reordered = True, False
        while (edge.node, edge.output_nr) not in ends and (
            edge.node.name() in VIEWS or _takes_all(edge)
        ):
            reordered = reordered or edge.node.name() in ORDERS
            node, index = edge.node.next_functions[0]
            assert node is not None  # a view of something that needs no gradient has no node
            edge = GradientEdge(node, index)
            read_once = read_once and self.read_once(edge)
        return edge, read_once, reordered

    def separates(self, output: Tensor, edge: GradientEdge) -> bool:
        """Whether every path from ``output`` to a leaf passes through ``edge``."""
        queue, seen = [output.grad_fn], {output.grad_fn}
        while queue:
            node = queue.pop()
            if node is edge.node:
                continue
            if node is None or hasattr(node, "variable"):
                return False
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    queue.append(child)
        return True


def viewed_leaf(t: Tensor) -> Tensor | None:
    """Return ``t`` if it is a leaf, or the leaf that it is a view of; else None.

    A view has the same entries as its leaf, and so has the derivative with respect to it.
    """
    if t.is_leaf:
        return t
    node = t.grad_fn
    while node is not None and node.name() in VIEWS and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", None)
    return leaf if leaf is not None and leaf.numel() == t.numel() else None


def _takes_all(edge: GradientEdge) -> bool:
    """Whether a selection takes all entries, in their order."""
    node = edge.node
    name = node.name()
    if name not in SELECTIONS or len(node.next_functions) != 1:
        return False
    below, index = node.next_functions[0]
    if below is None:
        return False
    source = GradientEdge(below, index)
    if _size(edge) is None or _size(edge) != _size(source):
        return False
    if name == "IndexSelectBackward0":
        return bool(node._saved_self_sym_sizes[node._saved_dim] == 1)  # type: ignore[attr-defined]
    return name != "IndexBackward0" or _indexes_nothing_but_samples(node)


def _indexes_nothing_but_samples(node: Node) -> bool:
    """Whether an advanced index cannot change the order, as it indexes dimensions of size 1."""
    sizes = node._saved_self_sym_sizes  # type: ignore[attr-defined]
    try:
        indices = node._saved_indices  # type: ignore[attr-defined]
    except RuntimeError:  # the graph has been used and freed
        return False
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return len(indices) == 1  # a mask that takes all entries keeps their order
    pairs = zip(indices, sizes, strict=False)
    return all(index is None or size == 1 for index, size in pairs)


def _size(edge: GradientEdge) -> int | None:
    """Number of entries of the tensor that an edge stands for; None if torch does not know it."""
    if hasattr(edge.node, "variable"):
        return int(edge.node.variable.numel())
    metadata = getattr(edge.node, "_input_metadata", None)
    return None if metadata is None else prod(metadata[edge.output_nr].shape)
