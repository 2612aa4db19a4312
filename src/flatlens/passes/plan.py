"""Plan one chunk: the edges where autograd must deliver, and how each parameter is measured.

The plan is frozen. An *edge number* is the index of an edge in ``edges``. The rows that arrive at
the edge are stored under that number.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from flatlens.capture.graph import Graph
from flatlens.capture.layout import Layout
from flatlens.capture.recording import Call, Copies, Lookup
from flatlens.passes.forward import Forward, Named
from flatlens.passes.independence import Layouts, NeedsSinglesError
from flatlens.passes.needs import (
    AT_THE_FIRST_LAYER,
    BACK_TO_PARAMETERS,
    BESIDE_LAYERS,
    BYPASS,
    LAYER_SPECTRA,
    LAYER_TOPS,
    THROUGH,
    WITHOUT_LAYERS,
)

WAY_OF_LINEAR = ("linear", False)  # how F.linear uses its weight: one row for each output
RowPlace = tuple[Layout | None, int]  # layout, and entries per sample


@dataclass(frozen=True)
class LayerEdges:
    """The edges where the derivatives of one call arrive.

    Attributes:
        total: edge number of A, the derivative with respect to the tensor that enters the layer, or
            -1.
        through: edge number of B, the derivative through the layer alone, or -1 if it was not asked
            for. It equals ``total`` if nothing else reads the tensor.
        reads_input: whether the tensor is the network's input, up to a reshape or permutation.
        beside_input: whether something else reads the input.
        input: edge number of the input that the tensor is a reshape of, or -1.
    """

    total: int
    through: int
    reads_input: bool
    beside_input: bool
    input: int


@dataclass(frozen=True)
class ParameterPlan:
    """The plan for measuring each parameter.

    Attributes:
        paths: the path of each parameter by name, as ``ParameterProbe.path``.
        groups: calls that share a weight, and the name of the trainable parameter it is, or None.
        rules: by parameter, the calls whose bias it is and the edge numbers of its copies.
        tables: by parameter, the edge numbers of the rows that were looked up.
        tied: tables that are the weight of linear layers as well, with these calls; their lookups
            are in ``tables``.
        slow: by parameter, the edge number of the parameter itself.
        trainable: names of the trainable parameters by id.
    """

    paths: dict[str, str] = field(default_factory=dict)
    groups: list[tuple[list[int], str | None]] = field(default_factory=list)
    rules: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    tables: dict[str, list[tuple[int, Lookup]]] = field(default_factory=dict)
    tied: dict[str, list[int]] = field(default_factory=dict)
    slow: dict[str, int] = field(default_factory=dict)
    trainable: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunkPlan:
    """All edges of one chunk, and how each parameter is measured.

    Attributes:
        calls: the calls that the output depends on, and their layouts.
        edges: the edges at which autograd computes derivatives.
        kept_rows: layout and size of the rows that are stored, by edge number.
        inputs: edge numbers of the network's input; empty if no derivative with respect to it is
            needed.
        outs: edge numbers of df/dz of each call; empty if no parameter is asked for.
        layers: edges of A and B of each call; empty if no layer is asked for.
        parameters: how each parameter is measured.
    """

    calls: list[Call]
    layouts: list[Layout | None]
    edges: list[GradientEdge]
    kept_rows: dict[int, RowPlace]
    inputs: list[int]
    outs: list[int]
    layers: list[LayerEdges]
    parameters: ParameterPlan


class EdgeList:
    """A growing list of distinct edges, and the ones whose rows are stored."""

    def __init__(self) -> None:
        self.edges: list[GradientEdge] = []
        self.kept_rows: dict[int, RowPlace] = {}
        self._numbers: dict[tuple[Node, int], int] = {}

    def ask(self, edge: GradientEdge) -> int:
        """Return the number of an edge; a new edge is added."""
        key = (edge.node, edge.output_nr)
        if key not in self._numbers:
            self._numbers[key] = len(self.edges)
            self.edges.append(edge)
        return self._numbers[key]

    def keep(self, edge: GradientEdge, layout: Layout | None, entries: int) -> int:
        """Ask for an edge, store its rows, and return its number."""
        number = self.ask(edge)
        self.kept_rows.setdefault(number, (layout, entries))
        return number

    def number(self, edge: GradientEdge) -> int:
        """Return the number of an edge, or -1 if it was not asked for."""
        return self._numbers.get((edge.node, edge.output_nr), -1)


def reaching_calls(forward: Forward, layouts: Layouts) -> tuple[list[Call], list[Layout | None]]:
    """Return the calls that the output depends on, with their layouts.

    If a parameter has other uses, a view of it counts as a computed weight with its own gradient.
    The parameter's gradient is then a sum over uses that read it in different ways.
    """
    graph = forward.graph
    calls = zip(forward.recording.calls, layouts, strict=True)
    alive = [(call, layout) for call, layout in calls if call.out.node in graph.nodes]
    owned = [
        call
        if call.parameter is call.layer.weight or graph.uses(call.parameter) == 1
        else replace(call, parameter=call.layer.weight)
        for call, _ in alive
    ]
    return owned, [layout for _, layout in alive]


def plan_chunk(
    forward: Forward,
    calls: list[Call],
    layouts: list[Layout | None],
    named: Named,
    needs: frozenset[str],
    *,
    inputs: bool,
) -> ChunkPlan:
    """Plan the edges of one chunk.

    Args:
        forward: the forward pass.
        calls: the calls that reach the output.
        layouts: their layouts.
        named: all parameters.
        needs: names of ``passes.needs`` to compute.
        inputs: whether the derivative with respect to the network's input is asked for.

    Raises:
        NeedsSinglesError: if a parameter has no fast rule and the chunk has several samples.
    """
    edges = EdgeList()
    pairs = zip(forward.edges, forward.fed, strict=True) if inputs else ()
    input_numbers = [edges.keep(edge, Layout(), t[0].numel()) for edge, t in pairs]
    to_parameters = bool(needs & BACK_TO_PARAMETERS)
    outs = [edges.ask(call.out) for call in calls] if to_parameters else []
    layers = []
    if not needs <= WITHOUT_LAYERS:
        for call, layout in zip(calls, layouts, strict=True):
            entries = call.x.numel() // len(forward.f)
            layers.append(_layer_edges(call, layout, entries, edges, forward, needs))
    if to_parameters:
        parameters = _plan_parameters(forward, calls, named, edges, len(forward.f))
    else:  # record the paths only; no derivative is computed at parameters
        parameters = _plan_parameters(forward, calls, named, EdgeList(), 1)
    return ChunkPlan(
        calls, layouts, edges.edges, edges.kept_rows, input_numbers, outs, layers, parameters
    )


def _layer_edges(
    call: Call,
    layout: Layout | None,
    entries: int,
    edges: EdgeList,
    forward: Forward,
    needs: frozenset[str],
) -> LayerEdges:
    """Plan A and B of one call; each is asked for only if a quantity needs it.

    B is asked for separately only if it can differ from A.
    """
    graph, every_layer = forward.graph, bool(needs & {LAYER_TOPS, LAYER_SPECTRA, THROUGH})
    inputs_kept = edges.number(forward.edges[0]) >= 0 if forward.edges else False
    if call.total is None:
        number = edges.keep(call.through, layout, entries) if every_layer else -1
        return LayerEdges(number, number, False, False, -1)
    read_once = graph.read_once(call.total)
    ends = [(edge.node, edge.output_nr) for edge in forward.edges]
    below, below_read_once, reordered = graph.below_views(call.total, set(ends))
    reads_input = (below.node, below.output_nr) in ends
    beside = reads_input and (not below_read_once or len(ends) > 1)
    at_the_input = reads_input and bool(needs & AT_THE_FIRST_LAYER)
    off_the_layer = not read_once and bool(needs & BESIDE_LAYERS)
    total = through = -1
    if every_layer or at_the_input or off_the_layer or (beside and inputs_kept and BYPASS in needs):
        shared = reads_input and read_once and below_read_once and not reordered
        if shared:  # the same layout as the network's input
            total = edges.keep(below, Layout(), entries)
        else:
            total = edges.keep(call.total, layout, entries)
        through = total if read_once else -1
    if not read_once and (off_the_layer or at_the_input):
        through = edges.keep(call.through, layout, entries)
    return LayerEdges(total, through, reads_input, beside, edges.number(below))


def _plan_parameters(
    forward: Forward, calls: list[Call], named: Named, edges: EdgeList, batch: int
) -> ParameterPlan:
    """Choose each parameter's path; a parameter with unrecorded uses takes the slow path."""
    nodes = forward.graph.nodes
    copies = [c for c in forward.recording.copies if c.edge.node in nodes]
    lookups = [t for t in forward.recording.lookups if t.edge.node in nodes]
    plan = ParameterPlan(trainable={id(p): name for name, p in named if p.requires_grad})
    for name, p in named:
        uses = _Uses.of(p, calls, copies, lookups)
        plan.paths[name] = _plan_parameter(plan, name, p, uses, forward.graph, edges, batch)
    grouped = {i for group, _ in plan.groups for i in group}
    for i, call in enumerate(calls):
        name = plan.trainable.get(id(call.parameter), "")
        if i not in grouped and name not in plan.slow and name not in plan.tied:
            plan.groups.append(([i], None))
    return plan


