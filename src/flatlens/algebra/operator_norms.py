"""||W_l||: the operator norm of a layer on its input size, its kernel's norm, its Frobenius norm.

A dense layer's operator norm is the spectral norm of its weight. A convolution's is that of the map
from one whole image to one whole image; it depends on the image size, stride, padding and dilation.
Small operators are decomposed exactly. Large ones take Lanczos on C^T C from a random start, which
gives theta <= ||C||_2 and, with the residual r of its pair, an eigenvalue of C^T C within r of
theta^2. So ||C||_2 lies between theta and the upper end sqrt(theta^2 + r), which is what enters a
bound. (That the pair is the top one is as sure as that a random start has a component along it.)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flatlens.capture.positions import Positions, occurrences
from flatlens.capture.recorder import CONVS, LinearMap, flat_pads

EXACT_SIZE = 64  # operators with a side up to this are decomposed exactly
MAX_STEPS = 400
MOST_KNOWN = 10_000  # norms that are remembered
FIRST_CHECK, CHECK_EVERY = 12, 6  # steps


@dataclass(frozen=True)
class WeightNorms:
    """Three norms of one layer; ``slack`` is the relative width of what an iteration left open.

    A norm times 1 + slack is a certified upper end.
    """

    operator: float
    kernel: float
    frobenius: float
    slack: float = 0.0


_known: dict[tuple[Any, ...], WeightNorms] = {}


def weight_norms(layer: LinearMap) -> WeightNorms:
    """All three norms of the weight of ``layer``; the same weight on the same size is known.

    It is known by its entries, not by its tensor: a write through ``.data`` leaves no other trace.
    """
    W = layer.matrix
    frobenius = float(torch.linalg.vector_norm(W, dtype=torch.float64))
    entries = zlib.crc32(layer.weight.detach().cpu().contiguous().numpy().data)
    key = (W.dtype, W.shape, layer.kind, layer.geometry, layer.in_shape[1:], frobenius, entries)
    if key not in _known:
        kernels = [matrix_norm(w) for w in W]
        kernel = max(kernels)
        operator = kernel if layer.geometry is None else convolution_norm(layer)
        slack = max(operator.slack, *(k.slack for k in kernels))
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = WeightNorms(operator.value, kernel.value, frobenius, slack)
    return _known[key]


class Norm(NamedTuple):
    """A norm and the relative distance to its certified upper end."""

    value: float
    slack: float = 0.0


def matrix_norm(W: Tensor) -> Norm:
    """||W||_2."""
    if min(W.shape) <= EXACT_SIZE:
        W = W.double()
        gram = W @ W.mT if W.shape[0] <= W.shape[1] else W.mT @ W
        return Norm(float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt()))
    return lanczos_norm(lambda v: W.mT @ (W @ v), W[0])


def convolution_norm(layer: LinearMap) -> Norm:
    """||C_l||_2 of x -> layer(x) without bias, on its input size."""
    image = _image(layer)
    if image.numel() <= EXACT_SIZE:
        basis = torch.eye(image.numel(), dtype=layer.weight.dtype, device=layer.weight.device)
        with torch.no_grad():
            return matrix_norm(_apply(layer, basis.unflatten(1, image)).flatten(1))
    gram, x = _gram(layer)
    with torch.no_grad():
        return lanczos_norm(gram, x)


def untied_norms(positions: Positions) -> Float[Tensor, " b"]:
    """||D^-1 C||_2 of each sample (upper end), D = diag_p sqrt(||u_p||^2 + 1), theory 4.1."""
    layer = replace(positions.map, weight=positions.map.weight.detach().double())
    D = (positions.u.double().square().sum(2) + positions.bias_per_position).sqrt()  # [b, g, T]
    if layer.geometry is None or layer.geometry.transposed:  # block-diagonal over positions
        each = [matrix_norm(w) for w in layer.matrix]
        ends = D.new_tensor([n.value * (1 + n.slack) for n in each])
        return torch.where(ends > 0, ends / D.amin(2), 0.0).amax(1)
    found = []
    nothing = not bool(layer.weight.any()) or occurrences(layer)[1] == 0  # C = 0
    for d in D:
        if nothing or bool((d == 0).any()):
            found.append(0.0 if nothing else torch.inf)
            continue
        # [g, T] -> [k, g, o, space]: every output channel of a group has the same scale
        images = d.unflatten(1, (-1, layer.out_shape[-len(layer.geometry.stride) :].numel()))
        scale = images.movedim(1, 0).repeat_interleave(layer.matrix.shape[1], 1)
        norms = [_scaled(layer, s.to(layer.weight)) for s in scale]
        found.append(max(n.value * (1 + n.slack) for n in norms))
    return D.new_tensor(found)


def _scaled(layer: LinearMap, scale: Float[Tensor, "c T"]) -> Norm:
    gram, x = _gram(layer, scale.square().reciprocal())
    with torch.no_grad():
        return lanczos_norm(gram, x)


def _image(layer: LinearMap) -> torch.Size:
    """The shape of one image that the layer reads."""
    return layer.in_shape[-layer.weight.dim() + 1 :]


def _apply(layer: LinearMap, x: Tensor) -> Tensor:
    """The layer on images, without its bias."""
    geometry = layer.geometry
    assert geometry is not None
    func = next(f for f in CONVS if f.__name__ == layer.kind)
    weight, options = layer.weight.detach(), {}
    if geometry.transposed:
        options["padding"] = tuple(left for left, _ in geometry.padding)
        options["output_padding"] = geometry.output_padding
    elif any(p for pair in geometry.padding for p in pair):
        x = F.pad(x, flat_pads(geometry.padding), geometry.pad_mode)
    return func(
        x, weight, None, geometry.stride,
        dilation=geometry.dilation, groups=geometry.groups, **options,
    )  # fmt: skip


def _gram(layer: LinearMap, scale: Tensor | None = None) -> tuple[Callable[..., Tensor], Tensor]:
    """v -> C^T D^-2 C v on flat images (``scale`` is D^-2 per channel and position), and one."""
    geometry, weight = layer.geometry, layer.weight.detach()
    assert geometry is not None
    # With few positions torch is three times faster on two images than on one.
    images = 2 if layer.out_shape[2 - weight.dim() :].numel() < 8 else 1
    x = weight.new_zeros(images, *_image(layer)).requires_grad_()
    with torch.enable_grad():
        y = _apply(layer, x)
    pads = [left for left, right in geometry.padding if left == right]
    plain = not geometry.transposed and geometry.pad_mode == "constant"
    direct = plain and len(pads) == len(geometry.padding)

    def gram(v: Tensor) -> Tensor:
        z = _apply(layer, v.reshape(x[:1].shape).expand(x.shape))
        if scale is not None:
            z = z * scale.reshape(z[:1].shape)
        if not direct:
            return torch.autograd.grad(y, x, z, retain_graph=True)[0][0].flatten()
        return torch.ops.aten.convolution_backward(  # half the cost of asking autograd for it
            z, x, weight, None, geometry.stride, pads, geometry.dilation, False, [0] * len(pads),
            geometry.groups, [True, False, False],
        )[0][0].flatten()  # fmt: skip

    return gram, x[0].detach().flatten()


def lanczos_norm(gram: Callable[[Tensor], Tensor], like: Tensor) -> Norm:
    """||C||_2 from v -> C^T C v on vectors like ``like``, by Lanczos' three-term recurrence.

    Its vectors lose their orthogonality only once a value has converged, and then repeat values
    that are there already: the largest is right to rounding, and no basis need be kept.

    >>> W = torch.diag(torch.linspace(1, 2, 200, dtype=torch.float64))
    >>> round(lanczos_norm(lambda v: W @ (W @ v), W[0]).value, 6)
    2.0
    """
    tolerance = 1e-7 if like.dtype == torch.float64 else 1e-3
    start = torch.randn(len(like), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v, before, beta = (start / start.norm()).to(like), torch.zeros_like(like), like.new_zeros(())
    found: list[Tensor] = []  # the diagonal of the tridiagonal matrix and what stands beside it
    last = min(MAX_STEPS, len(like))
    for step in range(1, last + 1):
        w = gram(v)
        alpha = v @ w
        w = w - alpha * v - beta * before
        beta = torch.linalg.vector_norm(w)
        found += [alpha, beta]
        if (step >= FIRST_CHECK and step % CHECK_EVERY == 0) or step == last:
            value, residual = _ritz(torch.stack(found).double().cpu().numpy(), like.dtype)
            if value <= 0.0:
                return Norm(0.0)
            # r / 2 theta^2 is the relative width in ||C||, and rounding adds its own. Twice that,
            # for among many close values the largest may come last (seen: 1.2 times).
            slack = residual / value + 8 * torch.finfo(like.dtype).eps
            if slack <= 2 * tolerance:
                break
        before, v = v, w / beta
    return Norm(value**0.5, slack)


def _ritz(found: Float[np.ndarray, " m"], dtype: torch.dtype) -> tuple[float, float]:
    """The largest eigenvalue of the tridiagonal matrix and the residual of its Ritz pair."""
    diagonal, beside = found[::2], found[1::2]
    # Where only rounding is left the vectors span an invariant space: what follows is noise.
    rounding = 64 * torch.finfo(dtype).eps * np.fmax.accumulate(diagonal)
    ends = np.flatnonzero(~(beside > rounding))
    k = ends[0] + 1 if len(ends) else len(diagonal)
    off = np.diag(beside[: k - 1], -1)
    values, vectors = np.linalg.eigh(np.diag(diagonal[:k]) + off + off.T)
    return float(values[-1]), float(beside[k - 1] * abs(vectors[-1, -1]))
