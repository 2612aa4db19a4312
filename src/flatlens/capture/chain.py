"""Decide from the autograd graph whether a network is a chain of layers and Lipschitz maps.

Let f = g_L o (C_L . + b_L) o ... o g_1 o (C_1 . + b_1), where map g_l has the Lipschitz constant
c_l in the Euclidean norm. Every derivative of f then has a spectral norm of at most prod_l c_l
||C_l|| (Szegedy et al. 2014; docs/theory.md, section 8). The walk goes from the output down to the
input. A network in which two branches meet, or a function has no known constant, is no such chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flatlens.capture.graph import VIEWS, Graph
from flatlens.capture.recording import Call


@dataclass(frozen=True)
class Chain:
    """The layers of a chain and the product of the constants of all other maps.

    Attributes:
        layers: indices of the measured layers on the way from the output to the input.
        constant: the product of the Lipschitz constants of the maps between them.
        why: why the network is no chain, or "".
    """

    layers: tuple[int, ...] = ()
    constant: float = 1.0
    why: str = ""

    def joined(self, other: Chain) -> Chain:
        """Join the chains of two groups of samples: the larger constant, or the first reason."""
        if self.why or other.why:
            return self if self.why else other
        if self.layers != other.layers:
            return Chain(why="samples take different layers")
        return Chain(self.layers, max(self.constant, other.constant))


@dataclass(frozen=True)
class UnreadChain:
    """The chain of one chunk, whose constant may still be on a device.

    Attributes:
        layers, why: as in :class:`Chain`.
        constant: the product of the Lipschitz constants. It is a tensor if a parameter or a buffer
            contributes to it; reading it would make the host wait.
    """

    layers: tuple[int, ...] = ()
    constant: float | Tensor = 1.0
    why: str = ""


def join(chains: Sequence[UnreadChain]) -> Chain | None:
    """Join the chains of all chunks; return None if there are no chunks.

    The constants of all chunks are read at once.
    """
    tensors = [chain.constant for chain in chains if isinstance(chain.constant, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    read = [
        Chain(
            chain.layers,
            next(numbers) if isinstance(chain.constant, Tensor) else chain.constant,
            chain.why,
        )
        for chain in chains
    ]
    return reduce(Chain.joined, read) if read else None


class _NoChainError(Exception):
    """Raised inside the walk; its message says why the network is no chain."""


def find_chain(
    f: Tensor, graph: Graph, inputs: Sequence[GradientEdge], calls: Sequence[Call]
) -> UnreadChain:
    """Walk from the output to the input and multiply the constants.

    Args:
        f: the output.
        graph: the autograd graph behind it.
        inputs: the edges where the derivatives with respect to the network's inputs arrive.
        calls: the calls that reach the output, in the order of the measured layers.

    Returns:
        The chain, or an empty chain whose ``why`` is the reason.
    """
    if len(inputs) != 1:
        return UnreadChain(why="the network has several inputs")
    try:
        return _walk(get_gradient_edge(f), _below(graph, inputs[0].node), inputs[0], calls)
    except _NoChainError as why:
        return UnreadChain(why=str(why))


def _below(graph: Graph, start: Any) -> set[Any]:
    """Collect all nodes that depend on the input."""
    readers: dict[Any, list[Any]] = {}
    for (node, _), nodes in graph.readers.items():
        readers.setdefault(node, []).extend(nodes)
    seen, queue = {start}, [start]
    while queue:
        for reader in readers.get(queue.pop(), []):
            if reader not in seen:
                seen.add(reader)
                queue.append(reader)
    return seen


def _walk(
    edge: GradientEdge, dependent: set[Any], end: GradientEdge, calls: Sequence[Call]
) -> UnreadChain:
    layers: list[int] = []
    constant: float | Tensor = 1.0
    by_output = {(call.out.node, call.out.output_nr): i for i, call in enumerate(calls)}
    while edge.node is not end.node:
        node = edge.node
        children = [(c, k) for c, k in node.next_functions if c is not None and c in dependent]
        name = node.name().removesuffix("Backward0")
        if len(children) != 1:
            joins = "joins several branches" if children else "does not depend on the input"
            raise _NoChainError(f"{name} {joins}")
        number = by_output.get((node, edge.output_nr))
        if number is None:
            constant *= _constant(node, name, children[0])
            edge = GradientEdge(*children[0])
            continue
        if calls[number].layer.kind == "bilinear":
            raise _NoChainError("a bilinear layer multiplies two inputs")
        layers.append(number)
        total = calls[number].total
        if total is None:
            raise _NoChainError("a layer does not read what depends on the input")
        edge = total
    return UnreadChain(tuple(layers), constant)


def _constant(node: Any, name: str, child: tuple[Any, int]) -> float | Tensor:
    if node.name() in VIEWS:
        return 1.0
    rule = CONSTANTS.get(name)
    if rule is None:
        raise _NoChainError(f"{name} has no known Lipschitz constant")
    return rule(node, child) if callable(rule) else rule


# -- constants -------------------------------------------------------------------------------------


def _elu(node: Any, _: Any) -> float:
    """Return the constant of ELU and SELU: slope ``scale`` above 0, steepest at 0 below."""
    below = node._saved_scale * node._saved_alpha * node._saved_input_scale
    return float(max(abs(node._saved_scale), abs(below)))


def _reads(kernel: Any, stride: Any, dilation: Any) -> int:
    """Return the largest number of pooling windows that read one entry."""
    stride = list(stride) or list(kernel)
    dilation = list(dilation) or [1] * len(kernel)
    sizes = zip(kernel, stride, dilation, strict=True)
    return prod(-(-k * gcd(s, d) // s) for k, s, d in sizes)


def _max_pool(node: Any, _: Any) -> float:
    return sqrt(_reads(node._saved_kernel_size, node._saved_stride, node._saved_dilation))


def _average_pool(node: Any, _: Any) -> float:
    """Return sqrt(row sum times column sum), which bounds the spectral norm of the pooling."""
    kernel = node._saved_kernel_size
    reads = _reads(kernel, node._saved_stride, [])
    if getattr(node, "_saved_divisor_override", None) is not None:
        raise _NoChainError("an average pooling sets its own divisor")
    # A window at the border may divide by fewer entries than the kernel has.
    plain = not any(node._saved_padding) and not node._saved_ceil_mode
    return sqrt(reads / prod(kernel)) if plain else sqrt(reads)


def _batch_norm(node: Any, _: Any) -> Tensor:
    if node._saved_training:
        raise _NoChainError("a batch norm uses the statistics of the batch")
    scale = (node._saved_running_var.double() + node._saved_eps).rsqrt()
    weight = node._saved_weight
    return (scale if weight is None else scale * weight.detach().double()).abs().max()


def _scale(node: Any, child: tuple[Any, int]) -> float | Tensor:
    """Return the constant of a product with values that do not depend on the input."""
    first_is_data = node.next_functions[0] == child
    factor = node._saved_other if first_is_data else node._saved_self
    _same_shape(node, child)
    if factor is None:
        raise _NoChainError("Mul has a factor that is not known")
    return _sizes(factor)[1]


def _quotient(node: Any, child: tuple[Any, int]) -> float | Tensor:
    """Return the constant of a division by values that do not depend on the input."""
    _same_shape(node, child)
    if node.next_functions[0] != child or node._saved_other is None:
        raise _NoChainError("Div divides by what depends on the input")
    return 1 / _sizes(node._saved_other)[0]


def _sizes(values: Any) -> tuple[float | Tensor, float | Tensor]:
    """Return the smallest and the largest absolute value of a tensor's entries, or of a number."""
    if not isinstance(values, Tensor):
        return abs(float(values)), abs(float(values))
    sizes = values.detach().double().abs()
    return sizes.min(), sizes.max()


