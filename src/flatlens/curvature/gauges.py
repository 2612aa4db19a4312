"""Numbers to monitor a training: empirical Fisher trace, gradient noise scale, batch sharpness.

They are not from the paper, and no inequality of flatlens is about them. Each docstring cites its
source. Their costs differ: the Fisher trace and the noise scale take one vector-Jacobian product a
sample, batch sharpness takes products with the Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from flatlens.algebra.traces import Estimate
from flatlens.arguments import check_integer, no_type_check, typed_arguments
from flatlens.capture.inputs import Inputs, as_list, batches
from flatlens.curvature.hessians import Surface, surface
from flatlens.errors import FlatlensError
from flatlens.losses import Loss, RootProducts, as_tensor, get_loss
from flatlens.metrics import sharpness
from flatlens.passes.needs import GRADIENTS
from flatlens.passes.request import Request
from flatlens.passes.run import look

AnyLoss = str | Loss | Callable[..., Any]
DEFAULT_BATCH = 32  # samples of a mini-batch


@no_type_check
@typed_arguments
def fisher_trace(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    loss: AnyLoss = "half_squared",
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """Return the trace of the empirical Fisher matrix, (1/n) sum_i ||grad_theta l_i||^2.

    l_i is the loss of sample i at its own target. For a negative log-likelihood and targets drawn
    from the model, the expectation is the trace of the Fisher matrix (Amari 1998). With the targets
    of the data it is the "empirical" Fisher matrix, which vanishes at interpolation (Kunstner et
    al. 2019). The cost is one vector-Jacobian product per sample: grad_theta l_i = J_i^T dl/df.

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: as for ``measure``.
        y: targets; None takes those that the batches of x bring.
        loss: a name or a function, as for ``measure``.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The mean over samples with its standard error; ``samples`` has one number per sample.

    Raises:
        FlatlensError: if there are no targets, or the network cannot be measured.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = torch.nn.init.zeros_(net.weight)
        >>> x, y = torch.ones(4, 2).double(), torch.tensor([[1.0], [2.0], [1.0], [0.0]]).double()
        >>> round(fisher_trace(net, x, y).value, 9)  # error^2 ||x||^2 on average
        3.0
    """
    squares = _squared_gradients(model, as_list(x), y, get_loss(loss), output, chunk)
    error = float(squares.std(ddof=1) / len(squares) ** 0.5) if len(squares) > 1 else float("nan")
    return Estimate(float(squares.mean()), error, dof=len(squares) - 1, samples=squares, passes=1)


@no_type_check
@typed_arguments
def gradient_noise_scale(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    loss: AnyLoss = "half_squared",
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """Return the simple gradient noise scale, Tr(Sigma) / ||g||^2 (McCandlish et al. 2018).

    g is the gradient of the mean loss over all samples given, and Sigma the covariance of the
    gradients of single samples (with n - 1). A mini-batch much smaller than this number has a
    gradient that is mostly noise; a much larger one saves few steps.

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: samples, as for ``measure``.
        y: targets; None takes the targets that the batches of x hold.
        loss: a name or a function, as for ``measure``.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The ratio; infinite if the mean gradient is zero.

    Raises:
        FlatlensError: if there is one sample only, or no targets.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(1, 1, bias=False).double()
        >>> _ = torch.nn.init.zeros_(net.weight)
        >>> x, y = torch.ones(2, 1).double(), torch.tensor([[1.0], [3.0]]).double()
        >>> gradient_noise_scale(net, x, y).value  # gradients -1 and -3: variance 2, mean -2
        0.5
    """
    x = as_list(x)
    squares = _squared_gradients(model, x, y, get_loss(loss), output, chunk)
    n = len(squares)
    if n < 2:
        raise FlatlensError("gradient_noise_scale needs two samples or more; there is 1")
    with surface(model, x, y, loss, output, chunk) as s:
        mean_square = float(mean_gradient(s).double().square().sum())
    noise = max(0.0, n / (n - 1) * (float(squares.mean()) - mean_square))
    value = noise / mean_square if mean_square > 0 else float("inf")
    return Estimate(value, passes=2)


@no_type_check
@typed_arguments
def batch_sharpness(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    loss: AnyLoss = "half_squared",
    batch_size: int = DEFAULT_BATCH,
    batches: int = 8,
    seed: int = 0,
    output: Any = None,
    chunk: int | None = None,
) -> Estimate:
    """Return the mean over mini-batches of g^T H g / ||g||^2 for gradient g and Hessian H.

    g and H belong to the loss of the mini-batch, so this is the curvature along a step of SGD.
    Andreyev and Beneventano (2024) define it. They observe, but do not prove, that it settles at
    2 / lr under SGD ("edge of stochastic stability").

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: as for ``measure``.
        y: targets; None takes those that the batches of x bring.
        loss: a name or a function, as for ``measure``.
        batch_size: samples of a mini-batch; if x has fewer samples, it takes all of them.
        batches: number of mini-batches. Each is drawn without replacement.
        seed: seed of the mini-batches.
        output: which part of the model's result is f, as for ``measure``.
        chunk: samples at a time.

    Returns:
        The mean and its standard error over mini-batches. The error is 0 if one mini-batch has all
        samples.

    Raises:
        FlatlensError: if there are no targets, or a second derivative does not exist.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1, bias=False).double()
        >>> x, y = torch.ones(4, 2).double(), torch.full((4, 1), 7.0).double()
        >>> round(batch_sharpness(net, x, y, batch_size=2).value, 9)  # ||x||^2
        2.0
    """
    check_integer("batch_size", batch_size, 1)
    check_integer("batches", batches, 2)
    check_integer("seed", seed, 0)
    quotients = []
    for part in _mini_batches(as_list(x), y, batch_size, batches, seed):
        with surface(model, part, None, loss, output, chunk) as s:
            g = mean_gradient(s)
            size = float(g.double().square().sum())
            along = float((g.double() * s.products(g[None])[0].double()).sum())
            quotients.append(along / size if size > 0 else 0.0)
    values = np.array(quotients)
    error = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
    return Estimate(
        float(values.mean()), error, dof=len(values) - 1, samples=values, passes=3 * len(values)
    )


def mean_gradient(s: Surface) -> Float[Tensor, " P"]:
    """Return the gradient of the mean loss for all trainable parameters as one vector."""
    total = torch.zeros(s.P, dtype=s.like.dtype, device=s.like.device)
    parameters = list(s.parameters.values())
    for inputs, samples in s.net.chunks():
        share = s.loss(s.net.outputs(inputs), s.y[samples]).sum() / s.net.n
        if not share.requires_grad:
            continue
        grads = torch.autograd.grad(share, parameters, allow_unused=True)
        pieces = [
            torch.zeros_like(p) if g is None else (g.to_dense() if g.is_sparse else g)
            for g, p in zip(grads, parameters, strict=True)
        ]
        total += torch.cat([piece.reshape(-1).to(total) for piece in pieces])
    return total


@dataclass(frozen=True)
class _Slope:
    """The derivative of the loss with respect to the outputs, as one row for each sample."""

    loss: Loss
    y: Any

    def transposed(self, f: Tensor, samples: slice) -> Tensor:
        """Return the row of each sample, [b, 1, N]."""
        outputs = f.detach().requires_grad_()
        with torch.enable_grad():
            total = self.loss(outputs, as_tensor(self.y, f.device)[samples]).sum()
        (slope,) = torch.autograd.grad(total, outputs)
        return slope[:, None, :]

    def products(self, f: Tensor, samples: slice) -> RootProducts:
        """Return products with the row and its transpose."""
        row = self.transposed(f, samples)[:, 0]
        return RootProducts(1, lambda v: v * row, lambda w: (w * row).sum(1, keepdim=True))


def _squared_gradients(
    model: nn.Module, x: Any, y: Any, loss: Loss, output: Any, chunk: int | None
) -> Float[np.ndarray, " n"]:
    """Return ||grad_theta l_i||^2 of each sample: the sharpness of (dl/df)^T f."""
    pairs = list(batches(x))
    if y is None and all(target is not None for _, target in pairs):
        y = torch.cat([as_tensor(target, "cpu") for _, target in pairs])
    if y is None:
        raise FlatlensError("a loss needs targets; give y, or batches of (inputs, targets)")
    slope = _Slope(loss, y)
    needs = frozenset({GRADIENTS})
    request = Request(root=slope, needs=needs, output=output, chunk=chunk)
    return sharpness.samples(look(model, (inputs for inputs, _ in pairs), request))


def _mini_batches(
    x: Any, y: Any, size: int, count: int, seed: int
) -> Iterator[list[tuple[Any, Any]]]:
    """Yield mini-batches as lists of (inputs, targets), one entry for each batch of x involved."""
    pairs = list(batches(x))
    ends = np.cumsum([inputs.n for inputs, _ in pairs])
    n = int(ends[-1]) if len(ends) else 0
    chooser = np.random.default_rng(seed)
    if size >= n:
        count = 1
    for _ in range(count):
        chosen = np.sort(chooser.choice(n, min(size, n), replace=False))
        part = []
        for (inputs, target), end in zip(pairs, ends, strict=True):
            own = chosen[(chosen < end) & (chosen >= end - inputs.n)]
            if len(own):
                local = torch.from_numpy(own - (end - inputs.n))
                targets = target if y is None else as_tensor(y, "cpu")[end - inputs.n : end]
                if targets is None:
                    raise FlatlensError("a loss needs targets; give y, or batches with targets")
                part.append((_taken(inputs, local), as_tensor(targets, "cpu")[local]))
        yield part


def _taken(inputs: Inputs, places: Tensor) -> Any:
    """Return the arguments of some samples as a tuple or dict."""
    some = inputs.map(lambda t: t[places.to(t.device)])
    return dict(zip(some.keys, some.values, strict=True)) if some.named else tuple(some.values)
