"""Factors of one parameter's gradients, and the inner products of all gradients.

A *factor* stores the gradients of one parameter for some samples and all N measured outputs, in
less memory than the gradients take. The gradient of sample i and output a has the index i N + a.
Every factor computes the Gram matrix of its gradients, K[ia, jb] = <grad f_a(x_i), grad f_b(x_j)>.

| factor | used for | gradient of sample i, output a |
|---|---|---|
| ``Products`` | weights of layers | sum_p J_iap u_ip^T over positions p |
| ``Vectors`` | biases, norm layers, parameters on the slow path | a row of a matrix |
| ``Lookups`` | embeddings | rows of df/dz, summed over the lookups of each table row |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flatlens import tuning
from flatlens.algebra.sums import out_of_range

Gram = Float[Tensor, "r r"]


def in_range(t: Tensor) -> Tensor:
    """Return the tensor, converted to float64 if products of its float32 entries may vanish."""
    narrow = t.dtype == torch.float32 and t.numel() > 0
    return t.double() if narrow and out_of_range(t.flatten(1)) else t


@dataclass(frozen=True)
class Vectors:
    """Gradients as rows of a matrix, in the order of the parameter's entries."""

    values: Float[Tensor, "r numel"]

    @property
    def count(self) -> int:
        """Number of gradients."""
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """Memory that the factor takes."""
        return self.values.nbytes

    def vectors(self) -> Float[Tensor, "r numel"]:
        """All gradients as rows."""
        return self.values

    def joins(self, other: object) -> bool:
        """Whether the two factors can become one."""
        return isinstance(other, Vectors)

    @staticmethod
    def joined(factors: Sequence[Vectors]) -> Vectors:
        """Return one factor with the gradients of all."""
        return Vectors(torch.cat([f.values for f in factors]))

    def gram(self) -> Gram:
        """Inner products of all gradients, float64."""
        block = max(1, tuning.BLOCK_ENTRIES * 8 // max(1, self.count))
        return _sum_of_squares(self.values.split(block, 1), self.count, self.values)


@dataclass(frozen=True)
class Products:
    """Gradients J u^T of the weight of a layer, in the weight-sharing format (``capture.layer``).

    ``order`` maps each entry of W as [g, o, i] to its index in the flattened parameter.
    """

    u: Float[Tensor, "b g i T"]
    J: Float[Tensor, "b g N o T"]
    order: Int[Tensor, " numel"]

    @property
    def count(self) -> int:
        """Number of gradients."""
        return self.J.shape[0] * self.J.shape[2]

    @property
    def nbytes(self) -> int:
        """Memory that the factor takes."""
        return self.u.nbytes + self.J.nbytes

    def vectors(self) -> Float[Tensor, "r numel"]:
        """All gradients as rows."""
        grads = torch.einsum("bgnot,bgit->bngoi", self.J, self.u).reshape(self.count, -1)
        vectors = torch.empty_like(grads)
        vectors[:, self.order] = grads
        return vectors

    def joins(self, other: object) -> bool:
        """Whether the two factors can become one."""
        return (
            isinstance(other, Products)
            and self.J.shape[1:] == other.J.shape[1:]
            and self.u.shape[1:] == other.u.shape[1:]
            and torch.equal(self.order, other.order)
        )

    @staticmethod
    def joined(factors: Sequence[Products]) -> Products:
        """Return one factor with the gradients of all."""
        u, J = (torch.cat(columns) for columns in zip(*((f.u, f.J) for f in factors), strict=True))
        return Products(u, J, factors[0].order)

    def gram(self) -> Gram:
        """Inner products of all gradients, float64, by the cheaper of two routes.

        <J_a u^T, J_b v^T> = sum_pq <J_ap, J_bq> <u_p, v_q>: for one position this is a product of
        two numbers. With many positions it is cheaper to form gradients, some outputs of the
        layer at a time.
        """
        _, g, N, o, T = self.J.shape
        i = self.u.shape[2]
        K = self.J.new_zeros(self.count, self.count, dtype=torch.float64)
        # In multiply-adds for a pair of gradients; 10 is the cost of a product that waits for
        # memory.
        by_pairs = T * T * (o + i / N**2 + 10) < o * i
        for group in range(g):
            J, u = self.J[:, group], self.u[:, group]
            if by_pairs or T == 1:
                _add_by_pairs(K, J, u)
            else:
                K += _sum_of_squares(_formed(J, u), self.count, J)
        return K


@dataclass(frozen=True)
class Lookups:
    """Gradients of a table: ``values`` at the rows ``indices`` that each sample looked up."""

    values: Float[Tensor, "b N T d"]
    indices: Int[Tensor, "b T"]
    entries: int  # rows of the table

    @property
    def count(self) -> int:
        """Number of gradients."""
        return self.values.shape[0] * self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory that the factor takes."""
        return self.values.nbytes + self.indices.nbytes

    def vectors(self) -> Float[Tensor, "r numel"]:
        """All gradients as rows."""
        return self._scattered(self.indices, self.entries).reshape(self.count, -1)

    def joins(self, other: object) -> bool:
        """Whether the two factors can become one."""
        return isinstance(other, Lookups) and self.values.shape[1:] == other.values.shape[1:]

    @staticmethod
    def joined(factors: Sequence[Lookups]) -> Lookups:
        """Return one factor with the gradients of all."""
        values = torch.cat([f.values for f in factors])
        indices = torch.cat([f.indices for f in factors])
        return Lookups(values, indices, factors[0].entries)

    def gram(self) -> Gram:
        """Inner products of all gradients, float64, some rows of the table at a time."""
        return _sum_of_squares(self._blocks(), self.count, self.values)

    def _blocks(self) -> Iterator[Tensor]:
        used, compact = self.indices.unique(return_inverse=True)
        width = self.values.shape[3]
        block = max(1, tuning.BLOCK_ENTRIES * 8 // (self.count * width))
        for start in range(0, len(used), block):
            size = min(block, len(used) - start)
            inside = (compact >= start) & (compact < start + size)
            places = torch.where(inside, compact - start, size)  # the last row takes the rest
            yield self._scattered(places, size + 1)[:, :, :size].reshape(self.count, -1)

    def _scattered(self, places: Int[Tensor, "b T"], size: int) -> Tensor:
        b, N, T, d = self.values.shape
        table = self.values.new_zeros(b, N, size, d)
        return table.scatter_add_(2, places[:, None, :, None].expand(b, N, T, d), self.values)


Factor = Vectors | Products | Lookups


def smaller(factor: Products) -> Products | Vectors:
    """Return the factor, or its gradients themselves if these take less memory."""
    numel = factor.order.numel()
    if factor.count * numel * factor.J.element_size() < factor.nbytes:
        return Vectors(factor.vectors())
    return factor


def gram_of(factors: Sequence[Factor]) -> Gram:
    """Return the Gram matrix of the gradients of all factors of one parameter, in their order.

    A parameter has factors of different kinds if it took the fast path for some samples and the
    slow path for others. The full gradients are then multiplied.
    """
    first_factor = factors[0]
    if len(factors) > 1 and all(first_factor.joins(f) for f in factors[1:]):
        return first_factor.joined(factors).gram()  # type: ignore[arg-type]
    if len(factors) > 1:
        return Vectors(torch.cat([f.vectors() for f in factors])).gram()
    return first_factor.gram()


def _add_by_pairs(K: Gram, J: Float[Tensor, "b N o T"], u: Float[Tensor, "b i T"]) -> None:
    """Add sum_pq <J_ap, J_bq> <u_p, u_q>, a block of samples at a time; K is symmetric."""
    b, N, o, T = J.shape
    J_rows, patches = J.permute(0, 1, 3, 2).reshape(b, N * T, o), u.mT  # [b, N T, o], [b, T, i]
    block = max(1, int((8 * tuning.BLOCK_ENTRIES) ** 0.5) // (N * T))
    for s in range(0, b, block):
        for t in range(s, b, block):
            left, right = slice(s, min(s + block, b)), slice(t, min(t + block, b))
            JJ = J_rows[left].flatten(0, 1) @ J_rows[right].flatten(0, 1).mT
            uu = patches[left].flatten(0, 1) @ patches[right].flatten(0, 1).mT
            m, k = left.stop - s, right.stop - t
            pairs = JJ.view(m, N, T, k, N, T) * uu.view(m, 1, T, k, 1, T)
            part = pairs.sum((2, 5), dtype=torch.float64).reshape(m * N, k * N)
            K[s * N : left.stop * N, t * N : right.stop * N] += part
            if t > s:
                K[t * N : right.stop * N, s * N : left.stop * N] += part.mT


def _formed(J: Float[Tensor, "b N o T"], u: Float[Tensor, "b i T"]) -> Iterator[Tensor]:
    """Yield the gradients as rows, for some outputs of the layer at a time."""
    b, N = J.shape[:2]
    block = max(1, tuning.BLOCK_ENTRIES * 8 // (b * N * u.shape[1]))
    for some in J.split(block, 2):
        grads = some.flatten(1, 2) @ u.mT  # [b, N block, i]
        yield grads.reshape(b * N, -1)


def _sum_of_squares(blocks: Iterator[Tensor] | Sequence[Tensor], count: int, like: Tensor) -> Gram:
    """Return the sum of F F^T over blocks of columns, added up in float64."""
    K = like.new_zeros(count, count, dtype=torch.float64)
    for F in blocks:
        K += F @ F.mT
    return K