@dataclass(frozen=True)
class _Uses:
    """The recorded uses of one parameter."""

    weights: list[int]
    biases: list[int]
    copies: list[Copies]
    lookups: list[Lookup]
    joinable: bool  # whether all calls with it as their weight read it in the same way
    reads_as_table: bool  # whether they read it like F.linear, one row per output

    @classmethod
    def of(
        cls, p: Tensor, calls: list[Call], copies: Sequence[Copies], lookups: Sequence[Lookup]
    ) -> _Uses:
        weights = [i for i, c in enumerate(calls) if c.parameter is p]
        return cls(
            weights,
            [i for i, c in enumerate(calls) if c.layer.bias is p],
            [c for c in copies if c.parameter is p],
            [t for t in lookups if t.parameter is p],
            len({_way_of_reading(calls[i]) for i in weights}) == 1,
            all(calls[i].layer.weight is p and calls[i].layer.way == WAY_OF_LINEAR for i in weights)
            and not any(c.layer.bias is p for c in calls)
            and not any(c.parameter is p for c in copies),
        )

    @property
    def count(self) -> int:
        return len(self.weights) + len(self.biases) + len(self.copies)


def _way_of_reading(call: Call) -> Hashable:
    """Return how a call reads its parameter; gradients of calls with equal values can be added."""
    weight = call.layer.weight
    return call.layer.joins, tuple(weight.shape), weight.stride()


