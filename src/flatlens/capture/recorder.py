"""See every linear map of a forward pass, whoever calls it, and each parameter's other uses.

A :class:`Recorder` is a ``TorchFunctionMode``: inside it every ``linear`` and ``conv*`` call is
seen with its real input, weight and output, be it made by a module, by a module called thrice or by
``F.linear`` on another module's weight. Nothing is computed here; the autograd *edges* are kept:

- ``total``    where df/dx of the tensor that enters the layer arrives (A of ``docs/theory.md``);
- ``through``  the same for an alias that this layer alone reads (B);
- ``out``      where df/dz of the layer's output arrives (J).

Functions that use a parameter in a broadcast (norm layers, scales, class tokens, position
embeddings) get one copy of it per sample, so that autograd itself delivers per-sample gradients at
the copy. What is left over is found by counting a parameter's uses in the autograd graph
(:class:`Graph`): if more uses exist than were seen, the parameter takes the slow path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from flatlens.errors import FlatlensError

CONVS: dict[Callable[..., Any], tuple[int, bool]] = {
    F.conv1d: (1, False),
    F.conv2d: (2, False),
    F.conv3d: (3, False),
    F.conv_transpose1d: (1, True),
    F.conv_transpose2d: (2, True),
    F.conv_transpose3d: (3, True),
}
BROADCASTS = {
    *("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "where", "lerp"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__"),
    *("__itruediv__", "rsub", "addcmul"),
}
EXPANDS = {"expand", "expand_as", "repeat"}
RESHAPES = {  # the same entries in the same order
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"),
    *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
}
VIEWS = RESHAPES | {"TransposeBackward0", "PermuteBackward0", "TBackward0"}


@dataclass(frozen=True)
class Geometry:
    """How a convolution visits its input; every tuple has one entry per spatial dimension."""

    transposed: bool
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (left, right)
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...]
    pad_mode: str = "constant"  # how the layer pads its own input


@dataclass(frozen=True)
class LinearMap:
    """What a call computes, z = W u + b at every position, without the data it met."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry | None  # None for a linear layer
    in_shape: torch.Size
    out_shape: torch.Size
    turned: bool = False  # the weight of a linear layer is kept as [d_in, d_out]

    @property
    def transposed(self) -> bool:
        """Whether this is a transposed convolution."""
        return self.geometry is not None and self.geometry.transposed

    @property
    def matrix(self) -> Tensor:
        """The weight as [groups, d_out, d_in]."""
        W = self.weight.detach()
        if self.geometry is None:
            return (W.mT if self.turned else W).unsqueeze(0)
        W = W.reshape(self.geometry.groups, W.shape[0] // self.geometry.groups, -1)
        return W.mT if self.geometry.transposed else W


@dataclass
class Call:
    """One use of a linear map."""

    map: LinearMap
    x: Tensor
    through: GradientEdge
    total: GradientEdge | None
    out: GradientEdge
    versions: tuple[tuple[Tensor, int], tuple[Tensor, int]]


@dataclass
class Copies:
    """A parameter used with one copy per sample; ``dim`` is where the copies are stacked."""

    parameter: Tensor
    edge: GradientEdge
    dim: int


@dataclass
class Lookup:
    """Rows of a table (an embedding) that each sample takes, samples first."""

    parameter: Tensor
    edge: GradientEdge
    indices: Tensor
    padding: int  # the row without a gradient, or -1
    source: GradientEdge | None = None  # of what was looked up once and copied for each sample


@dataclass(frozen=True)
class Plan:
    """What two trial runs (one sample, two samples) learnt about a model."""

    batch_dims: tuple[int | None, ...] | None = None  # per event: where its result has the batch
    clone: frozenset[int] | None = None  # calls whose tensors are overwritten in place; None: all


class Recorder(TorchFunctionMode):
    """Records the calls of one forward pass over ``batch`` samples."""

    def __init__(
        self, model: nn.Module, batch: int, plan: Plan, tokens: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self.batch, self.plan = batch, plan
        self.tokens = tokens  # integer inputs, which are seen through their embeddings
        self.embedded: list[tuple[Tensor, GradientEdge]] = []
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.pad_modes = {
            (tuple(m._reversed_padding_repeated_twice), m.padding_mode)
            for m in model.modules()
            if isinstance(m, nn.modules.conv._ConvNd) and m.padding_mode != "zeros"
        }
        self.calls: list[Call] = []
        self.copies: list[Copies] = []
        self.lookups: list[Lookup] = []
        self.events: list[torch.Size] = []  # results that a parameter met in a broadcast
        self._padded: dict[int, tuple[Tensor, int, Tensor, tuple[tuple[int, int], ...], str]] = {}
        self._rows: dict[int, tuple[Tensor, Lookup | None]] = {}  # looked up; for all samples
        self._derived = {id(t): t for t in tokens}  # integers made of them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():  # no derivative passes here
            return func(*args, **kwargs)
        if self.tokens:
            return self._derive(self._seen(func, args, kwargs), args)
        return self._seen(func, args, kwargs)

    def _seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in CONVS:
            return self._conv(func, *args, **kwargs)
        if func is F.pad:
            return self._pad(*args, **kwargs)
        if func in (torch.addmm, Tensor.addmm) and not kwargs and self._is_parameter(args[2]):
            return self._addmm(*args)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._reenter(func, args, kwargs)
        if rewrite := REWRITES.get(func):
            return rewrite(self, *args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in BROADCASTS:
            return self._broadcast(func, args, kwargs)
        if name in EXPANDS and self._is_parameter(args[0]):
            return self._expand(func, args, kwargs)
        return func(*args, **kwargs)

    # -- linear maps --------------------------------------------------------------------------

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dim() != 2 or input.numel() == 0:  # a dot product, or nothing at all
            return F.linear(input, weight, bias)
        if bias is not None and bias.shape != weight.shape[:1]:  # it is broadcast
            return self._broadcast(torch.add, (self._linear(input, weight), bias), {})
        alias, total = self._alias(input)
        z = F.linear(alias, weight, bias)
        layer = LinearMap("linear", weight, bias, None, input.shape, z.shape)
        return self._record(layer, input, alias, total, z)

    def _conv(
        self,
        func: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        dims, transposed = CONVS[func]
        names = ["output_padding", "groups", "dilation"] if transposed else ["dilation", "groups"]
        options = {**dict(zip(names, rest, strict=False)), **options}
        kernel, dilation = weight.shape[2:], _each(options.get("dilation", 1), dims)
        pads, mode = _pads(padding, kernel, dilation, dims), "constant"
        padded = None if any(map(any, pads)) else self._padded.get(id(input))
        if padded and input._version == padded[1]:
            _, _, input, pads, mode = padded
        else:
            padded = None
        geometry = Geometry(
            transposed,
            _each(stride, dims),
            pads,
            dilation,
            int(options.get("groups", 1)),
            _each(options.get("output_padding", 0), dims),
            mode,
        )
        alias, total = self._alias(input)
        read = F.pad(alias, flat_pads(pads), mode) if padded else alias
        z = func(read, weight, bias, stride, padding, **options)
        layer = LinearMap(func.__name__, weight, bias, geometry, input.shape, z.shape)
        return self._record(layer, input, alias, total, z)

    def _pad(self, input: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
        """Remember a pad that a convolution layer does itself (padding_mode != "zeros")."""
        result = F.pad(input, pad, mode, value)
        if (tuple(pad), mode) in self.pad_modes:
            pairs = tuple((pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2))
            self._padded[id(result)] = (result, result._version, input, pairs, mode)
        return result

    def _addmm(self, bias: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        """A linear layer that keeps its weight as [d_in, d_out] (transformers' Conv1D)."""
        alias, total = self._alias(input)
        own = bias if bias.shape == weight.shape[1:] else None  # else it is broadcast
        z = alias @ weight if own is None else torch.addmm(own, alias, weight)
        layer = LinearMap("linear", weight, own, None, input.shape, z.shape, turned=True)
        given = self._record(layer, input, alias, total, z)
        return given if own is not None else self._broadcast(torch.add, (given, bias), {})

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """Rows of a table for each sample; those of an input stand for that input."""
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        z = F.embedding(input, weight, *options)
        if self._is_parameter(weight) and not (scale_grad_by_freq or sparse):
            z = self._rows_of(z, input, weight, padding_idx)
        flat = input.detach().flatten()
        same = (t.numel() == len(flat) and torch.equal(t.flatten(), flat) for t in self.tokens)
        if id(input) not in self._derived or not any(same):
            return z
        if not z.requires_grad:  # a frozen table
            z = z.detach().requires_grad_()
        self.embedded.append((z.detach(), get_gradient_edge(z)))
        return z.clone()

    def _rows_of(self, z: Tensor, input: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Note a lookup; one for all samples (positions 0, 1, 2 ...) waits for its broadcast."""
        event, dims = self.new_event(z.shape), self.plan.batch_dims
        self._rows[id(z)] = (z, None)
        if self.batch == 1:
            dim: int | None = 0
        elif dims is None or event >= len(dims) or z.dim() < 2:
            return z
        else:
            dim = dims[event]
        indices = input.detach().reshape(1 if dim is None else self.batch, -1)
        padding = -1 if padding is None else padding % len(weight)
        lookup = Lookup(weight, get_gradient_edge(z), indices, padding)
        if dim is None:
            self._rows[id(z)] = (z, lookup)
        elif dim == 0:
            self.lookups.append(lookup)
        return z

    def _rows_per_sample(self, z: Tensor, shape: torch.Size, event: int) -> Tensor:
        """Rows looked up for all samples, one copy for each where they meet a whole batch."""
        aligned, dims = (1,) * (len(shape) - z.dim()) + z.shape, self.plan.batch_dims
        known = dims is not None and event < len(dims) and dims[event] == 0
        found = self._rows[id(z)][1]
        if found is None or not known or aligned[0] != 1 or shape[0] != self.batch:
            return z
        copies = z.reshape(aligned).expand(self.batch, *aligned[1:])
        indices = found.indices.expand(self.batch, -1)
        edge = get_gradient_edge(copies)
        self.lookups.append(Lookup(found.parameter, edge, indices, found.padding, found.edge))
        return copies

    def _derive(self, result: Any, args: Any) -> Any:
        """Remember integers that are made of an integer input."""
        whole = isinstance(result, Tensor) and not result.is_floating_point()
        if whole and any(id(a) in self._derived for a in args):
            self._derived[id(result)] = result
        return result

    def _alias(self, x: Tensor) -> tuple[Tensor, GradientEdge | None]:
        if x.is_complex():
            raise FlatlensError("a layer reads complex numbers; only real networks are measured")
        if not x.requires_grad:  # a constant feeds the layer: nothing else can be told about it
            return x.detach().requires_grad_(), None
        return x.view_as(x), get_gradient_edge(x)

    def _record(
        self, layer: LinearMap, x: Tensor, alias: Tensor, total: GradientEdge | None, z: Tensor
    ) -> Tensor:
        """Keep the edges. An in-place successor would move z's edge, so z is cloned for it."""
        if not z.requires_grad:
            return z
        if torch.finfo(z.dtype).bits < 32:
            raise FlatlensError(
                f"the model computes in {str(z.dtype).removeprefix('torch.')} inside its forward "
                "(autocast?); switch that off, so that it is measured in its own precision"
            )
        clone = self.plan.clone is None or len(self.calls) in self.plan.clone
        given = z.clone() if clone else z
        self.calls.append(
            Call(
                layer,
                x.detach().clone() if clone else x.detach(),
                get_gradient_edge(alias),
                total,
                get_gradient_edge(z),
                ((x, x._version), (given, given._version)),
            )
        )
        return given

    def overwritten(self) -> frozenset[int]:
        """The calls whose input or output was changed in place after the call."""
        return frozenset(
            i for i, c in enumerate(self.calls) if any(t._version != v for t, v in c.versions)
        )

    def _reenter(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a python function that offers itself to modes, with this mode still on inside."""
        functions: Any = F
        offered = functions.has_torch_function
        functions.has_torch_function = lambda *_: False
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            functions.has_torch_function = offered

    # -- one copy of a parameter per sample ------------------------------------------------------

    def _is_parameter(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self.names and value.requires_grad

    def of_parameters(self, t: Tensor) -> bool:
        """Whether ``t`` is made of parameters alone, or a view of a frozen one."""
        if t.requires_grad:
            return Graph(t).leaves <= self.names.keys()
        return t.untyped_storage().data_ptr() in self.storages

    def new_event(self, shape: torch.Size) -> int:
        """Note that a parameter meets a result of ``shape``; trial runs compare these shapes."""
        self.events.append(shape)
        return len(self.events) - 1

    def per_sample(
        self, p: Tensor, shape: torch.Size, event: int, view: tuple[int, ...] | None = None
    ) -> Tensor:
        """``p`` (seen as ``view``) with one copy per sample along the batch dimension of ``shape``.

        Where that dimension is unknown or ``p`` already fills it, ``p`` itself is returned; the
        count of its uses then sends it down the slow path.
        """
        view = tuple(p.shape) if view is None else view
        dims = self.plan.batch_dims
        if dims is None:
            dim: int | None = 0 if self.batch == 1 else None
        else:
            dim = dims[event] if event < len(dims) else None
        aligned = (1,) * (len(shape) - len(view)) + view
        if (
            not self._is_parameter(p)
            or dim is None
            or len(aligned) != len(shape)
            or aligned[dim] != 1
            or shape[dim] != self.batch
        ):
            return p.reshape(view)
        copies = p.reshape(aligned).expand(*aligned[:dim], self.batch, *aligned[dim + 1 :])
        self.copies.append(Copies(p, get_gradient_edge(copies), dim))
        return copies

    def _broadcast(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not any(self._is_parameter(a) or id(a) in self._rows for a in args):
            return func(*args, **kwargs)
        shape = torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, Tensor)))
        event = self.new_event(shape)
        each = []
        for a in args:
            if self._is_parameter(a):
                a = self.per_sample(a, shape, event)
            elif id(a) in self._rows:
                a = self._rows_per_sample(a, shape, event)
            each.append(a)
        return func(*each, **kwargs)

    def _expand(self, func: Any, args: Any, kwargs: Any) -> Any:
        p, result = args[0], func(*args, **kwargs)
        sizes = zip(reversed(p.shape), reversed(result.shape), strict=False)
        if any(s not in (1, r) for s, r in sizes):  # a true repeat, not a broadcast
            return result
        known = len(self.copies)
        copies = self.per_sample(p, result.shape, self.new_event(result.shape))
        if len(self.copies) == known:
            return result
        expanded = copies.expand(result.shape)
        return expanded.clone() if func.__name__ == "repeat" else expanded


def _each(value: Any, dims: int) -> tuple[int, ...]:
    value = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return tuple(int(v) for v in (value * dims if len(value) == 1 else value))


def _pads(
    padding: Any, kernel: torch.Size, dilation: tuple[int, ...], dims: int
) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    return tuple((p, p) for p in _each(padding, dims))


def flat_pads(pads: tuple[tuple[int, int], ...]) -> list[int]:
    """Pairs in the order of ``F.pad``: last dimension first."""
    return [v for pair in reversed(pads) for v in pair]


# -- functions with an affine part, split so that the part can have a copy per sample -----------


def _affine(
    recorder: Recorder,
    normed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    view: tuple[int, ...],
) -> Tensor:
    """normed * weight + bias, the parameters seen as ``view``."""
    event = recorder.new_event(normed.shape)
    if weight is not None:
        normed = normed * recorder.per_sample(weight, normed.shape, event, view)
    if bias is not None:
        normed = normed + recorder.per_sample(bias, normed.shape, event, view)
    return normed


def channels(x: Tensor) -> tuple[int, ...]:
    return (x.shape[1], *(1,) * (x.dim() - 2))


def _layer_norm(
    recorder: Recorder,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normed = F.layer_norm(input, normalized_shape, None, None, eps)
    return _affine(recorder, normed, weight, bias, tuple(normalized_shape))


def _rms_norm(
    recorder: Recorder,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    normed = F.rms_norm(input, normalized_shape, None, eps)
    return _affine(recorder, normed, weight, None, tuple(normalized_shape))


def _group_norm(
    recorder: Recorder,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normed = F.group_norm(input, num_groups, None, None, eps)
    return _affine(recorder, normed, weight, bias, channels(input))


def _batch_norm(
    recorder: Recorder,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training and running_mean is None and recorder.of_parameters(input):
        return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)
    if training:
        where = recorder.names.get(id(weight), "a BatchNorm layer").removesuffix(".weight")
        raise FlatlensError(
            f"{where} normalises with the statistics of the batch, so samples depend on one "
            "another; give it running statistics (track_running_stats=True, trained or calibrated)"
        )
    if running_mean is None or running_var is None:  # torch says what it needs
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    normed = standardised(input, running_mean, running_var, eps)
    return _affine(recorder, normed, weight, bias, channels(input))


def standardised(input: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Batch norm in evaluation mode, without its affine part, as a formula.

    For one sample torch's own backward pass is wrong where the gradient arrives with channels last
    (torch 2.13 on the CPU).
    """
    view = channels(input)
    return (input - mean.reshape(view)) * (var.reshape(view) + eps).rsqrt()


def _instance_norm(
    recorder: Recorder,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    normed = F.instance_norm(
        input, running_mean, running_var, None, None, use_input_stats, momentum, eps
    )
    return _affine(recorder, normed, weight, bias, channels(input))


def _prelu(recorder: Recorder, input: Tensor, weight: Tensor) -> Tensor:
    view = channels(input) if weight.numel() > 1 else (1,) * max(input.dim() - 1, 0)
    slope = recorder.per_sample(weight, input.shape, recorder.new_event(input.shape), view)
    return torch.where(input > 0, input, slope * input)


REWRITES: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.prelu: _prelu,
}


class Graph:
    """The autograd graph behind an output: who is reachable, and who reads what how often."""

    def __init__(self, output: Tensor) -> None:
        self.readers: dict[tuple[Node, int], list[Node]] = {}  # edge -> the nodes that read it
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
        """How often a leaf is used; each reader of a mere view of it (a transpose) counts."""
        node = self._leaves.get(id(leaf))
        return 0 if node is None else self._uses(node, 0)

    def _uses(self, node: Node, index: int) -> int:
        return sum(
            self._uses(reader, 0) if reader.name() in VIEWS else 1
            for reader in self.readers.get((node, index), [])
        )

    def alone(self, edge: GradientEdge) -> bool:
        """Whether just one node reads what ``edge`` stands for."""
        return len(self.readers.get((edge.node, edge.output_nr), [])) == 1

    def unviewed(self, edge: GradientEdge) -> tuple[GradientEdge, bool]:
        """The edge below all reshapes, and whether nothing else reads what they reshape."""
        alone = True
        while edge.node.name() in RESHAPES:
            node, index = edge.node.next_functions[0]
            assert node is not None  # a view of something that needs no gradient has no node
            edge = GradientEdge(node, index)
            alone = alone and self.alone(edge)
        return edge, alone
