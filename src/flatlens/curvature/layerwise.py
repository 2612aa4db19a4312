"""Flatness of one layer's weight: relative flatness (Petzka et al.) and Eq. 36 (Tsuzuku et al.)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from flatlens import tuning
from flatlens.algebra.buffers import Buffers
from flatlens.algebra.scaling import minimise
from flatlens.algebra.traces import LIMIT, Estimate, trace
from flatlens.capture.graph import Graph
from flatlens.capture.inputs import Inputs
from flatlens.capture.kinds.linear import Linear
from flatlens.capture.layer import Layer
from flatlens.capture.layout import Layout
from flatlens.capture.recorder import Recorder
from flatlens.capture.recording import Call, CapturePlan
from flatlens.curvature.hessians import Network, Surface, network, surface
from flatlens.errors import FlatlensError
from flatlens.losses import Loss
from flatlens.passes.arrangement import call_layout
from flatlens.passes.positions import Positions


def relative_flatness(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    loss: str | Loss | Callable[..., Any] = "half_squared",
    layer: str | None = None,
    directions: int = 60,
    rtol: float | None = None,
    limit: int = LIMIT,
    seed: int = 0,
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """kappa = sum over rows s, s' of <w_s, w_s'> Tr H_ss' for one linear layer (Petzka et al.).

    H_ss' is the block of the Hessian of the mean loss between rows s and s' of the weight. By
    default the layer is the last linear one that is called. Where its outputs are the network's,
    the value is exact: mean_i ||phi_i||^2 Tr(W W^T d2L_i/df2), which for 1/2 ||f - y||^2 is
    ||W||_F^2 mean_i ||phi_i||^2. Else kappa = Tr(C^T H C) with C C^T = W W^T, by the products of
    ``hessian_trace``, whose other arguments these are.

    Example:
        >>> net = torch.nn.Linear(2, 1).double()
        >>> _ = torch.nn.init.constant_(net.weight, 3.0)
        >>> round(relative_flatness(net, torch.ones(4, 2).double(), torch.zeros(4, 1)).value, 9)
        36.0
    """
    with surface(model, x, y, loss, output, chunk) as s:
        seen = Seen(s)
        linear = [name for name, calls in seen.calls.items() if calls[-1].layer.is_linear]
        name = seen.find(layer, linear) if layer or linear else ""
        if name not in linear:
            raise FlatlensError("relative flatness needs a linear layer with a trainable weight")
        if layer is None and seen.last_linear is not seen.calls[name][-1]:
            raise FlatlensError(
                "the weight of the last linear layer is no trainable parameter; name another one "
                f"with layer= ({', '.join(map(_short, linear))})"
            )
        if seen.is_output(name):
            values = torch.cat(
                [_output_flatness(s, name, inputs, rows) for inputs, rows in s.rows()]
            )
            found = Estimate(float(values.mean()), samples=values.numpy())
        else:
            part, layer_map = s.restricted(name), seen.calls[name][-1].layer
            assert isinstance(layer_map, Linear)
            W, shape = layer_map.matrix[0], layer_map.weight.shape
            U, S, _ = torch.linalg.svd(W.double(), full_matrices=False)
            C, size = (U * S).to(W), (len(S), W.shape[1])

            def turned(V: Tensor) -> Tensor:
                return V.mT if layer_map.turned else V

            def products(G: Tensor) -> Tensor:
                V = turned(C @ G.unflatten(1, size))
                HV = part.products(V.flatten(1)).unflatten(1, shape)
                return (C.mT @ turned(HV)).flatten(1)

            found = trace(
                products, {name: size[0] * size[1]}, part.like,
                directions=directions, rtol=rtol, limit=limit, seed=seed,
            )  # fmt: skip
    name = _short(name)
    return replace(found, per_layer={name: found.value}, per_layer_se={name: found.se})


def _output_flatness(s: Surface, name: str, inputs: Inputs, rows: slice) -> Float[Tensor, " b"]:
    """||phi||^2 Tr(W W^T d2L/df2) of each sample, for the layer whose outputs are f."""
    f, calls = _record(s, inputs)
    call = next(c for c in calls if c.layer.weight is s.parameters[name])
    W, phi = call.layer.matrix[0].double(), call.x.reshape(inputs.n, -1).double()
    block = max(1, tuning.BLOCK_ENTRIES // f.shape[1] ** 2)
    weighed = [
        torch.einsum("st,bst->b", W @ W.mT, s.loss.hessian(part, y).double())
        for part, y in zip(f.detach().split(block), s.y[rows].split(block), strict=True)
    ]
    return (phi.square().sum(1) * torch.cat(weighed)).cpu()


def normalized_sharpness(
    model: nn.Module,
    x: Any,
    *,
    layer: str | None = None,
    lam: float = 1.0,
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """Eq. 36 with the Gauss-Newton diagonal H_kj = mean_i ||df/dW_kj||^2 (Tsuzuku et al.).

    min over s, t of sum_kj H_kj (s_k t_j)^2 + W_kj^2 / (4 lambda^2 (s_k t_j)^2), for the layer
    named, or summed over all measured layers whose weight is a trainable parameter (``per_layer``
    has each). A convolution's columns are the entries of its patches; groups are minimised apart.

    Example:
        >>> net = torch.nn.Linear(1, 1).double()
        >>> _ = torch.nn.init.constant_(net.weight, 3.0)
        >>> round(normalized_sharpness(net, torch.full((4, 1), 2.0).double()).value, 9)  # |W| |x|
        6.0
    """
    if not 0 < lam < float("inf"):
        raise FlatlensError(f"lam={lam} is no scale of Eq. 36; give a finite number above 0")
    with network(model, x, output, chunk) as net:
        seen = Seen(net)
        names = [seen.find(layer, list(seen.calls))] if layer else list(seen.calls)
        if not names:
            raise FlatlensError("the network has no linear or convolutional layer that is trained")
        found = {}
        for name, H in _curvatures(net, seen, names).items():
            W = seen.calls[name][0].layer.matrix.double().cpu().numpy()
            groups = zip(H.cpu().numpy(), W, strict=True)
            found[_short(name)] = sum(minimise(h, w, lam).value for h, w in groups)
    return Estimate(sum(found.values()), per_layer=found)


class Seen:
    """The measured layers of a network by their weight parameter, from runs on one and two samples.

    ``calls`` holds those whose weight is a trainable parameter. A layer is ``simple`` where its
    weight is used in one call only, with known rows for each sample of a batch.
    """

    def __init__(self, net: Network) -> None:
        self.net = net
        inputs = net.batches[0]
        self.f, self.one = _record(net, inputs.take(slice(0, 1)))
        self.graph = Graph(self.f) if self.f.requires_grad else None
        self.calls: dict[str, list[Call]] = {}
        self.place: dict[str, int] = {}  # of the last call
        self.last_linear: Call | None = None
        names = {id(p): name for name, p in net.model.named_parameters() if p.requires_grad}
        for place, call in enumerate(self.one):
            reached = self.graph is not None and call.out.node in self.graph.nodes
            if reached and call.layer.is_linear:
                self.last_linear = call
            if reached and (name := names.get(id(call.layer.weight))) is not None:
                self.calls.setdefault(name, []).append(call)
                self.place[name] = place
        two = _record(net, inputs.take(slice(0, 2)))[1] if inputs.n > 1 else []
        self.pairs = two if len(two) == len(self.one) else []

    def find(self, layer: str | None, names: list[str]) -> str:
        """The weight parameter of a layer's name; by default the last one of ``names``."""
        if layer is None:
            return max(names, key=lambda name: self.place[name])
        for name in names:
            if layer in (name, _short(name)):
                return name
        known = ", ".join(_short(name) for name in names)
        raise FlatlensError(
            f"no layer {layer!r} whose weight is a trainable parameter; there are {known}"
        )

    def is_output(self, name: str) -> bool:
        """Whether f is what this layer gives, at one position, and its weight has no other use."""
        call, graph = self.calls[name][-1], self.graph
        assert graph is not None
        end = graph.below_reshapes(get_gradient_edge(self.f))[0].node
        return (
            end is graph.below_reshapes(call.out)[0].node
            and self.f.shape[1] == call.layer.matrix.shape[1]
            and graph.uses(call.layer.weight) == 1
        )

    def layout(self, name: str) -> Layout | None:
        """Where a simple layer's input has its samples; None for a layer that is not simple."""
        calls, graph = self.calls[name], self.graph
        assert graph is not None
        if not self.pairs or len(calls) > 1 or graph.uses(calls[0].layer.weight) > 1:
            return None
        call, pair = calls[0], self.pairs[self.place[name]]
        return call_layout(call, pair)


