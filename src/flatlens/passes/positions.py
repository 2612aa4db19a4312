"""One call of a layer in the weight-sharing format, for one chunk of samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flatlens import tuning
from flatlens.algebra.buffers import Buffers
from flatlens.algebra.looks import unusual
from flatlens.algebra.spectra import rank_tolerance
from flatlens.algebra.sums import largest_entry, squares, squares_fit
from flatlens.algebra.wide_tensor import shown_wide
from flatlens.capture.layer import with_wide_weight
from flatlens.capture.layout import Layout
from flatlens.capture.recording import Call


class Positions:
    """A layer's patches u and its rows of df/dz, which arrive one output after another.

    Attributes:
        layer: the layer, which brings its tensors into the weight-sharing format.
        W: the weight, [g, o, i].
        outputs: number of rows df_v/dz.
    """

    def __init__(
        self,
        call: Call,
        layout: Layout | None,
        batch: int,
        outputs: int,
        buffers: Buffers,
        place: int,
    ) -> None:
        self.layer, self.layout = with_wide_weight(call.layer), layout
        self.batch, self.outputs = batch, outputs
        self.W = self.layer.matrix
        self._format = call.layer.row_format
        self._x, self._buffers, self._place = shown_wide(call.x), buffers, place
        self._u: Tensor | None = None
        self._store: Tensor | None = None
        self._power: Tensor | None = None
        self._bias_sums: Tensor | None = None  # used if df/db cannot be read off the stored rows
        self._J2: Tensor | None = None
        self._u2: Tensor | None = None

    @property
    def u(self) -> Float[Tensor, "b g i T"]:
        """The patches; those of a convolution are gathered when they are first read."""
        if self._u is None:
            place, like = ("u", self._place), self._x
            self._u = self.layer.patches(
                like, self.layout, self.batch, lambda shape: self._buffers.get(place, shape, like)
            )
        return self._u

    @property
    def T(self) -> int:
        """Number of positions."""
        return self.u.shape[-1]

    def begin(self, outputs: int) -> None:
        """Discard all rows and prepare for others."""
        self.outputs = outputs
        self._store = self._power = self._bias_sums = self._J2 = None

    @property
    def store(self) -> Tensor:
        """All rows of df/dz; the memory is allocated with the first row."""
        if self._store is None:
            shape = self._format.shape(self.W.shape, self.batch, self.outputs, self.T)
            self._store = self._buffers.get(("J", self._place), shape, self.u)
        return self._store

    @property
    def dense(self) -> bool:
        """Whether z = W x + b, with nothing shared."""
        return self.layer.is_linear and self.T == 1

    def take(self, v: int, grad: Tensor | None) -> None:
        """Store the row df_v/dz."""
        row = self.store[:, :, v]
        if grad is None:
            row.zero_()
        else:
            self.layer.write_row(row, grad, self.layout, self.batch)
        if self.layer.bias is not None and not self.layer.bias_per_position:
            self._take_bias(v, grad, self.layer.bias)

    def _take_bias(self, v: int, grad: Tensor | None, bias: Tensor) -> None:
        if self._bias_sums is None:
            self._bias_sums = self.u.new_zeros(self.batch, self.outputs, len(bias))
        if grad is not None:
            row = self.layer.bias_row(grad, self.layout, self.batch)
            assert row is not None
            self._bias_sums[:, v] = row

    def widen(self) -> None:
        """Continue in float64."""
        self._power = self._J2 = self._u2 = None
        self._store, self._u, self.W = self.store.double(), self.u.double(), self.W.double()
        self._bias_sums = None if self._bias_sums is None else self._bias_sums.double()

    @property
    def row_is_bias_gradient(self) -> bool:
        """Whether there is one position and df/dz there is also the derivative df/db."""
        return self.T == 1 and (self.layer.bias is None or self.layer.bias_per_position)

    @property
    def power(self) -> Float[Tensor, "b g o"]:
        """Squares of df/dz at the only position, summed over outputs."""
        if self._power is None:
            self._power = squares(self._format.at_one_position(self.store), 2)
        return self._power

    @property
    def J(self) -> Float[Tensor, "b g No T"]:
        """All rows as one matrix per sample and group."""
        return self._format.jacobian(self.store)

    def bias_rows(self) -> Float[Tensor, "b N o"]:
        """The per-sample derivative with respect to the bias."""
        if self._bias_sums is not None:
            return self._bias_sums
        return self._format.bias_rows(self.store)

    def energies(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return sum_p ||J_p||^2 ||u_p||^2, sum_p ||J_p||^2 and min_p ||u_p||^2 of each sample."""
        J2, u2 = self.row_squares, self.patch_squares
        return (J2 * u2).sum((1, 2)), J2.sum((1, 2)), u2.amin((1, 2))

    @property
    def row_squares(self) -> Float[Tensor, "b g T"]:
        """Return ||J_p||_F^2 of each position, all outputs together."""
        if self._J2 is None:
            single = self.T == 1
            self._J2 = (
                self.power.sum(2, True, dtype=torch.float64) if single else _column_squares(self.J)
            )
        return self._J2

    @property
    def patch_squares(self) -> Float[Tensor, "b g T"]:
        """Return ||u_p||^2 of each position."""
        if self._u2 is None:
            self._u2 = _column_squares(self.u)
        return self._u2

    def doubts(self, sensitivity: Float[Tensor, " b"] | None) -> Bool[Tensor, " 2"]:
        """Return whether squares may leave float32, and whether some have vanished altogether.

        Sums of squares contain J^2 u^2; those of Eqs. 41 and 44 contain (J u W)^2 and (A u)^2.

        Args:
            sensitivity: ||A||_2 of each sample; None where only gradient norms are measured.
        """
        if sensitivity is None:  # no other quantity needs the squares
            return self._doubts_of_entries()
        J, u = (t.sum((1, 2)).sqrt() for t in (self.row_squares, self.patch_squares))
        W = largest_entry(self.W.flatten()[None]).double()
        sizes = [J, u, J * u, W, J * u * W, sensitivity, sensitivity * u]
        zero = torch.stack([J == 0, u == 0]).any()
        return torch.stack([~squares_fit(torch.cat(sizes)), zero])

    def _doubts_of_entries(self) -> Bool[Tensor, " 2"]:
        """Return the same flags from the largest entry m: a norm is between m and sqrt(size) m."""
        gradients, patches = self.store.flatten(1), self.u.flatten(1)
        J, u = largest_entry(gradients).double(), largest_entry(patches).double()
        upper_J, upper_u = J * gradients.shape[1] ** 0.5, u * patches.shape[1] ** 0.5
        fit = squares_fit(torch.cat([J, u, J * u, upper_J, upper_u, upper_J * upper_u]))
        return torch.stack([~fit, torch.zeros_like(fit)])

    def has_vanished(self) -> bool:
        """Whether a sample's squares are all 0 although its entries are not."""
        squares = ((self.row_squares, self.store), (self.patch_squares, self.u))
        return any(bool(t[s.sum((1, 2)) == 0].any()) for s, t in squares)

    def patch_rank(self, bias: bool) -> Float[Tensor, " b"]:
        """Return the smallest singular value of the patches U, or of [U, 1] (theory 4.2)."""
        U = self.u.double().mT  # [b, g, T, i]
        if bias:
            U = torch.cat([U, torch.ones_like(U[..., :1])], -1)
        gram = U @ U.mT
        values = gram.squeeze(-1) if self.T == 1 else torch.linalg.eigvalsh(gram).clamp(min=0)
        s, top = values[..., 0].sqrt(), values[..., -1].sqrt()
        poor = s < 1e-3 * top  # the Gram matrix has lost its digits
        if self.T > 1 and bool(poor.any()):
            s[poor] = torch.linalg.svdvals(U[poor])[..., -1]
        s = torch.where(s < rank_tolerance(self.u.dtype, *U.shape[-2:]) * top, 0.0, s)
        # A bound is divided by this value, so subtract what rounding may have added.
        rounding = 4 * rank_tolerance(torch.float64, *U.shape[-2:]) * top
        s = torch.where(s > 0, s - torch.where(poor, rounding, rounding * top / s), 0.0)
        return s.clamp(min=0).amin(1)

    def untied_norms(self) -> Float[Tensor, " b"]:
        """Return upper ends of ||D^-1 C||_2, D = diag_p sqrt(||u_p||^2 + 1) (theory 4.1)."""
        scale = (self.u.double().square().sum(2) + self.layer.bias_per_position).sqrt()
        return self.layer.untied_norms(scale)


