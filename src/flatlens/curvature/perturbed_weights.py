"""Adaptive sharpness from perturbed weights, as the paper estimates it: Eqs. 38 and 46."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from flatlens.algebra.traces import LIMIT, Estimate
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.curvature.hessians import surface
from flatlens.errors import FlatlensError
from flatlens.losses import Loss

SCALINGS: dict[str, Callable[[float], float]] = {
    "eq38": lambda rho: 2 / rho**2,
    "paper": lambda rho: 1.0,  # Eq. 46 as printed
    "code": lambda rho: 1 / rho**2,  # what the authors computed: Eq. 38 when the loss is "squared"
}


@no_type_check
@typed_arguments
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
    """Estimate adaptive sharpness from random perturbations of the weights (Eqs. 38 and 46).

    Eq. 38 is (2 / rho^2) E[L(w + delta) - L(w)] with delta ~ N(0, rho^2 diag(w^2)). If the loss is
    smooth, it tends to Eq. 40 as rho -> 0. If a perturbation crosses a kink (ReLU, max-pool), the
    kink counts as curvature, which Eq. 40 does not see. For an untrained VGG at rho = 0.1 Eq. 38
    gives 0.72 and Eq. 40 gives 0.22.

    The standard error includes the rounding of the loss, which the factor 2 / rho^2 magnifies. Use
    float64 for a rho below 0.01.

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: samples, as for ``measure``.
        y: targets; None takes the targets that the batches of x hold.
        loss: a name or a function, as for ``measure``.
        rho: size of the perturbations relative to the weights.
        perturbations: number of perturbations, two or more.
        antithetic: evaluate each perturbation at w + delta and w - delta. This removes the
            first-order term, which is most of the noise.
        scaling: the factor of the mean increase. "eq38" is 2 / rho^2. "paper" is 1, as Eq. 46 is
            printed. "code" is the authors' 1 / rho^2, which with ``loss="squared"`` is Eq. 38 for
            the loss 1/2 ||f - y||^2.
        rtol: relative standard error to reach with further perturbations; None takes no further
            ones.
        limit: most perturbations with ``rtol``.
        seed: seed of the perturbations.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The mean with its standard error; ``passes`` counts evaluations of the loss.

    Raises:
        FlatlensError: if an argument is out of range, or there are no targets.

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
    if not 1e-150 < rho < 1e150 or perturbations < 2:  # rho^2 must be a float
        raise FlatlensError("give a finite rho above 0, and two perturbations for a standard error")
    generator = torch.Generator().manual_seed(seed)
    with surface(model, x, y, loss, output, chunk) as s:
        theta, factor = s.theta, SCALINGS[scaling](rho)
        (here,) = s.values(theta.unsqueeze(0))
        rounding = abs(factor * here) * torch.finfo(theta.dtype).eps
        increases: list[float] = []
        wanted, limit = perturbations, max(limit, perturbations)
        while True:
            while len(increases) < wanted:
                k = min(s.at_once, wanted - len(increases))
                noise = torch.randn(k, s.P, generator=generator, dtype=torch.float64, device="cpu")
                delta = rho * theta * noise.to(theta)
                there = np.array(s.values(theta + delta))
                if antithetic:
                    there = (there + s.values(theta - delta)) / 2
                increases += (factor * (there - here)).tolist()
            value = float(np.mean(increases))
            se = float(np.std(increases, ddof=1)) / len(increases) ** 0.5
            if rounding > 0.01 * se:
                se = float(np.hypot(se, rounding))
            converged = rtol is None or se <= rtol * abs(value)
            if converged or wanted >= limit:
                break
            wanted = min(limit, wanted + perturbations)
    return Estimate(
        value,
        se,
        dof=len(increases) - 1,
        passes=1 + len(increases) * (1 + antithetic),
        converged=converged,
        note=""
        if converged
        else f"rtol={rtol} was not met with {wanted} perturbations (the limit)",
    )