def _record(net: Network, inputs: Inputs) -> tuple[Float[Tensor, "b N"], list[Call]]:
    """f and the calls that made it; a call is cloned only where something overwrites it."""
    overwritten: frozenset[int] = frozenset()
    while True:
        recorder = Recorder(net.model, inputs.n, CapturePlan(None, overwritten))
        with recorder:
            f = net.outputs(inputs)
        recording = recorder.recording
        if recording.overwritten() <= overwritten:
            return f, recording.calls
        overwritten |= recording.overwritten()


def _short(name: str) -> str:
    """A layer is named after its weight: "fc.weight" -> "fc"."""
    return name.removesuffix("weight").rstrip("._") or name


def _curvatures(net: Network, seen: Seen, names: list[str]) -> dict[str, Float[Tensor, "g o i"]]:
    """mean_i ||df/dW||^2 entry by entry of each weight, as a matrix per group."""
    layouts = {name: seen.layout(name) for name in names}
    simple = [name for name in names if layouts[name] is not None]
    others = [name for name in names if layouts[name] is None]
    maps = {name: seen.calls[name][0].layer for name in names}
    total = {name: torch.zeros_like(maps[name].matrix, dtype=torch.float64) for name in names}
    for inputs, _ in net.rows():
        if simple:
            _by_positions(net, inputs, {name: layouts[name] for name in simple}, maps, total)
        for i in range(inputs.n if others else 0):
            f = net.outputs(inputs.take(slice(i, i + 1)))[0]
            for v in range(len(f)):
                weights = [maps[name].weight for name in others]
                grads = torch.autograd.grad(
                    f[v], weights, retain_graph=True, materialize_grads=True
                )
                for name, g in zip(others, grads, strict=True):
                    total[name] += maps[name].as_matrix(g.double().square())
    return {name: total[name] / net.n for name in names}


