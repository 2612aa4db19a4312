"""Parameters that multiply a tensor in a way that is not measured as a layer.

Such a parameter is part of the sharpness, but its linear map is missing from NMLS and from the
bounds over all layers. Its name is reported, so that no bound claims to hold over every layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from flatlens.capture.graph import VIEWS, Graph
from flatlens.capture.recording import Call
from flatlens.passes.forward import Named

# Operations that pass on all or some entries; the operation that reads the result decides.
HANDED_ON = VIEWS | {
    *("SelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0"),
    *("UnbindBackward0", "CloneBackward0", "ToCopyBackward0", "ExpandBackward0"),
    *("NarrowBackward0", "AsStridedBackward0", "RepeatBackward0", "ChunkBackward0"),
}
# Elementwise functions, lookups, reductions and joins: scales, shifts, tokens, tables, weights that
# are computed further. None of them is a linear map of a layer's input.
NO_LINEAR_MAPS = (
    *("Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Neg", "Exp", "Expm1", "Log", "Sqrt", "Rsqrt"),
    *("Reciprocal", "Abs", "Sigmoid", "LogSigmoid", "Softplus", "Tanh", "Relu", "Gelu", "Silu"),
    *("Softmax", "LogSoftmax", "Clamp", "Erf", "Sin", "Cos", "Where", "Maximum", "Minimum"),
    *("Lerp", "Addcmul", "Addcdiv", "Square", "Sign", "Round", "MaskedFill", "Flip", "Roll"),
    *("Embedding", "Index", "Gather", "Take", "Cat", "Stack", "Sum", "Mean", "LinalgVectorNorm"),
    *("Norm", "WeightNormInterface", "NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm"),
    *("FusedRmsNorm", "PreluKernel", "LeakyRelu", "Upsample", "GridSampler", "Tril", "Triu"),
    *("CopySlices", "ConstantPadNd", "Cumsum", "Diag", "Elu", "Hardtanh", "Hardswish"),
)
LINEAR_MAPS = ("Addmm", "Addmv", "Addbmm", "Addr")  # names that begin like "Add"


def unmeasured(
    graph: Graph, calls: Sequence[Call], named: Named, candidates: Sequence[str]
) -> tuple[str, ...]:
    """Return the candidates that multiply a tensor outside of all measured layers.

    Args:
        graph: the autograd graph behind the outputs.
        calls: the measured layers.
        named: all parameters.
        candidates: names of parameters that have unrecorded uses.
    """
    if not candidates:
        return ()
    sources: set[int] = set()
    for call in calls:
        for t in (call.layer.weight, call.layer.bias):
            if t is not None and t.requires_grad:
                sources |= {id(t)} if t.is_leaf else Graph(t).leaves
    candidate_names = set(candidates)
    return tuple(
        name
        for name, p in named
        if name in candidate_names and id(p) not in sources and _multiplies(graph, p)
    )


def _multiplies(graph: Graph, p: Tensor) -> bool:
    """Whether an operation that may be a linear map reads a parameter."""
    leaf = graph.leaf(p)
    queue: list[Node] = [] if leaf is None else [leaf]
    seen = set(queue)
    while queue:
        node = queue.pop()
        for reader in graph.readers_by_node.get(node, []):
            name = reader.name()
            if name in HANDED_ON:
                if reader not in seen:
                    seen.add(reader)
                    queue.append(reader)
            elif name.startswith(LINEAR_MAPS) or not (
                name.startswith(NO_LINEAR_MAPS) and name[-1].isdigit()
            ):
                return True
    return False
