"""One layer's algebra in the weight-sharing format.

Every measured layer is z = W u + b at T positions. Whatever the layer, the tensors here are

- ``u``  [batch, groups, d_in, T]   the patches (tokens, im2col columns) of its input,
- ``J``  [batch, groups, d_out, T]  one row of df/dz, position by position,
- ``W``  [groups, d_out, d_in]      the weight,

so that grad_W f = sum over positions of J_p u_p^T. A dense layer has T = 1. A transposed
convolution is a map of each input position onto d_out = channels x kernel products, followed by a
fixed overlapping sum: its u is the input as it stands and its J the patches of df/dz.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.spectra import rank_tolerance
from flatlens.capture.recorder import Call, Geometry, LinearMap, flat_pads

# Per-sample gradients of one layer are formed in blocks of about this many entries: what is written
# must still be in the cache when it is squared (one block of all samples is three times slower).
BLOCK_ENTRIES = 1 << 20
HUGE = 4 << 20  # bytes from which numpy asks for huge pages
MOST_LEFT = 32 << 20  # bytes of buffers that stay between measurements
TINY = 1e-8  # below this a derivative is squared in float64: in float32 its square may vanish


@dataclass(frozen=True)
class Layout:
    """Where a tensor keeps its samples: dimension ``dim`` of size batch x ``repeat``.

    ``inner``: of a flattened dimension, the sample is the fast index (rows t0s0, t0s1, t1s0, ...).
    """

    dim: int = 0
    repeat: int = 1
    inner: bool = False

    def fits(self, t: Tensor, batch: int) -> bool:
        """Whether ``t`` has this layout for ``batch`` samples."""
        return t.dim() > self.dim and t.shape[self.dim] == batch * self.repeat

    def split(self, t: Tensor, batch: int) -> Tensor:
        """``t`` with the samples first: [batch, ...]."""
        if self.repeat == 1:
            return t.movedim(self.dim, 0)
        sizes = (self.repeat, batch) if self.inner else (batch, self.repeat)
        return t.unflatten(self.dim, sizes).movedim(self.dim + self.inner, 0)


def split(t: Tensor, layout: Layout | None, batch: int) -> Tensor:
    """``t`` as [batch, ...]; without a layout the batch is one sample and owns all of ``t``."""
    return t.unsqueeze(0) if layout is None else layout.split(t, batch)


def find_layout(one: Tensor, two: Tensor) -> Layout | None:
    """The layout under which ``two`` (two samples) shows the first sample as ``one`` does.

    None where there is no such layout or more than one: then samples are measured one at a time.
    """
    grown = [d for d in range(one.dim()) if one.shape[d] != two.shape[d]]
    if one.dim() != two.dim() or len(grown) != 1 or two.shape[grown[0]] != 2 * one.shape[grown[0]]:
        return None
    dim, repeat = grown[0], one.shape[grown[0]]
    found = []
    for inner in (False, True) if repeat > 1 else (False,):
        layout = Layout(dim, repeat, inner)
        mine, alone = layout.split(two, 2)[0], layout.split(one, 1)[0]
        if close(mine, alone):
            found.append(layout)
    return found[0] if len(found) == 1 else None


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to what a different batch size does to rounding."""
    a, b = a.detach(), b.detach()
    tolerance = 1e-3 if torch.finfo(a.dtype).bits < 64 else 1e-8
    scale = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * scale).all())


def patches(
    x: Float[Tensor, "k c *space"],
    kernel: tuple[int, ...],
    geometry: Geometry,
    positions: tuple[int, ...],
    into: Callable[[tuple[int, ...]], Tensor] | None = None,
) -> Float[Tensor, "k g i t"]:
    """im2col in any dimension: what the kernel sees at each of ``positions``.

    ``into`` gives the memory for it (default: fresh).
    """
    if any(p for pair in geometry.padding for p in pair):
        x = F.pad(x, flat_pads(geometry.padding), geometry.pad_mode)
    reach = [
        (t - 1) * s + (k - 1) * d + 1
        for t, s, k, d in zip(positions, geometry.stride, kernel, geometry.dilation, strict=True)
    ]
    # A transposed convolution with output padding may look past the end: those entries are zero.
    short = [max(0, r - size) for r, size in zip(reach, x.shape[2:], strict=True)]
    if any(short):
        x = F.pad(x, flat_pads(tuple((0, s) for s in short)))
    space = x.stride()[2:]
    windows = x.as_strided(
        (*x.shape[:2], *kernel, *positions),
        (
            *x.stride()[:2],
            *(s * d for s, d in zip(space, geometry.dilation, strict=True)),
            *(s * d for s, d in zip(space, geometry.stride, strict=True)),
        ),
    )
    seen = windows if into is None else into(tuple(windows.shape)).copy_(windows)
    return seen.reshape(x.shape[0], geometry.groups, -1, prod(positions))