def _by_positions(
    net: Network,
    inputs: Inputs,
    layouts: dict[str, Layout | None],
    maps: dict[str, Layer],
    total: dict[str, Tensor],
) -> None:
    """Add a chunk's squared gradients J u^T, one output after another."""
    f, calls = _record(net, inputs)
    by_weight = {id(call.layer.weight): call for call in calls}
    buffers = Buffers()
    places = [
        Positions(by_weight[id(maps[name].weight)], layout, inputs.n, 1, buffers, i)
        for i, (name, layout) in enumerate(layouts.items())
    ]
    edges = [by_weight[id(maps[name].weight)].out for name in layouts]
    for v in range(f.shape[1]):
        grads = torch.autograd.grad(f[:, v].sum(), edges, retain_graph=True, allow_unused=True)
        for name, p, grad in zip(layouts, places, grads, strict=True):
            p.take(0, grad)
            total[name] += _squares(p.J, p.u)


def _squares(J: Float[Tensor, "b g o T"], u: Float[Tensor, "b g i T"]) -> Float[Tensor, "g o i"]:
    """sum over samples of (sum_p J_p u_p^T)^2, entry by entry, float64."""
    if J.shape[-1] == 1:
        J2, u2 = J.squeeze(-1).double().square(), u.squeeze(-1).double().square()
        return torch.einsum("bgo,bgi->goi", J2, u2)
    block = max(1, tuning.BLOCK_ENTRIES // (J.shape[1] * J.shape[2] * u.shape[2]))
    parts = zip(J.split(block), u.split(block), strict=True)
    return torch.stack([(a @ b.mT).double().square().sum(0) for a, b in parts]).sum(0)
