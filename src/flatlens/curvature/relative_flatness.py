"""Relative flatness of one layer (Petzka et al.)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flatlens import tuning
from flatlens.algebra.traces import LIMIT, Estimate, trace
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.capture.inputs import Inputs
from flatlens.capture.kinds.linear import Linear
from flatlens.curvature.hessians import Surface, surface
from flatlens.curvature.seen_layers import SeenLayers, record, short_name
from flatlens.errors import FlatlensError
from flatlens.losses import Loss


@no_type_check
@typed_arguments
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
    """Compute the relative flatness of one linear layer (Petzka et al. 2021).

    It is kappa = sum over rows s, s' of <w_s, w_s'> Tr H_ss', where H_ss' is the block of the
    Hessian of the mean loss between rows s and s' of the weight. There are two ways to compute it:

    - If the outputs of the layer are those of the network, kappa is exactly
      mean_i ||phi_i||^2 Tr(W W^T d2L_i/df2) with the layer's inputs phi_i. For the loss
      1/2 ||f - y||^2 this is ||W||_F^2 mean_i ||phi_i||^2.
    - For any other layer kappa = Tr(C^T H C) with C C^T = W W^T is estimated by Hutch++.

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: samples, as for ``measure``.
        y: targets; None takes the targets that the batches of x hold.
        loss: a name or a function, as for ``measure``.
        layer: name of the layer. By default it is the last linear layer that is called.
        directions: number of products with the Hessian.
        rtol: relative standard error to reach with further products; None takes no further ones.
        limit: most products with ``rtol``.
        seed: seed of the random directions.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        kappa, with a standard error if it is estimated.

    Raises:
        FlatlensError: if the layer is not a linear layer with a trainable weight, or there are no
            targets.

    Example:
        >>> net = torch.nn.Linear(2, 1).double()
        >>> _ = torch.nn.init.constant_(net.weight, 3.0)
        >>> round(relative_flatness(net, torch.ones(4, 2).double(), torch.zeros(4, 1)).value, 9)
        36.0
    """
    with surface(model, x, y, loss, output, chunk) as s:
        seen = SeenLayers(s.net)
        linear = [name for name, calls in seen.calls.items() if calls[-1].layer.is_linear]
        name = seen.find(layer, linear) if layer or linear else ""
        if name not in linear:
            raise FlatlensError("relative flatness needs a linear layer with a trainable weight")
        if layer is None and seen.last_linear is not seen.calls[name][-1]:
            raise FlatlensError(
                "the weight of the last linear layer is not a trainable parameter; name another "
                f"layer with layer= ({', '.join(map(short_name, linear))})"
            )
        if seen.is_output(name):
            values = torch.cat(
                [_output_flatness(s, name, inputs, samples) for inputs, samples in s.net.chunks()]
            )
            estimate = Estimate(float(values.mean()), samples=values.numpy())
        else:
            linear_layer = seen.calls[name][-1].layer
            assert isinstance(linear_layer, Linear)
            products, size = _inner_products(s.restricted(name), linear_layer)
            estimate = trace(
                products, {name: size}, s.like,
                directions=directions, rtol=rtol, limit=limit, seed=seed,
            )  # fmt: skip
    name = short_name(name)
    return replace(estimate, per_layer={name: estimate.value}, per_layer_se={name: estimate.se})


def _inner_products(part: Surface, layer: Linear) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return products with C^T H C for C C^T = W W^T, and the number of its rows.

    Args:
        part: the loss as a function of the layer's weight alone.
        layer: the layer, with the weight W.
    """
    W, shape = layer.matrix[0], layer.weight.shape
    U, S, _ = torch.linalg.svd(W.double(), full_matrices=False)
    C, size = (U * S).to(W), (len(S), W.shape[1])

    def turned(V: Tensor) -> Tensor:
        return V.mT if layer.turned else V

    def products(G: Tensor) -> Tensor:
        V = turned(C @ G.unflatten(1, size))
        HV = part.products(V.flatten(1)).unflatten(1, shape)
        return (C.mT @ turned(HV)).flatten(1)

    return products, size[0] * size[1]


def _output_flatness(s: Surface, name: str, inputs: Inputs, samples: slice) -> Float[Tensor, " b"]:
    """Return ||phi||^2 Tr(W W^T d2L/df2) of each sample, for the layer whose outputs are f."""
    f, calls = record(s.net, inputs)
    call = next(c for c in calls if c.layer.weight is s.parameters[name])
    W, phi = call.layer.matrix[0].double(), call.x.reshape(inputs.n, -1).double()
    block = max(1, tuning.BLOCK_ENTRIES // f.shape[1] ** 2)
    weighed = [
        torch.einsum("st,bst->b", W @ W.mT, s.loss.hessian(part, y).double())
        for part, y in zip(f.detach().split(block), s.y[samples].split(block), strict=True)
    ]
    return (phi.square().sum(1) * torch.cat(weighed)).cpu()
