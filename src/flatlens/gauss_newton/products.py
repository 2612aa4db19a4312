"""Products with the Gauss-Newton matrix, and gradients of mixtures of all outputs.

G v = (1/n) sum_i J_i^T R_i R_i^T J_i v, where R_i R_i^T is the Hessian of the loss with respect to
the outputs. The product J v is the derivative of the gradient J^T w with respect to w. So two
backward passes are enough, and every operation with a second derivative works without forward mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatlens.capture.inputs import Inputs
from flatlens.curvature.hessians import Network, opened
from flatlens.errors import FlatlensError, first_line
from flatlens.losses import Loss


class GaussNewton:
    """The Gauss-Newton matrix of the mean loss over some samples, as products with vectors.

    Args:
        net: the model and its samples.
        loss: the loss.
        y: targets, or None if the Hessian with respect to the outputs does not need them.
        parameters: the trainable parameters by name.

    Attributes:
        size: number of trainable entries P.
        like: a vector of P entries, of the right type and device.
    """

    def __init__(
        self, net: Network, loss: Loss, y: Tensor | None, parameters: dict[str, nn.Parameter]
    ) -> None:
        self.net, self.loss, self.y, self.parameters = net, loss, y, parameters
        self.size = sum(p.numel() for p in parameters.values())
        self.like = next(iter(parameters.values())).detach().new_zeros(self.size)
        self._whole: tuple[Tensor, Tensor, list[Tensor | None], Tensor] | None = None

    def tensors(self, v: Float[Tensor, " P"]) -> dict[str, Tensor]:
        """Split a vector into one tensor per parameter."""
        sizes = [p.numel() for p in self.parameters.values()]
        pieces = zip(self.parameters.items(), v.split(sizes), strict=True)
        return {name: piece.reshape(p.shape).to(p.dtype) for (name, p), piece in pieces}

    def product(self, V: Float[Tensor, "k P"]) -> Float[Tensor, "k P"]:
        """Return G v for each row v."""
        total = torch.zeros_like(V)
        for inputs, samples in self.net.chunks():
            f, w, gradients, H = self._whole or self._first(inputs, samples)
            pairs = zip(gradients, self.parameters, strict=True)
            alive = [(g, p) for g, p in pairs if g is not None]
            for k, v in enumerate(V):
                direction = self.tensors(v)
                try:
                    (Jv,) = torch.autograd.grad(
                        [g for g, _ in alive], w, [direction[p] for _, p in alive],
                        retain_graph=True,
                    )  # fmt: skip
                except RuntimeError as error:
                    if isinstance(error, torch.OutOfMemoryError):
                        raise
                    raise FlatlensError(
                        f"the model has no second derivative ({first_line(error)}), which products "
                        "with the Gauss-Newton matrix need; take fewer samples, so that n times "
                        "the outputs is at most max_size"
                    ) from error
                HJv = (H @ Jv.unsqueeze(2)).squeeze(2)
                total[k] += self._backward(f, HJv) / self.net.n
            if inputs.n == self.net.n:
                self._whole = (f, w, gradients, H)
        return total

    def _first(
        self, inputs: Inputs, samples: slice
    ) -> tuple[Tensor, Tensor, list[Tensor | None], Tensor]:
        """Run one chunk; return f, a zero weight w, J^T w with its graph, and the loss Hessian."""
        f = self._outputs(inputs)
        w = torch.zeros_like(f, requires_grad=True)
        gradients = torch.autograd.grad(
            f, list(self.parameters.values()), w, create_graph=True, allow_unused=True
        )
        H = self.loss.hessian(f.detach(), self._targets(samples)).to(f)
        return f, w, [g if g is not None and g.requires_grad else None for g in gradients], H

    def _outputs(self, inputs: Inputs) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.net.outputs(inputs)

    def _targets(self, samples: slice) -> Tensor | None:
        return None if self.y is None else self.y[samples]

    def _backward(self, f: Tensor, weights: Tensor) -> Float[Tensor, " P"]:
        """Return J^T weights as one vector."""
        grads = torch.autograd.grad(
            f, list(self.parameters.values()), weights, retain_graph=True, allow_unused=True
        )
        pairs = zip(grads, self.parameters.values(), strict=True)
        dense = [torch.zeros_like(p) if g is None else g for g, p in pairs]
        return torch.cat(
            [(g.to_dense() if g.is_sparse else g).flatten().to(self.like) for g in dense]
        )

    def mixture(self, weights: Float[Tensor, "k r"]) -> Float[Tensor, "k P"]:
        """Return sum_ia weights_ia grad (R_i^T f_i)_a for each row of weights, r = n times k."""
        total = self.like.new_zeros(len(weights), self.size)
        for inputs, samples in self.net.chunks():
            f = self._outputs(inputs)
            R = self.loss.root(f.detach(), self._targets(samples)).to(f)  # [b, N, k]
            width = R.shape[2]
            for row, w in enumerate(weights):
                own = w[samples.start * width : samples.stop * width].view(-1, width).to(f)
                total[row] += self._backward(f, (R @ own.unsqueeze(2)).squeeze(2))
        return total


@contextlib.contextmanager
def gauss_newton(
    model: nn.Module, x: Any, y: Tensor | None, loss: Loss, output: Any, chunk: int | None
) -> Iterator[GaussNewton]:
    """Yield the Gauss-Newton matrix of a model on its samples; the model is left as it was."""
    with opened(model) as (inner, dtype):
        net = Network(inner, x, output, chunk, dtype)
        trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        if not trained:
            raise FlatlensError("the model has no trainable parameters: G has no entries")
        yield GaussNewton(net, loss, y, trained)
