"""The largest eigenvalue of the Hessian of the mean loss, and the edge of stability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from flatlens.algebra.traces import Estimate, eigenvalue
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.curvature.hessians import surface
from flatlens.errors import FlatlensError
from flatlens.losses import Loss


@no_type_check
@typed_arguments
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
    """Find the largest eigenvalue of the Hessian of the mean loss by Lanczos.

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: samples, as for ``measure``.
        y: targets; None takes the targets that the batches of x hold.
        loss: a name or a function, as for ``measure``.
        rtol: largest ``certificate`` relative to the value.
        max_iter: most products with the Hessian.
        seed: seed of the start vector.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The value. An eigenvalue lies within ``certificate`` of it. If ``certificate`` is still too
        large after ``max_iter`` products, ``converged`` is False and ``float`` of the result
        raises.

    Raises:
        FlatlensError: if an argument is out of range, there are no targets, or a second derivative
            does not exist or is wrong.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1).double()
        >>> e = lambda_max(net, torch.ones(4, 2).double(), torch.zeros(4, 1))
        >>> round(float(e), 9)  # ||x||^2 + 1
        3.0
    """
    if rtol <= 0 or max_iter < 1:
        raise FlatlensError("give rtol above 0 and one iteration or more")
    with surface(model, x, y, loss, output, chunk) as s:
        return eigenvalue(s.products, s.like, s.P, rtol=rtol, max_iter=max_iter, seed=seed)


@no_type_check
@typed_arguments
def edge_of_stability(
    lr: float, model: nn.Module, x: Any, y: Any = None, **options: Any
) -> Estimate:
    """Return lr lambda_max / 2; gradient descent is unstable above 1 (Cohen et al. 2021).

    Args:
        lr: learning rate of the training.
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: samples, as for ``measure``.
        y: targets; None takes the targets that the batches of x hold.
        **options: options of ``lambda_max``. ``loss`` must be the loss of the training.

    Returns:
        The value with its ``certificate``, as for ``lambda_max``.

    Raises:
        FlatlensError: as for ``lambda_max``.

    Example:
        >>> import torch
        >>> net, x = torch.nn.Linear(2, 1).double(), torch.ones(4, 2).double()
        >>> round(float(edge_of_stability(0.5, net, x, torch.zeros(4, 1))), 9)
        0.75
    """
    e = lambda_max(model, x, y, **options)
    assert e.certificate is not None
    return replace(e, value=lr * e.value / 2, certificate=lr * e.certificate / 2)