def _plan_parameter(
    plan: ParameterPlan,
    name: str,
    p: Tensor,
    seen: _Uses,
    graph: Graph,
    edges: EdgeList,
    batch: int,
) -> str:
    """Plan one parameter and return its path."""
    uses = graph.uses(p)
    if not p.requires_grad:
        if seen.weights and seen.joinable:
            plan.groups.append((seen.weights, None))
        return "frozen"
    if uses == 0:
        return "unused"
    if uses == seen.count == len(seen.weights) and seen.joinable:
        plan.groups.append((seen.weights, name))
        return "layer"
    if uses == seen.count and not seen.weights:
        numbers = [edges.keep(c.edge, Layout(c.dim), p.numel()) for c in seen.copies]
        plan.rules[name] = (seen.biases, numbers)
        return "rule"
    tied = bool(seen.weights) and uses == seen.count + len(seen.lookups) and seen.reads_as_table
    if (uses == len(seen.lookups) or (tied and seen.lookups)) and all(
        t.source is None or graph.read_once(t.source) for t in seen.lookups
    ):
        if tied:
            plan.tied[name] = seen.weights
        layout = Layout() if batch > 1 else None
        plan.tables[name] = [
            (edges.keep(t.edge, layout, t.indices.shape[1] * p.shape[1]), t) for t in seen.lookups
        ]
        return "rule"
    if batch > 1:
        raise NeedsSinglesError(f"no fast rule for {name}")
    plan.slow[name] = edges.keep(get_gradient_edge(p), None, p.numel())
    return "slow"
