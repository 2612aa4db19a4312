"""||W_l||: the operator norm of a layer on its input size, its kernel's norm, its Frobenius norm.

A dense layer's operator norm is the spectral norm of its weight. A convolution's is that of the map
from one whole image to one whole image; it depends on the image size, stride, padding and dilation.
Small operators are decomposed exactly. Large ones take Golub-Kahan-Lanczos from a random start: it
gives theta <= ||C||_2, and with the residual r of its singular pair a singular value lies within r
of theta. The upper end theta + r is what enters a bound. (A random start has a component along the
top singular vector with probability one; the run ends when r <= 1e-7 theta, in float32 3e-5.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flatlens.capture import CONVS, LinearMap, flat_pads

EXACT_SIZE = 128  # operators with a side up to this are decomposed exactly
MAX_STEPS = 400


@dataclass(frozen=True)
class WeightNorms:
    """Three norms of one layer; one that took an iteration is its certified upper end."""

    operator: float
    kernel: float
    frobenius: float


def weight_norms(layer: LinearMap) -> WeightNorms:
    """All three norms of the weight of ``layer``."""
    W = layer.matrix
    kernel = max(matrix_norm(w) for w in W)
    frobenius = float(torch.linalg.vector_norm(W.double()))
    operator = kernel if layer.geometry is None else convolution_norm(layer)
    return WeightNorms(operator, kernel, frobenius)


def matrix_norm(W: Tensor) -> float:
    """||W||_2 (upper end)."""
    if min(W.shape) <= EXACT_SIZE:
        W = W.double()
        gram = W @ W.mT if W.shape[0] <= W.shape[1] else W.mT @ W
        return float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt())
    return lanczos_norm(lambda v: W @ v, lambda u: W.mT @ u, W[0])


def convolution_norm(layer: LinearMap) -> float:
    """||C_l||_2 of x -> layer(x) without bias, on its input size (upper end)."""
    assert layer.geometry is not None
    geometry, weight = layer.geometry, layer.weight.detach()
    func = next(f for f, _ in CONVS.items() if f.__name__ == layer.kind)
    options: dict[str, object] = {
        "stride": geometry.stride,
        "dilation": geometry.dilation,
        "groups": geometry.groups,
    }
    if geometry.transposed:
        options["padding"] = tuple(left for left, _ in geometry.padding)
        options["output_padding"] = geometry.output_padding
    image = layer.in_shape[-weight.dim() + 1 :]

    def apply(x: Tensor) -> Tensor:
        if not geometry.transposed and any(p for pair in geometry.padding for p in pair):
            x = F.pad(x, flat_pads(geometry.padding), geometry.pad_mode)
        return func(x, weight, None, **options)

    if image.numel() <= EXACT_SIZE:
        basis = torch.eye(image.numel(), dtype=weight.dtype, device=weight.device)
        return matrix_norm(apply(basis.unflatten(1, image)).flatten(1))
    with torch.enable_grad():
        x = torch.zeros(1, *image, dtype=weight.dtype, device=weight.device, requires_grad=True)
        y = apply(x)

        def adjoint(u: Tensor) -> Tensor:
            return torch.autograd.grad(y, x, u, retain_graph=True)[0]

        with torch.no_grad():
            return lanczos_norm(apply, adjoint, x.detach())


def lanczos_norm(
    apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], like: Tensor
) -> float:
    """The upper end of the largest singular value of a linear map, Golub-Kahan-Lanczos.

    >>> W = torch.diag(torch.linspace(1, 2, 200, dtype=torch.float64))
    >>> round(lanczos_norm(lambda v: W @ v, lambda u: W.mT @ u, W[0]), 6)
    2.0
    """
    tolerance = 1e-7 if like.dtype == torch.float64 else 3e-5
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(like.numel(), generator=generator, dtype=torch.float64)
    v = start.to(like).reshape(like.shape)
    v = v / v.norm()
    basis = like.new_empty(min(MAX_STEPS, like.numel()) + 1, like.numel())
    basis[0] = v.flatten()
    left = apply(v)
    alphas, betas = [float(left.norm())], [0.0]
    if alphas[0] == 0.0:
        return 0.0
    u = left / alphas[0]
    for step in range(1, MAX_STEPS + 1):
        w = adjoint(u).reshape(-1) - alphas[-1] * basis[step - 1]
        done = basis[:step]
        w = w - (done @ w) @ done  # keep the basis orthogonal
        beta = float(w.norm())
        last = step == min(MAX_STEPS, like.numel())
        if last or step % 6 == 0 or beta <= tolerance * alphas[0]:
            theta, residual = _ritz(alphas, betas, beta)
            if last or residual <= tolerance * theta:
                return theta + residual + 4 * torch.finfo(like.dtype).eps * theta
        basis[step] = w / beta
        left = apply(basis[step].reshape(like.shape)) - beta * u
        alpha = float(left.norm())
        alphas.append(alpha)
        betas.append(beta)
        if alpha == 0.0:
            return _ritz(alphas, betas, 0.0)[0] * (1 + 4 * torch.finfo(like.dtype).eps)
        u = left / alpha
    raise AssertionError("unreachable")


def _ritz(alphas: list[float], betas: list[float], beta: float) -> tuple[float, float]:
    """Largest singular value of the bidiagonal matrix, and the residual of its pair."""
    B = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    if len(alphas) > 1:
        B += torch.diag(torch.tensor(betas[1:], dtype=torch.float64), 1)
    P, s, _ = torch.linalg.svd(B)
    return float(s[0]), beta * abs(float(P[-1, 0]))
