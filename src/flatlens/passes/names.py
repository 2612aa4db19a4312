"""Names of layers, taken from the parameters behind their weights."""

from __future__ import annotations

from flatlens.capture.graph import Graph
from flatlens.capture.layer import Layer
from flatlens.passes.forward import Subject


def layer_name(layer: Layer, subject: Subject) -> str:
    """Return the name of a layer: the parameters behind its weight, or else its kind."""
    owned = {id(t): n for n, t in [*subject.named, *subject.model.named_buffers()]}
    if id(layer.weight) in owned:
        sources = [owned[id(layer.weight)]]
    elif layer.weight.requires_grad:
        leaves = Graph(layer.weight).leaves
        sources = [name for i, name in owned.items() if i in leaves]
    else:
        sources = []
    if not sources:
        return layer.kind
    words = [name.split(".") for name in sources]
    prefix = [w[0] for w in zip(*words, strict=False) if len(set(w)) == 1]
    if "parametrizations" in prefix:
        return ".".join(prefix[: prefix.index("parametrizations")]) or layer.kind
    name = ".".join(prefix)
    if len(sources) > 1:
        return name or layer.kind
    return name.removesuffix("weight").rstrip("._") or name
