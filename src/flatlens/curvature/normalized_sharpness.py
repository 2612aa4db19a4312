"""Sharpness minimised over scales of rows and columns, Eq. 36 (Tsuzuku et al.)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flatlens import tuning
from flatlens.algebra.buffers import Buffers
from flatlens.algebra.scaling import minimise
from flatlens.algebra.traces import Estimate
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.capture.inputs import Inputs
from flatlens.capture.layer import Layer
from flatlens.capture.layout import Layout
from flatlens.curvature.hessians import Network, network
from flatlens.curvature.seen_layers import SeenLayers, record, short_name
from flatlens.errors import FlatlensError
from flatlens.passes.positions import Positions


@no_type_check
@typed_arguments
def normalized_sharpness(
    model: nn.Module,
    x: Any,
    *,
    layer: str | None = None,
    lam: float = 1.0,
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """Minimise sharpness over scales of the rows and columns of a weight (Eq. 36, Tsuzuku et al.).

    The value is the minimum over s and t of
    sum_kj H_kj (s_k t_j)^2 + W_kj^2 / (4 lambda^2 (s_k t_j)^2) with the Gauss-Newton diagonal
    H_kj = mean_i ||df/dW_kj||^2. The columns of a convolution are the entries of its patches. Each
    group of a layer is minimised separately.

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: samples, as for ``measure``.
        layer: name of the layer. By default the values of all measured layers with a trainable
            weight are summed.
        lam: lambda of Eq. 36.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The minimum; ``per_layer`` has the value of each layer.

    Raises:
        FlatlensError: if ``lam`` is not positive, or there is no such layer.

    Example:
        >>> net = torch.nn.Linear(1, 1).double()
        >>> _ = torch.nn.init.constant_(net.weight, 3.0)
        >>> round(normalized_sharpness(net, torch.full((4, 1), 2.0).double()).value, 9)  # |W| |x|
        6.0
    """
    if not 0 < lam < float("inf"):
        raise FlatlensError(f"lam={lam} is not a scale of Eq. 36; give a finite number above 0")
    with network(model, x, output, chunk) as net:
        seen = SeenLayers(net)
        names = [seen.find(layer, list(seen.calls))] if layer else list(seen.calls)
        if not names:
            raise FlatlensError("the network has no trainable linear or convolutional layer")
        minima = {}
        for name, H in _curvatures(net, seen, names).items():
            W = seen.calls[name][0].layer.matrix.double().cpu().numpy()
            groups = zip(H.cpu().numpy(), W, strict=True)
            minima[short_name(name)] = sum(minimise(h, w, lam).value for h, w in groups)
    return Estimate(sum(minima.values()), per_layer=minima)


def _curvatures(
    net: Network, seen: SeenLayers, names: list[str]
) -> dict[str, Float[Tensor, "g o i"]]:
    """Return mean_i ||df/dW_kj||^2 for each entry of each weight, as a matrix per group."""
    layouts = {name: seen.layout(name) for name in names}
    simple = [name for name in names if layouts[name] is not None]
    others = [name for name in names if layouts[name] is None]
    maps = {name: seen.calls[name][0].layer for name in names}
    total = {name: torch.zeros_like(maps[name].matrix, dtype=torch.float64) for name in names}
    for inputs, _ in net.chunks():
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
    f, calls = record(net, inputs)
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
    """Sum (sum_p J_p u_p^T)^2 over samples for each entry, in float64."""
    if J.shape[-1] == 1:
        J2, u2 = J.squeeze(-1).double().square(), u.squeeze(-1).double().square()
        return torch.einsum("bgo,bgi->goi", J2, u2)
    block = max(1, tuning.BLOCK_ENTRIES // (J.shape[1] * J.shape[2] * u.shape[2]))
    blocks = zip(J.split(block), u.split(block), strict=True)
    return torch.stack([(a @ b.mT).double().square().sum(0) for a, b in blocks]).sum(0)