def _shift(node: Any, child: tuple[Any, int]) -> float:
    """Return the constant of a sum with values that do not depend on the input."""
    _same_shape(node, child)
    scale = float(getattr(node, "_saved_alpha", 1))
    return max(1.0, abs(scale))


def _same_shape(node: Any, child: tuple[Any, int]) -> None:
    own, below = node._input_metadata[0].shape, child[0]._input_metadata[child[1]].shape
    if tuple(own) != tuple(below):
        raise _NoChainError("entries are repeated (broadcast)")


Rule = float | Callable[[Any, Any], float | Tensor]
CONSTANTS: dict[str, Rule] = {
    **dict.fromkeys(("Relu", "Tanh", "Hardtanh", "Softplus", "Clone", "LogSigmoid"), 1.0),
    **dict.fromkeys(("ToCopy", "Contiguous", "Slice", "Select", "Abs"), 1.0),
    "Sigmoid": 0.25,
    "Gelu": lambda node, _: 1.129 if node._saved_approximate == "none" else 1.13,
    "Silu": 1.0999,
    "LeakyRelu": lambda node, _: max(1.0, abs(float(node._saved_negative_slope))),
    "Elu": _elu,
    "MaxPool2DWithIndices": _max_pool,
    "MaxPool3DWithIndices": _max_pool,
    "AvgPool2D": _average_pool,
    "AvgPool3D": _average_pool,
    "Celu": 1.0,
    "MeanBackward1": 1.0,  # the mean of k entries has norm 1 / sqrt(k)
    "NativeBatchNorm": _batch_norm,
    "CudnnBatchNorm": _batch_norm,
    "Mul": _scale,
    "Div": _quotient,
    "Add": _shift,
    "Sub": _shift,
}
