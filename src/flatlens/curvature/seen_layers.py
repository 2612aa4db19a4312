"""The layers of a network, found by running it on one sample and on two."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from flatlens.capture.graph import Graph
from flatlens.capture.inputs import Inputs
from flatlens.capture.layout import Layout
from flatlens.capture.recorder import Recorder
from flatlens.capture.recording import Call, CapturePlan, Recording
from flatlens.curvature.hessians import Network
from flatlens.errors import FlatlensError
from flatlens.passes.arrangement import call_layout


class SeenLayers:
    """The measured layers of a network by the name of their weight.

    ``calls`` holds the layers whose weight is a trainable parameter. A layer is ``simple`` if its
    weight is used in only one call, in which the rows of each sample are known.
    """

    def __init__(self, net: Network) -> None:
        self.net = net
        inputs = net.batches[0]
        self.f, self.single_calls = record(net, inputs.take(slice(0, 1)))
        self.graph = Graph(self.f) if self.f.requires_grad else None
        self.calls: dict[str, list[Call]] = {}
        self.place: dict[str, int] = {}  # index of each weight's last call
        self.last_linear: Call | None = None
        names = {id(p): name for name, p in net.model.named_parameters() if p.requires_grad}
        for place, call in enumerate(self.single_calls):
            reached = self.graph is not None and call.out.node in self.graph.nodes
            if reached and call.layer.is_linear:
                self.last_linear = call
            if reached and (name := names.get(id(call.layer.weight))) is not None:
                self.calls.setdefault(name, []).append(call)
                self.place[name] = place
        pair_calls = record(net, inputs.take(slice(0, 2)))[1] if inputs.n > 1 else []
        self.pairs = pair_calls if len(pair_calls) == len(self.single_calls) else []

    def find(self, layer: str | None, names: list[str]) -> str:
        """Return the name of a layer's weight; without a layer the last one of ``names``."""
        if layer is None:
            return max(names, key=lambda name: self.place[name])
        for name in names:
            if layer in (name, short_name(name)):
                return name
        known = ", ".join(short_name(name) for name in names)
        raise FlatlensError(
            f"no layer {layer!r} whose weight is a trainable parameter; there are {known}"
        )

    def is_output(self, name: str) -> bool:
        """Whether f is this layer's output at one position, and its weight has no other use."""
        call, graph = self.calls[name][-1], self.graph
        assert graph is not None
        end = graph.below_reshapes(get_gradient_edge(self.f))[0].node
        return (
            end is graph.below_reshapes(call.out)[0].node
            and self.f.shape[1] == call.layer.matrix.shape[1]
            and graph.uses(call.layer.weight) == 1
        )

    def layout(self, name: str) -> Layout | None:
        """Return the layout of a simple layer's input; None for a layer that is not simple."""
        calls, graph = self.calls[name], self.graph
        assert graph is not None
        if not self.pairs or len(calls) > 1 or graph.uses(calls[0].layer.weight) > 1:
            return None
        call, pair = calls[0], self.pairs[self.place[name]]
        return call_layout(call, pair)


def record(net: Network, inputs: Inputs) -> tuple[Float[Tensor, "b N"], list[Call]]:
    """Return f and its layer calls; tensors of a call are cloned only if they are overwritten."""
    overwritten: frozenset[int] = frozenset()
    while True:
        recording = Recording(net.model, inputs.n, CapturePlan(None, overwritten))
        with Recorder(recording):
            f = net.outputs(inputs)
        if recording.overwritten() <= overwritten:
            return f, recording.calls
        overwritten |= recording.overwritten()


def short_name(name: str) -> str:
    """Return the name of a layer from the name of its weight: "fc.weight" -> "fc"."""
    return name.removesuffix("weight").rstrip("._") or name
