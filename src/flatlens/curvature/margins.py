"""The distance of each sample to another decision, to first order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatlens.algebra.traces import Estimate
from flatlens.arguments import no_type_check, typed_arguments
from flatlens.capture.inputs import check_finite
from flatlens.curvature.hessians import network
from flatlens.errors import FlatlensError
from flatlens.losses import as_tensor


@no_type_check
@typed_arguments
def margin_radius(
    model: nn.Module, x: Any, y: Any = None, *, output: Any = None, chunk: int | None = None
) -> Estimate:
    """Return the first-order distance of each sample to the next decision.

    The margin of a sample is m(x) = f_c(x) - max_{k != c} f_k(x) with its class c (by default the
    predicted one), and the radius m / ||dm/dx||_2 (Elsayed et al. 2018). If f is affine along the
    way, a perturbation of that length changes the decision and no shorter one does; otherwise the
    radius is an estimate. It is negative for a sample that is classified wrongly, and infinite if
    the margin does not depend on the input.

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: as for ``measure``.
        y: class indices; None takes the predicted classes.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The mean over samples; ``samples`` has one radius per sample.

    Raises:
        FlatlensError: if the network has only one output, or the input is not a floating-point
            tensor.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 2, bias=False).double()
        >>> _ = torch.nn.init.eye_(net.weight)
        >>> e = margin_radius(net, torch.tensor([[3.0, 1.0]]).double())
        >>> round(e.value, 9)  # the boundary is the diagonal: 2 / sqrt(2)
        1.414213562
    """
    radii = []
    with network(model, x, output, chunk) as net:
        for inputs, samples in net.chunks():
            fed = inputs.map_named(
                lambda key, t: (
                    t.detach().clone().requires_grad_()
                    if key in inputs.differentiated and t.is_floating_point()  # noqa: B023
                    else t
                )
            )
            leaves = fed.floating
            if not leaves:
                raise FlatlensError("the input holds integers: there is no distance to a decision")
            f = net.outputs(fed)
            margin = _margins(f, None if y is None else as_tensor(y, f.device)[samples])
            grads = torch.autograd.grad(margin.sum(), leaves, allow_unused=True)
            square = sum(
                g.double().flatten(1).square().sum(1) for g in grads if g is not None
            ) + torch.zeros(len(f), dtype=torch.float64, device=f.device)
            radius = margin.detach().double() / square.sqrt()
            check_finite(margin.detach(), samples.start, "margin")
            radii.append(radius.cpu())
    values = torch.cat(radii).numpy()
    finite = values[np.isfinite(values)]
    spread = float(finite.std(ddof=1) / len(finite) ** 0.5) if len(finite) > 1 else float("nan")
    return Estimate(float(values.mean()), spread, samples=values, passes=len(radii))


def _margins(f: Tensor, y: Tensor | None) -> Tensor:
    if f.shape[1] < 2:
        raise FlatlensError("the network has one output; a margin needs two classes or more")
    classes = f.argmax(1) if y is None else y.reshape(len(f)).long()
    if bool(((classes < 0) | (classes >= f.shape[1])).any()):
        raise FlatlensError(f"y has classes beyond the outputs 0 to {f.shape[1] - 1}")
    own = f.gather(1, classes[:, None])[:, 0]
    others = f.scatter(1, classes[:, None], float("-inf")).amax(1)
    return own - others
