"""Traces of the Hessian of the mean loss, Eqs. 2 and 40, with their distance to Gauss-Newton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from flatlens.algebra.traces import LIMIT, Estimate, trace
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.capture.inputs import as_list, batches
from flatlens.curvature.hessians import surface
from flatlens.errors import FlatlensError
from flatlens.losses import Custom, Loss, get_loss
from flatlens.metrics import adaptive_sharpness, sharpness
from flatlens.passes.request import LossRoot, Request
from flatlens.passes.run import look
from flatlens.probes import Probe


@no_type_check
@typed_arguments
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
    """Estimate the trace of the Hessian of the mean loss, Tr H (Eq. 2), by Hutch++.

    The estimate is exact if the network has no more parameters than ``directions``.

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: samples, as for ``measure``.
        y: targets; None takes the targets that the batches of x hold.
        loss: a name or a function, as for ``measure``.
        directions: number of products with the Hessian.
        rtol: relative standard error to reach with further products; None takes no further ones.
        limit: most products with ``rtol``.
        residual: also return Tr H minus the Gauss-Newton trace (Lemma B.1), which is Tr H - S for
            the default loss. It is 0 if f is affine in each single weight, as in ReLU networks
            without norm layers, attention or reuse.
        seed: seed of the random directions.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The trace with its standard error; ``per_layer`` has the part of each parameter.

    Raises:
        FlatlensError: if there are no targets, or a second derivative does not exist or is wrong.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1).double()
        >>> e = hessian_trace(net, torch.ones(4, 2).double(), torch.zeros(4, 1), residual=True)
        >>> round(e.value, 9), round(e.residual, 9), e.se  # ||x||^2 + 1
        (3.0, 0.0, 0.0)
    """
    options = {"directions": directions, "rtol": rtol, "limit": limit, "seed": seed}
    metric = sharpness if residual else None
    return _estimate(model, x, y, loss, output, chunk, options, metric, adaptive=False)


@no_type_check
@typed_arguments
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
    """Estimate the adaptive sharpness of the true Hessian, sum_j w_j^2 H_jj (Eq. 40).

    It is the trace of D H D with D = diag(w).

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: samples, as for ``measure``.
        y: targets; None takes the targets that the batches of x hold.
        loss: a name or a function, as for ``measure``.
        directions: number of products with the Hessian.
        rtol: relative standard error to reach with further products; None takes no further ones.
        limit: most products with ``rtol``.
        residual: also return the distance to the Gauss-Newton form, Eq. 41 (Lemma E.2).
        seed: seed of the random directions.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The trace with its standard error; ``per_layer`` has the part of each parameter.

    Raises:
        FlatlensError: if there are no targets, or a second derivative does not exist or is wrong.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = torch.nn.init.constant_(net.weight, 3.0)
        >>> x, y = torch.ones(4, 2).double(), torch.zeros(4, 1)
        >>> round(adaptive_sharpness_hessian(net, x, y).value, 9)  # 9 + 9
        18.0
    """
    options = {"directions": directions, "rtol": rtol, "limit": limit, "seed": seed}
    metric = adaptive_sharpness if residual else None
    return _estimate(model, x, y, loss, output, chunk, options, metric, adaptive=True)


def _estimate(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: str | Loss | Callable[..., Any],
    output: Any,
    chunk: int | None,
    options: dict[str, Any],
    metric: Callable[[Probe], float] | None,
    *,
    adaptive: bool,
) -> Estimate:
    """Estimate Tr H, or Tr D H D with D = diag(w); ``metric`` adds its Gauss-Newton form."""
    x = x if metric is None else as_list(x)
    with surface(model, x, y, loss, output, chunk) as s:
        D = s.theta
        products = (lambda V: D * s.products(D * V)) if adaptive else s.products
        estimate = trace(products, s.sizes, s.like, **options)
    if metric is None:
        return estimate
    S = metric(_gauss_newton(model, x, get_loss(loss), output, chunk))
    return replace(estimate, residual=estimate.value - S)


def _gauss_newton(model: nn.Module, x: Any, loss: Loss, output: Any, chunk: int | None) -> Probe:
    """Probe R^T f for a root R of the loss: its sharpness is the Gauss-Newton trace."""
    if isinstance(loss, Custom):
        raise FlatlensError(
            "the residual is known for losses with a name only; compare with gauss_newton_trace"
        )

    root = None if loss.name == "half_squared" else LossRoot(loss)
    inputs = (batch for batch, _ in batches(x))
    return look(model, inputs, Request(root=root, chunk=chunk, output=output))
