"""Questions about the autograd graph behind an output."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

RESHAPES = {  # the same entries in the same order
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"),
    *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
}
VIEWS = RESHAPES | {"TransposeBackward0", "PermuteBackward0", "TBackward0"}


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

    def leaf(self, t: Tensor) -> Node | None:
        """The node of a leaf, or None where the output does not depend on it."""
        return self._leaves.get(id(t))

    @cached_property
    def readers_by_node(self) -> dict[Node, list[Node]]:
        """The nodes that read any result of a node."""
        by_node: dict[Node, list[Node]] = {}
        for (node, _), readers in self.readers.items():
            by_node.setdefault(node, []).extend(readers)
        return by_node

    def read_once(self, edge: GradientEdge) -> bool:
        """Whether exactly one node reads the tensor that ``edge`` stands for."""
        return len(self.readers.get((edge.node, edge.output_nr), [])) == 1

    def below_reshapes(self, edge: GradientEdge) -> tuple[GradientEdge, bool]:
        """Return the edge below all reshapes, and whether nothing else reads what they reshape."""
        read_once = True
        while edge.node.name() in RESHAPES:
            node, index = edge.node.next_functions[0]
            assert node is not None  # a view of something that needs no gradient has no node
            edge = GradientEdge(node, index)
            read_once = read_once and self.read_once(edge)
        return edge, read_once

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
