"""Penalties to train with: unbiased, differentiable estimates of sharpness and input sensitivity.

Add a penalty to the loss of any training loop::

    loss = loss_function(model(x), y) + 0.001 * sharpness_penalty(model, x)
    loss.backward()

Both penalties are squared Frobenius norms of a derivative, averaged over the n samples of x. One
backward pass estimates either of them. Let every entry of v_i be +1 or -1 with equal probability,
all entries independent, and let D be the derivative with respect to theta or to x. Then

    E ||D sum_i v_i . f(x_i)||^2 = sum_ij sum_ab E[v_ia v_jb] <D f_a(x_i), D f_b(x_j)>
                                 = sum_i ||D f(x_i)||_F^2,

because E[v_ia v_jb] is 1 where (i, a) = (j, b) and 0 elsewhere: the cross terms between samples and
between outputs vanish in expectation. Dividing by n gives the mean.

The gradient of a penalty is a second derivative of the network. Some kernels of torch do not have
one, or have a wrong one; ``twice_differentiable`` selects others. A loop that shares one forward
pass between the loss and the penalty runs that pass inside ``twice_differentiable`` and then calls
``sharpness_of_outputs`` or ``sensitivity_of_outputs``.

Hooks on parameters, such as gradient clipping, do not change a penalty. They act when the gradient
of the whole loss arrives, as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatlens.arguments import no_type_check, typed_arguments
from flatlens.capture.inputs import Inputs, outputs
from flatlens.capture.no_trace import original, without_hooks
from flatlens.curvature.formulas import RightFormulas
from flatlens.curvature.squared_norm import squared_norm
from flatlens.errors import FlatlensError

__all__ = [
    "sensitivity_of_outputs",
    "sensitivity_penalty",
    "sharpness_of_outputs",
    "sharpness_penalty",
    "twice_differentiable",
]

Scalar = Float[Tensor, ""]


@no_type_check
@typed_arguments
def sharpness_penalty(
    model: nn.Module, x: Any, generator: torch.Generator | None = None, *, output: Any = None
) -> Scalar:
    """Estimate S = mean_i ||grad_theta f(x_i)||_F^2 (Eq. 3) without bias, to train with.

    theta are all trainable parameters of the model. The model runs once more, in the mode that it
    is in. Its buffers do not change: running statistics of a norm layer count the batch once.

    *Which S.* In training mode the penalty is about the network in training mode. With dropout it
    is S of the network with the units that this call drops. With batch statistics of BatchNorm
    f(x_i) depends on the whole batch. S is then mean_i ||grad_theta f_i(x_1, ..., x_n)||_F^2, with
    the derivative taken through mean and variance. ``measure`` uses running statistics, which gives
    another number. To penalise that one, call ``model.eval()`` before.

    Args:
        model: the network.
        x: one batch: a tensor, or a tuple or dict of tensors with samples in the first dimension.
        generator: source of the random signs. By default torch's global generator.
        output: which part of the model's result is f, if that is a dict or tuple: a key, an index,
            an attribute or a function. f may have any shape [n, ...].

    Returns:
        A scalar that can be differentiated. Inside ``torch.no_grad`` it is a plain number.

    Raises:
        FlatlensError: if the model fails on x, f is not one floating-point tensor with a row for
            each sample, or no parameter is trainable.

    Example:
        >>> net = nn.Linear(2, 1).double()
        >>> sharpness_penalty(net, torch.ones(1, 2).double()).item()  # ||x||^2 + 1
        3.0
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise FlatlensError("The model has no trainable parameters, so it has no sharpness.")
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        f = _run(model, Inputs(x).map(torch.clone), output)  # a model may overwrite its input
        penalty = sharpness_of_outputs(f, parameters, generator)
    return penalty if differentiable else penalty.detach()


@no_type_check
@typed_arguments
def sensitivity_penalty(
    model: nn.Module, x: Any, generator: torch.Generator | None = None, *, output: Any = None
) -> Scalar:
    """Estimate mean_i ||df(x_i)/dx_i||_F^2 without bias: the Jacobian regulariser.

    The model runs once more, in the mode that it is in; its buffers do not change.

    *Which Jacobian.* If samples do not depend on one another, it is that of each sample. Batch
    statistics of BatchNorm couple the samples. The estimate is then (1/n) sum_ij
    ||df(x_i)/dx_j||_F^2, the whole Jacobian of the batch. With dropout it is the network with the
    units that this call drops. To penalise the network that ``measure`` measures, call
    ``model.eval()`` before.

    Args:
        model: the network.
        x: one batch: a tensor, or a tuple or dict of tensors with samples in the first dimension.
            The derivative is with respect to all floating-point tensors but masks.
        generator: source of the random signs. By default torch's global generator.
        output: which part of the model's result is f, as in ``sharpness_penalty``.

    Returns:
        A scalar that can be differentiated. Inside ``torch.no_grad`` it is a plain number.

    Raises:
        FlatlensError: if the model fails on x, f is not one floating-point tensor with a row for
            each sample, or x has no floating-point tensor.

    Example:
        >>> net = nn.Linear(2, 1).double()
        >>> _ = nn.init.constant_(net.weight, 2.0)
        >>> sensitivity_penalty(net, torch.ones(1, 2).double()).item()  # ||W||_F^2
        8.0
    """
    given = Inputs(x)
    if not given.floating:
        raise FlatlensError(
            "The input has only integers or masks; there is no derivative with respect to it."
        )
    chosen = {id(t) for t in given.floating}
    differentiable = torch.is_grad_enabled()
    sources: list[Tensor] = []

    def source(t: Tensor) -> Tensor:
        """Return a tensor to differentiate; the model gets a copy, which it may overwrite."""
        if id(t) not in chosen:
            return t
        sources.append(t if t.requires_grad else t.detach().requires_grad_())
        return sources[-1].clone()

    with torch.enable_grad():
        f = _run(model, given.map(source), output)
        penalty = sensitivity_of_outputs(f, sources, generator)
    return penalty if differentiable else penalty.detach()