class Buffers:
    """Large tensors that are filled anew for each chunk; new ones would cost more than that.

    On the CPU numpy allocates them: it asks for huge pages, and the first touch of 64 MiB takes 10
    ms where torch's takes 38. Those too small for that are left to the next measurement: where the
    allocator has given them back to the system, touching them again is a sixth of the MLP's time.
    """

    _left: ClassVar[list[dict[Hashable, Tensor]]] = []

    def __init__(self) -> None:
        try:
            self._kept = self._left.pop()  # in one step, for threads may measure side by side
        except IndexError:
            self._kept = {}

    def leave(self) -> None:
        """Keep the small ones for the next."""
        small = {k: t for k, t in self._kept.items() if t.device.type == "cpu" and t.nbytes < HUGE}
        if sum(t.nbytes for t in small.values()) <= MOST_LEFT:
            self._left[:] = [small]

    def get(self, key: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of ``shape``, the same memory for the same key."""
        size, kind, kept = prod(shape), (like.dtype, like.device), self._kept.get(key)
        if kept is None or kept.numel() < size or (kept.dtype, kept.device) != kind:
            if like.device.type == "cpu":
                need = size * like.element_size()
                whole = np.empty(need + 64, np.uint8)
                start = -whole.ctypes.data % 64  # aligned, as torch's own memory is
                kept = torch.from_numpy(whole[start : start + need]).view(like.dtype)
            else:
                kept = like.new_empty(size)
            self._kept[key] = kept
        return kept[:size].view(shape)


class Positions:
    """One call in the weight-sharing format, for one chunk of samples and all its N directions.

    The rows of df/dz are stacked as they come, one output direction after another. They are kept
    in the order in which the layer has them ([b, T, N, o] for a linear layer, [b, g, N, o, T] for a
    convolution), so that [N o, T] is one matrix per sample without a further copy.
    """

    def __init__(
        self,
        call: Call,
        layout: Layout | None,
        batch: int,
        directions: int,
        buffers: Buffers,
        place: int,
    ) -> None:
        self.call, self.layout, self.batch, self.N = call, layout, batch, directions
        self.map = call.map
        self.W = call.map.matrix
        self.u = self._format(
            call.x, is_input=True, into=lambda shape: buffers.get(("u", place), shape, call.x)
        )
        self.T = self.u.shape[-1]
        self._buffers, self._place = buffers, place
        self.fold: Tensor | None = None  # df/dz summed over the image, of a transposed convolution

    def begin(self, directions: int) -> None:
        """Forget all rows; others follow."""
        self.N, self.fold = directions, None
        for kept in ("rows", "power"):
            self.__dict__.pop(kept, None)

    @cached_property
    def rows(self) -> Tensor:
        """Room for all rows of df/dz, taken when the first one comes."""
        (g, o, _), b, N, T = self.W.shape, self.batch, self.N, self.T
        shape = (b, T, N, o) if self.flat else (b, g, N, o, T)
        return self._buffers.get(("J", self._place), shape, self.u)

    @property
    def flat(self) -> bool:
        """Whether this is a linear layer."""
        return self.map.geometry is None

    @property
    def dense(self) -> bool:
        """Whether z = W x + b, with nothing shared."""
        return self.flat and self.T == 1

    def take(self, v: int, grad: Tensor | None) -> None:
        """Stack the row df_v/dz."""
        row = self.rows[:, :, v]
        if grad is None:
            row.zero_()
        elif self.flat:
            t = split(grad, self.layout, self.batch)
            row.copy_(t.reshape(row.shape))
        else:
            row.copy_(self._format(grad, is_input=False))
        if self.map.transposed and self.map.bias is not None:
            if self.fold is None:
                self.fold = self.u.new_zeros(self.batch, self.N, len(self.map.bias))
            if grad is not None:
                g = self._batched(grad).flatten(2).unsqueeze(1)
                self.fold[:, v] = self._samples(g).sum(-1).squeeze(1)

    def widen(self) -> None:
        """Go on in float64."""
        self.__dict__.pop("power", None)
        self.rows, self.u, self.W = self.rows.double(), self.u.double(), self.W.double()
        self.fold = None if self.fold is None else self.fold.double()

    @property
    def single(self) -> bool:
        """Whether df/dz at the one position there is is also the gradient of a bias."""
        return self.T == 1 and not self.map.transposed

    @cached_property
    def power(self) -> Float[Tensor, "b g o"]:
        """The squares of df/dz at the one position there is, summed over directions."""
        rows = self.rows if self.flat else self.rows.squeeze(-1)
        return squares(rows, 2)

    @property
    def J(self) -> Float[Tensor, "b g No T"]:
        """All rows as one matrix per sample and group."""
        if self.flat:
            return self.rows.flatten(2).mT.unsqueeze(1)
        return self.rows.flatten(2, 3)

    def bias_rows(self) -> Float[Tensor, "b N o"]:
        """The per-sample gradient of the bias."""
        if self.fold is not None:
            return self.fold
        if self.flat:
            return self.rows[:, 0] if self.T == 1 else self.rows.sum(1)
        return self.rows.sum(-1).movedim(2, 1).flatten(2)

    def energies(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per sample: sum_p ||J_p||^2 ||u_p||^2, sum_p ||J_p||^2, min_p ||u_p||^2."""
        u2 = _columns(self.u)
        J2 = _columns(self.J) if self.T > 1 else self.power.sum(2, True, dtype=torch.float64)
        return (J2 * u2).sum((1, 2)), J2.sum((1, 2)), u2.amin((1, 2))

    @property
    def bias_per_position(self) -> bool:
        """Whether a bias is added at each of the positions (not so after an overlapping sum)."""
        return self.map.bias is not None and not self.map.transposed

    def patch_rank(self, bias: bool) -> Float[Tensor, " b"]:
        """The smallest singular value of the patches U, or [U, 1], over positions (theory 4.2)."""
        U = self.u.double().mT  # [b, g, T, i]
        if bias:
            U = torch.cat([U, torch.ones_like(U[..., :1])], -1)
        gram = U @ U.mT
        values = gram.squeeze(-1) if self.T == 1 else torch.linalg.eigvalsh(gram).clamp(min=0)
        s, top = values[..., 0].sqrt(), values[..., -1].sqrt()
        poor = s < 1e-3 * top  # the Gram matrix has lost its digits
        if bool(poor.any()):
            s[poor] = torch.linalg.svdvals(U[poor])[..., -1]
        s = torch.where(s < rank_tolerance(self.u.dtype, *U.shape[-2:]) * top, 0.0, s)
        # It divides a bound: what rounding may have added is taken off.
        rounding = 4 * rank_tolerance(torch.float64, *U.shape[-2:]) * top
        s = torch.where(s > 0, s - torch.where(poor, rounding, rounding * top / s), 0.0).clamp(
            min=0
        )
        return s.amin(1)

    def _format(
        self, t: Tensor, is_input: bool, into: Callable[[tuple[int, ...]], Tensor] | None = None
    ) -> Float[Tensor, "b g f T"]:
        geometry = self.map.geometry
        if geometry is None:
            t = split(t, self.layout, self.batch)
            return t.reshape(self.batch, -1, t.shape[-1]).mT.unsqueeze(1)
        t = self._batched(t)
        if is_input == geometry.transposed:
            return self._samples(t.reshape(t.shape[0], geometry.groups, -1, prod(t.shape[2:])))
        kernel = tuple(self.map.weight.shape[2:])
        across = self.map.in_shape if geometry.transposed else self.map.out_shape
        return self._samples(patches(t, kernel, geometry, tuple(across[-len(kernel) :]), into))

    def _batched(self, t: Tensor) -> Tensor:
        """A convolution's tensor with a batch dimension, also where the call had none."""
        return t if t.dim() == self.map.weight.dim() else t.unsqueeze(0)

    def _samples(self, t: Float[Tensor, "k g f t"]) -> Float[Tensor, "b g f kt"]:
        """Gather the images that belong to one sample into its positions."""
        if self.layout is not None and self.layout.repeat == 1:
            return t
        t = split(t, self.layout, self.batch)
        return t.movedim(1, -2).flatten(-2)


def _columns(t: Float[Tensor, "b g f T"]) -> Float[Tensor, "b g T"]:
    """The squared norm at each position, float64, in blocks that stay in the cache."""
    b, g, f, T = t.shape
    samples, positions = max(1, BLOCK_ENTRIES // (g * f * T)), max(1, BLOCK_ENTRIES // (g * f))
    found = t.new_empty(b, g, T, dtype=torch.float64)
    for s in range(0, b, samples):
        for p in range(0, T, positions):
            part = t[s : s + samples, :, :, p : p + positions]
            found[s : s + samples, :, p : p + positions] = part.square().sum(2)
    return found


def occurrences(layer: LinearMap) -> tuple[int, int]:
    """How often one entry of the input occurs over all patches: at least, and at most (kappa).

    Counted, so that stride, dilation and every padding mode are right: the derivative of the sum of
    all patches by an entry is the number of patches it is in.
    """
    geometry = layer.geometry
    if geometry is None or geometry.transposed:
        return 1, 1
    kernel = tuple(layer.weight.shape[2:])
    image = layer.in_shape[-len(kernel) - 1 :]
    with torch.enable_grad():
        x = torch.zeros(1, *image, device=layer.weight.device, requires_grad=True)
        total = patches(x, kernel, geometry, tuple(layer.out_shape[-len(kernel) :])).sum()
        counts = torch.autograd.grad(total, x)[0]
    return round(float(counts.min())), round(float(counts.max()))


def squares(rows: Tensor, dim: int) -> Tensor:
    """The sum of squares over ``dim``; in float64 where those of float32 may vanish."""
    found = rows.square().sum(dim)
    if rows.dtype == torch.float32 and bool((summed(found) < TINY**2).any()):
        return rows.double().square().sum(dim)
    return found


def summed(t: Tensor) -> Float[Tensor, " b"]:
    """The sum of each sample's entries, float64."""
    return t.flatten(1).sum(1, dtype=torch.float64)
