"""What needs passes of its own: second derivatives, perturbed weights, perturbed inputs.

| function | what | where |
|---|---|---|
| ``hessian_trace`` | Tr H of the mean loss | Eq. 2, Lemma B.1 |
| ``adaptive_sharpness_hessian`` | sum_j w_j^2 H_jj | Eq. 40, Lemma E.2 |
| ``adaptive_sharpness_sampled`` | the same by perturbed weights | Eqs. 38, 46 |
| ``input_sensitivity_ascent`` | ||df/dx||_2 by gradient ascent | Eq. 47 |
| ``relative_flatness`` | sum_ss' <w_s, w_s'> Tr H_ss' | Petzka et al. |
| ``normalized_sharpness`` | minimised over scales of rows and columns | Eq. 36 |
| ``lambda_max``, ``edge_of_stability`` | the top eigenvalue of H | |

Each gives an :class:`Estimate`: the value, its standard error, and whether it may be trusted. Only
trainable parameters count. The model runs in evaluation mode and is left exactly as found. A
Hessian that is not symmetric (a second derivative is wrong) is refused. Common arguments: ``x``,
``y`` as in ``measure`` (y may come with the batches of x), ``loss`` a name or a function
(``losses``), ``output`` what of the model's result is f, ``chunk`` samples at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from flatlens.algebra.traces import LIMIT, Estimate, eigenvalue, trace
from flatlens.capture.inputs import Inputs, batches, kept
from flatlens.curvature.hessians import Network, network, surface
from flatlens.curvature.layerwise import normalized_sharpness, relative_flatness
from flatlens.errors import FlatlensError
from flatlens.losses import Custom, Loss, get_loss
from flatlens.metrics import adaptive_sharpness, sharpness
from flatlens.passes.request import Request
from flatlens.passes.run import look
from flatlens.probes import Probe

__all__ = [
    "Estimate",
    "adaptive_sharpness_hessian",
    "adaptive_sharpness_sampled",
    "edge_of_stability",
    "hessian_trace",
    "input_sensitivity_ascent",
    "lambda_max",
    "normalized_sharpness",
    "relative_flatness",
]

SCALINGS: dict[str, Callable[[float], float]] = {
    "eq38": lambda rho: 2 / rho**2,
    "paper": lambda rho: 1.0,  # Eq. 46 as printed
    "code": lambda rho: 1 / rho**2,  # what the authors computed: Eq. 38 when the loss is "squared"
}


def hessian_trace(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    loss: str | Loss | Callable[..., Any] = "half_squared",
    directions: int = 60,
    rtol: float | None = None,
    limit: int = LIMIT,
    residual: bool = False,
    seed: int = 0,
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """Tr H of the mean loss over samples, Eq. 2, with its split over parameters.

    ``directions`` Hessian products are spent (see ``estimates``); ``rtol`` goes on to that relative
    standard error, up to ``limit`` products. ``residual=True`` adds Tr H minus the Gauss-Newton
    trace (Lemma B.1), which for the default loss is Tr H - S. That is 0 where f is affine in each
    single weight (ReLU networks without norm layers, attention or reuse).

    Example:
        >>> net = torch.nn.Linear(2, 1).double()
        >>> e = hessian_trace(net, torch.ones(4, 2).double(), torch.zeros(4, 1), residual=True)
        >>> round(e.value, 9), round(e.residual, 9), e.se  # ||x||^2 + 1
        (3.0, 0.0, 0.0)
    """
    x = kept(x) if residual else x
    with surface(model, x, y, loss, output, chunk) as s:
        found = trace(
            s.products, s.sizes, s.like, directions=directions, rtol=rtol, limit=limit, seed=seed
        )
    if residual:
        S = sharpness(_gauss_newton(model, x, get_loss(loss), output, chunk))
        return replace(found, residual=found.value - S)
    return found


def adaptive_sharpness_hessian(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    loss: str | Loss | Callable[..., Any] = "half_squared",
    directions: int = 60,
    rtol: float | None = None,
    limit: int = LIMIT,
    residual: bool = False,
    seed: int = 0,
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """Tr(H o |w||w|^T) = sum_j w_j^2 H_jj of the true Hessian, Eq. 40.

    It is the trace of D H D with D = diag(w); the arguments are those of ``hessian_trace``.
    ``residual=True`` adds the distance to its Gauss-Newton form, Eq. 41 (Lemma E.2).

    Example:
        >>> net = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = torch.nn.init.constant_(net.weight, 3.0)
        >>> x, y = torch.ones(4, 2).double(), torch.zeros(4, 1)
        >>> round(adaptive_sharpness_hessian(net, x, y).value, 9)  # 9 + 9
        18.0
    """
    x = kept(x) if residual else x
    with surface(model, x, y, loss, output, chunk) as s:
        D = s.theta
        found = trace(
            lambda V: D * s.products(D * V), s.sizes, s.like,
            directions=directions, rtol=rtol, limit=limit, seed=seed,
        )  # fmt: skip
    if residual:
        S = adaptive_sharpness(_gauss_newton(model, x, get_loss(loss), output, chunk))
        return replace(found, residual=found.value - S)
    return found


def _gauss_newton(model: nn.Module, x: Any, loss: Loss, output: Any, chunk: int | None) -> Probe:
    """The probe of R^T f, R a root of the loss: its sharpness is the Gauss-Newton trace."""
    if isinstance(loss, Custom):
        raise FlatlensError(
            "the residual is known for losses with a name only; compare with gauss_newton_trace"
        )

    root = None if loss.name == "half_squared" else lambda f, _: loss.root(f).mT
    inputs = (batch for batch, _ in batches(x))
    return look(model, inputs, Request(root=root, chunk=chunk, output=output))


def adaptive_sharpness_sampled(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    rho: float = 0.1,
    loss: str | Loss | Callable[..., Any] = "half_squared",
    perturbations: int = 50,
    antithetic: bool = True,
    scaling: str = "eq38",
    rtol: float | None = None,
    limit: int = LIMIT,
    seed: int = 0,
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """(2 / rho^2) E[L(w + delta) - L(w)], delta ~ N(0, rho^2 diag(w^2)), Eq. 38.

    Each of the ``perturbations`` is a pair w + delta, w - delta (``antithetic=False``: the first
    alone), which removes the first-order term, most of the noise. It tends to Eq. 40 as rho -> 0,
    where the loss is smooth: kinks (ReLU, max-pool) that a perturbation crosses count in it as
    curvature, and Eq. 40 knows nothing of them (an untrained VGG at rho = 0.1: 0.72 against 0.22).
    ``scaling="paper"`` is Eq. 46 as printed (no factor), "code" the authors' 1 / rho^2, which with
    ``loss="squared"`` is Eq. 38 for 1/2 ||f - y||^2. ``rtol`` adds perturbations, up to ``limit``,
    until that relative standard error is met. ``passes`` counts evaluations of the loss. The
    standard error contains the rounding of the loss, which 2 / rho^2 magnifies: take float64 for a
    rho below 0.01.

    Example:
        >>> net = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = torch.nn.init.constant_(net.weight, 3.0)
        >>> x, y = torch.ones(4, 2).double(), torch.zeros(4, 1)
        >>> e = adaptive_sharpness_sampled(net, x, y, rtol=0.05)
        >>> abs(e.value - 18) < 4 * e.se < 4
        True
    """
    if scaling not in SCALINGS:
        raise FlatlensError(f"scaling={scaling!r} is unknown; use one of {', '.join(SCALINGS)}")
    if not 0 < rho < np.inf or perturbations < 2:
        raise FlatlensError("give a finite rho above 0, and two perturbations for a standard error")
    generator = torch.Generator().manual_seed(seed)
    with surface(model, x, y, loss, output, chunk) as s:
        theta, factor = s.theta, SCALINGS[scaling](rho)
        (here,) = s.values(theta.unsqueeze(0))
        rounding = abs(factor * here) * torch.finfo(theta.dtype).eps
        found: list[float] = []
        wanted, limit = perturbations, max(limit, perturbations)
        while True:
            while len(found) < wanted:
                k = min(s.at_once, wanted - len(found))
                noise = torch.randn(k, s.P, generator=generator, dtype=torch.float64)
                delta = rho * theta * noise.to(theta)
                there = np.array(s.values(theta + delta))
                if antithetic:
                    there = (there + s.values(theta - delta)) / 2
                found += (factor * (there - here)).tolist()
            value, se = float(np.mean(found)), float(np.std(found, ddof=1)) / len(found) ** 0.5
            if rounding > 0.01 * se:
                se = float(np.hypot(se, rounding))
            converged = rtol is None or se <= rtol * abs(value)
            if converged or wanted >= limit:
                break
            wanted = min(limit, wanted + perturbations)
    return Estimate(
        value,
        se,
        dof=len(found) - 1,
        passes=1 + len(found) * (1 + antithetic),
        converged=converged,
        note=""
        if converged
        else f"rtol={rtol} was not met with {wanted} perturbations (the limit)",
    )


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
    """||grad_x f||_2 as the paper found it: ascent on ||f(x + d) - f(x)|| / ||d||, Eq. 47.

    d starts at ``start`` times normal noise and takes ``steps`` steps of ``optimizer``. The value
    is the mean over samples of the last ratio. It is no bound: too few steps leave it low, and at
    finite d it is not the derivative. ``mls`` is the exact number, with nothing to tune.
    ``samples`` holds each sample's last ratio, ``history`` all of them, each with the forward and
    backward passes taken so far.

    Example:
        >>> net = torch.nn.Linear(3, 2, bias=False).double()
        >>> _ = torch.nn.init.ones_(net.weight)
        >>> e = input_sensitivity_ascent(net, torch.ones(4, 3).double())
        >>> e.value <= 6**0.5, e.passes
        (True, 62)
    """
    if start <= 0 or steps < 0:
        raise FlatlensError("give start above 0 and a number of steps that is not negative")
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[Tensor]] = []
    with network(model, x, output, chunk) as net:
        for inputs, _ in net.rows():
            if not inputs.floating:
                raise FlatlensError("the input is of integers; it cannot be perturbed a little")
            # Sample by sample, so that chunks do not change what is drawn.
            noise = [
                [
                    torch.randn(t.shape[1:], generator=generator, dtype=torch.float32)
                    for t in inputs.floating
                ]
                for _ in range(inputs.n)
            ]
            delta = [
                (start * torch.stack(z)).to(t).requires_grad_()
                for z, t in zip(zip(*noise, strict=True), inputs.floating, strict=True)
            ]
            with torch.no_grad():
                f = net.outputs(inputs)
            climb = optimizer(delta, lr=lr, maximize=True)  # type: ignore[call-arg]
            ratios = [_ratio(net, inputs, delta, f)]
            for _ in range(steps):
                grads = torch.autograd.grad(ratios[-1].sum(), delta)
                for d, g in zip(delta, grads, strict=True):
                    d.grad = g
                climb.step()
                ratios[-1] = ratios[-1].detach()
                ratios.append(_ratio(net, inputs, delta, f))
            parts.append([r.detach().double().cpu() for r in ratios])
    history = [torch.cat(r).numpy() for r in zip(*parts, strict=True)]
    return Estimate(
        float(history[-1].mean()),
        float("nan"),  # how far the ascent is from its end is not known
        passes=2 + 2 * steps,
        samples=history[-1],
        history=[(2 + 2 * step, values) for step, values in enumerate(history)],
        note="no bound: low where the ascent has not ended, and f bends over a finite step",
    )


def _ratio(
    net: Network, inputs: Inputs, delta: list[Tensor], f: Float[Tensor, "b N"]
) -> Float[Tensor, " b"]:
    """||f(x + d) - f(x)|| / ||d|| of each sample."""
    left = iter(delta)
    keys = [key for key, _ in inputs.at(inputs.differentiated, True)]
    moved = inputs.map_named(lambda key, t: t + next(left) if key in keys else t)
    size = torch.cat([d.flatten(1) for d in delta], 1).norm(dim=1)
    return (net.outputs(moved) - f).norm(dim=1) / size


def lambda_max(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    loss: str | Loss | Callable[..., Any] = "half_squared",
    rtol: float = 1e-3,
    max_iter: int = 100,
    seed: int = 0,
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """The largest eigenvalue of the Hessian of the mean loss, by Lanczos.

    ``certificate`` is how far the next eigenvalue can be; where it is not within ``rtol`` of the
    value after ``max_iter`` products, ``converged`` is False and ``float`` of the result refuses.

    Example:
        >>> net = torch.nn.Linear(2, 1).double()
        >>> e = lambda_max(net, torch.ones(4, 2).double(), torch.zeros(4, 1))
        >>> round(float(e), 9)  # ||x||^2 + 1
        3.0
    """
    if rtol <= 0 or max_iter < 1:
        raise FlatlensError("give rtol above 0 and one iteration or more")
    with surface(model, x, y, loss, output, chunk) as s:
        return eigenvalue(s.products, s.like, s.P, rtol=rtol, max_iter=max_iter, seed=seed)


def edge_of_stability(
    lr: float, model: nn.Module, x: Any, y: Any = None, **options: Any
) -> Estimate:
    """lr lambda_max / 2: gradient descent on the loss is unstable above 1.

    The loss must be the one that was trained with; options are those of ``lambda_max``.

    Example:
        >>> net, x = torch.nn.Linear(2, 1).double(), torch.ones(4, 2).double()
        >>> round(float(edge_of_stability(0.5, net, x, torch.zeros(4, 1))), 9)
        0.75
    """
    e = lambda_max(model, x, y, **options)
    assert e.certificate is not None
    return replace(e, value=lr * e.value / 2, certificate=lr * e.certificate / 2)