def widen_where_needed(
    calls: Sequence[Positions], sensitivities: Sequence[Float[Tensor, " b"] | None]
) -> None:
    """Continue in float64 for calls whose squares or products may leave float32.

    All calls are decided by one read, because on a device each read makes the host wait.

    Args:
        calls: the calls of a chunk.
        sensitivities: ||A||_2 of each sample, or None, for each call (see ``Positions.doubts``).
    """
    pairs = zip(calls, sensitivities, strict=True)
    narrow = [(c, s) for c, s in pairs if c.u.dtype == torch.float32]
    if not narrow:
        return
    device = narrow[0][0].u.device
    doubts = torch.stack([c.doubts(s).to(device) for c, s in narrow])
    if not unusual(doubts.any()):
        return
    for (call, _), (outside, zero) in zip(narrow, doubts.tolist(), strict=True):
        if outside or (zero and call.has_vanished()):
            call.widen()


def _column_squares(t: Float[Tensor, "b g f T"]) -> Float[Tensor, "b g T"]:
    """Return the squared norm at each position in float64, in blocks that fit the cache."""
    b, g, f, T = t.shape
    entries = tuning.BLOCK_ENTRIES
    samples, positions = max(1, entries // (g * f * T)), max(1, entries // (g * f))
    sizes = t.new_empty(b, g, T, dtype=torch.float64)
    for s in range(0, b, samples):
        for p in range(0, T, positions):
            part = t[s : s + samples, :, :, p : p + positions]
            sizes[s : s + samples, :, p : p + positions] = part.square().sum(2)
    return sizes
