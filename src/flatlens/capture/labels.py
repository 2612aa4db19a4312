"""Labels of the dimensions of a product, as in an einsum: equal labels belong together.

A product z = W x is described by three tuples of labels, one label for each dimension of x, W and
z. A dimension of the weight is one of three:

| dimension | who else has its label | meaning                   |
| --------- | ---------------------- | ------------------------- |
| *group*   | x and z                | one matrix for each group |
| *inner*   | x only                 | it is summed over         |
| *outer*   | z only                 | an output feature         |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

Labels = tuple[int, ...]


@dataclass(frozen=True)
class Dimensions:
    """The labels of a product's dimensions.

    Attributes:
        x: labels of the input's dimensions.
        w: labels of the weight's dimensions.
        z: labels of the output's dimensions.
    """

    x: Labels
    w: Labels
    z: Labels

    @cached_property
    def groups(self) -> Labels:
        """Labels of all three, in the order of the weight."""
        return tuple(d for d in self.w if d in self.x and d in self.z)

    @cached_property
    def inner(self) -> Labels:
        """Labels that are summed over, in the order of the input."""
        return tuple(d for d in self.x if d in self.w and d not in self.z)

    @cached_property
    def outer(self) -> Labels:
        """Labels that the weight brings in, in the order of the output."""
        return tuple(d for d in self.z if d in self.w and d not in self.x)

    @cached_property
    def free(self) -> Labels:
        """Labels that the weight does not have, in the order of the input: positions."""
        return tuple(d for d in self.x if d not in self.w)

    @property
    def plain(self) -> bool:
        """Whether W is a matrix that acts on the last dimension, as in ``F.linear``."""
        one_each = len(self.w) == 2 and len(self.inner) == len(self.outer) == 1
        return one_each and self.x == self.free + self.inner and self.z == self.free + self.outer

    def fitting(self, x: tuple[int, ...], w: tuple[int, ...]) -> Dimensions | None:
        """Give each dimension of size 1 that is broadcast a label of its own.

        Args:
            x: shape of the input.
            w: shape of the weight.

        Returns:
            The labels, or None if W x is no product: nothing is summed over, a label occurs twice,
            or one operand alone is summed.
        """
        sides = (self.x, self.w, self.z)
        if any(len(set(side)) < len(side) for side in sides):
            return None
        sizes_x, sizes_w = dict(zip(self.x, x, strict=True)), dict(zip(self.w, w, strict=True))
        fresh = max((*self.x, *self.w, *self.z), default=0) + 1
        fitted = self
        for label in self.x:
            if label not in sizes_w or (label not in self.z and sizes_x[label] == sizes_w[label]):
                continue
            if label in self.z and sizes_w[label] == 1:
                fitted = replace(fitted, w=_renamed(fitted.w, label, fresh))
            elif label in self.z and sizes_x[label] == 1:
                fitted = replace(fitted, x=_renamed(fitted.x, label, fresh))
            elif sizes_x[label] != sizes_w[label]:
                return None
            fresh += 1
        used = {*fitted.z, *fitted.inner}
        alone = [s for d, s in zip(fitted.x, x, strict=True) if d not in used]
        alone += [s for d, s in zip(fitted.w, w, strict=True) if d not in used]
        return None if not fitted.inner or any(s > 1 for s in alone) else fitted


def _renamed(labels: Labels, old: int, new: int) -> Labels:
    return tuple(new if label == old else label for label in labels)


def matmul_labels(a: int, b: int) -> tuple[Labels, Labels, Labels]:
    """Return the labels of a @ b, given the number of dimensions of a and of b.

    >>> matmul_labels(3, 2)
    ((3, 0, 1), (1, 2), (3, 0, 2))
    """
    row, summed, column = 0, 1, 2
    batch = tuple(range(3, 1 + max(a, b, 2)))
    left = (row, summed) if a > 1 else (summed,)
    right = (summed, column) if b > 1 else (summed,)
    left = (*batch[len(batch) - max(a - 2, 0) :], *left)
    right = (*batch[len(batch) - max(b - 2, 0) :], *right)
    result = (*batch, *((row,) if a > 1 else ()), *((column,) if b > 1 else ()))
    return left, right, result


def einsum_labels(equation: str, dims: tuple[int, ...]) -> tuple[list[Labels], Labels] | None:
    """Return the labels of the operands and of the result of an einsum.

    None is returned for an equation that cannot be parsed.

    Args:
        equation: the equation in letters, with or without an ellipsis and an arrow.
        dims: number of dimensions of each operand.

    >>> einsum_labels("ni,oi->no", (2, 2))
    ([(110, 105), (111, 105)], (110, 111))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(dims):
        return None
    spread = max(
        (d - len(t.replace("...", "")) for t, d in zip(terms, dims, strict=True) if "..." in t),
        default=0,
    )
    if not arrow:
        letters = sorted({c for t in terms for c in t if c != "." and left.count(c) == 1})
        right = ("..." if "..." in left else "") + "".join(letters)
    operands = []
    for term, count in zip(terms, dims, strict=True):
        labels = _spelt(term, count - len(term.replace("...", "")), spread)
        if len(labels) != count:
            return None
        operands.append(labels)
    return operands, _spelt(right, spread, spread)


def _spelt(term: str, count: int, spread: int) -> Labels:
    """Return the labels of one term; the last ``count`` of ``spread`` stand for its ellipsis."""
    before, dots, after = term.partition("...")
    ellipsis = tuple(range(1000 + spread - count, 1000 + spread)) if dots else ()
    return (*map(ord, before), *ellipsis, *map(ord, after))
