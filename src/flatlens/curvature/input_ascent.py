"""Sensitivity to the input by gradient ascent, as the paper estimates it: Eq. 47."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flatlens.algebra.traces import Estimate
from flatlens.arguments import check_positive, no_type_check, typed_arguments
from flatlens.capture.inputs import Inputs
from flatlens.curvature.hessians import Network, network
from flatlens.errors import FlatlensError


@no_type_check
@typed_arguments
def input_sensitivity_ascent(
    model: nn.Module,
    x: Any,
    *,
    start: float = 0.1,
    lr: float = 0.1,
    steps: int = 30,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
    seed: int = 0,
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """Estimate ||grad_x f||_2 by gradient ascent on ||f(x + d) - f(x)|| / ||d|| (Eq. 47).

    This is how the paper estimates the sensitivity. The result is not a bound: too few steps leave
    it low, and at finite d it is not the derivative. ``mls`` is the exact number and needs no
    tuning.

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: samples, as for ``measure``.
        start: the perturbation d starts at ``start`` times normal noise.
        lr: learning rate of the ascent.
        steps: number of steps of the ascent.
        optimizer: class of the torch optimiser that makes the steps.
        seed: seed of the noise.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The mean over samples of the last ratio. ``samples`` has the last ratio of each sample.
        ``history`` has the ratios after each step, with the number of forward and backward passes
        so far.

    Raises:
        FlatlensError: if an argument is out of range, or the input has no floating-point tensor.

    Example:
        >>> net = torch.nn.Linear(3, 2, bias=False).double()
        >>> _ = torch.nn.init.ones_(net.weight)
        >>> e = input_sensitivity_ascent(net, torch.ones(4, 3).double())
        >>> e.value <= 6**0.5, e.passes
        (True, 62)
    """
    if start <= 0 or steps < 0:
        raise FlatlensError("give start above 0 and a number of steps that is not negative")
    check_positive("lr", lr, "a learning rate")
    generator = torch.Generator().manual_seed(seed)
    ratios_by_chunk: list[list[Tensor]] = []
    with network(model, x, output, chunk) as net:
        for inputs, _ in net.chunks():
            if not inputs.floating:
                raise FlatlensError(
                    "the input holds integers; it cannot be perturbed by a small amount"
                )
            delta = _initial_perturbation(inputs, start, generator)
            climb = optimizer(delta, lr=lr, maximize=True)  # type: ignore[call-arg]
            ratios_by_chunk.append(_ascend(net, inputs, delta, climb, steps))
    history = [torch.cat(r).numpy() for r in zip(*ratios_by_chunk, strict=True)]
    return Estimate(
        float(history[-1].mean()),
        float("nan"),  # the distance to the maximum is unknown
        passes=2 + 2 * steps,
        samples=history[-1],
        history=[(2 + 2 * step, values) for step, values in enumerate(history)],
        note="no bound: low where the ascent has not ended, and f bends over a finite step",
    )


def _initial_perturbation(inputs: Inputs, start: float, generator: torch.Generator) -> list[Tensor]:
    """Draw d sample by sample, so that the noise does not depend on the chunks."""
    noise = [
        [
            torch.randn(t.shape[1:], generator=generator, dtype=torch.float32, device="cpu")
            for t in inputs.floating
        ]
        for _ in range(inputs.n)
    ]
    return [
        (start * torch.stack(z)).to(t).requires_grad_()
        for z, t in zip(zip(*noise, strict=True), inputs.floating, strict=True)
    ]


def _ascend(
    net: Network,
    inputs: Inputs,
    delta: list[Tensor],
    climb: torch.optim.Optimizer,
    steps: int,
) -> list[Tensor]:
    """Move ``delta`` uphill; return each sample's ratio before the first and after each step."""
    with torch.no_grad():
        f = net.outputs(inputs)
    ratios = [_ratio(net, inputs, delta, f)]
    for _ in range(steps):
        grads = torch.autograd.grad(ratios[-1].sum(), delta)
        for d, g in zip(delta, grads, strict=True):
            d.grad = g
        climb.step()
        ratios[-1] = ratios[-1].detach()
        ratios.append(_ratio(net, inputs, delta, f))
    return [r.detach().double().cpu() for r in ratios]


def _ratio(
    net: Network, inputs: Inputs, delta: list[Tensor], f: Float[Tensor, "b N"]
) -> Float[Tensor, " b"]:
    """Return ||f(x + d) - f(x)|| / ||d|| of each sample."""
    left = iter(delta)
    keys = [key for key, _ in inputs.at(inputs.differentiated, True)]
    moved = inputs.map_named(lambda key, t: t + next(left) if key in keys else t)
    size = torch.cat([d.flatten(1) for d in delta], 1).norm(dim=1)
    return (net.outputs(moved) - f).norm(dim=1) / size