def sharpness_of_outputs(
    f: Shaped[Tensor, "n ..."],
    parameters: Iterable[Tensor],
    generator: torch.Generator | None = None,
) -> Scalar:
    """Estimate S from outputs that were computed inside ``twice_differentiable``.

    Args:
        f: outputs [n, ...] of a forward pass with gradients on.
        parameters: the trainable parameters; those that f does not depend on count as 0.
        generator: source of the random signs. By default torch's global generator.

    Returns:
        A scalar that can be differentiated.

    Raises:
        FlatlensError: if f is not a floating-point tensor with a gradient, or has no samples.
    """
    return _squared_derivative(f, list(parameters), generator)


def sensitivity_of_outputs(
    f: Shaped[Tensor, "n ..."],
    inputs: Tensor | Sequence[Tensor],
    generator: torch.Generator | None = None,
) -> Scalar:
    """Estimate mean_i ||df/dx_i||_F^2 from outputs computed inside ``twice_differentiable``.

    Args:
        f: outputs [n, ...] of a forward pass with gradients on.
        inputs: the tensors that f was computed from; they required gradients before the pass.
        generator: source of the random signs. By default torch's global generator.

    Returns:
        A scalar that can be differentiated.

    Raises:
        FlatlensError: if f is not a floating-point tensor with a gradient, or has no samples.
    """
    return _squared_derivative(f, [inputs] if isinstance(inputs, Tensor) else [*inputs], generator)


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Run the forward pass with kernels that have a correct second derivative.

    Attention uses its math kernel, because the fused kernels have no second derivative. Recurrent
    layers on a GPU do not use cuDNN. Weight norm, and batch norm in evaluation mode, are computed
    by formulas, because the second derivative of torch's kernels can be wrong (torch 2.13 on the
    CPU).
    """
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False), RightFormulas():
        yield


def _run(model: nn.Module, inputs: Inputs, output: Any) -> Float[Tensor, "n N"]:
    """Return f as [n, N], run with copies of the buffers so that the model's do not change."""
    module = original(model)
    copies = {name: b.detach().clone() for name, b in module.named_buffers()}

    def call(*positional: Any, **named: Any) -> Any:
        return torch.func.functional_call(module, copies, positional, named)

    with twice_differentiable():
        return outputs(inputs, call, output)


def _squared_derivative(
    f: Tensor, sources: list[Tensor], generator: torch.Generator | None
) -> Scalar:
    """Return ||D sum_i v_i . f_i||^2 / n with random signs v; D differentiates at the sources."""
    if not f.is_floating_point() or f.dim() == 0 or f.numel() == 0:
        raise FlatlensError(
            f"A penalty needs floating-point outputs of shape [n, ...], not {f.dtype} of shape "
            f"{list(f.shape)}."
        )
    if not f.requires_grad:
        raise FlatlensError(
            "The outputs do not depend on anything that requires a gradient; run the model with "
            "gradients on."
        )
    v = random_signs(f, generator)
    with without_hooks(sources):
        gradients = torch.autograd.grad(f, sources, v, create_graph=True, allow_unused=True)
    squares = [squared_norm(g) for g in gradients if g is not None]
    # f may depend on no source; its derivative is then 0
    return torch.stack(squares).sum() / len(f) if squares else 0 * f.sum()


def random_signs(
    like: Shaped[Tensor, "n ..."], generator: torch.Generator | None = None
) -> Shaped[Tensor, "n ..."]:
    """Draw independent entries +1 and -1 in the shape, dtype and device of a tensor.

    They are drawn on the generator's device (the CPU without one), so that the same seed gives the
    same signs wherever the network is.
    """
    device = torch.device("cpu") if generator is None else generator.device
    bits = torch.randint(2, like.shape, generator=generator, device=device)
    return (2 * bits - 1).to(like)
