"""Derivatives along a direction from differences of outputs, and the choice of their step.

A one-sided difference takes one forward pass, because f itself is known; its error is of the order
of the step. A central difference takes two, and its error is of the order of the step squared. Both
too small and too large a step give large errors, so the step is chosen by the observed error
(``forward_products``). It is one-sided if that is accurate enough, else central with the best of a
few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.capture.injection import Change, Place
from flatlens.capture.layout import Layout, split

STEP_FACTORS = (1.0, 1 / 16, 16.0, 1 / 256)  # central steps that are tried, times the usual one

Moved = tuple[Place, Tensor, Layout | None]  # where a tensor is made, its values and its samples


@dataclass(frozen=True)
class Outcome:
    """A product with its error.

    Attributes:
        w: the product of each sample.
        error: the norm of its error.
        size: an estimate of the norm of the exact product.
    """

    w: Float[Tensor, "b N"]
    error: Float[Tensor, " b"]
    size: Float[Tensor, " b"]

    @property
    def relative(self) -> Float[Tensor, " b"]:
        """The error relative to the product; 0 where both are 0."""
        size = torch.maximum(self.size, self.w.double().norm(dim=1))
        return torch.where(self.error > 0, self.error / size.clamp(min=1e-300), 0.0).nan_to_num(
            torch.inf
        )

    def best_of(self, other: Outcome) -> Outcome:
        """Take each sample from the outcome with the smaller error."""
        better = other.error.nan_to_num(torch.inf) < self.error.nan_to_num(torch.inf)
        return Outcome(
            torch.where(better[:, None], other.w, self.w),
            torch.where(better, other.error, self.error),
            self.size,
        )


@dataclass(frozen=True)
class Step:
    """The step of a difference.

    Attributes:
        central: whether outputs are taken on both sides.
        relative: length of each sample's step, relative to the norm of the tensors that are moved.
    """

    central: bool
    relative: Float[Tensor, " b"]


Judge = Callable[[Tensor], Outcome]


class Differences:
    """Products A g from differences of outputs.

    Args:
        f: the outputs, [b, N].
        eps: the relative rounding of the precision that they were computed in.
        replay: runs the network again with changed tensors.
        aim: relative error below which a one-sided difference is accurate enough.
    """

    def __init__(
        self,
        f: Float[Tensor, "b N"],
        eps: float,
        replay: Callable[[Mapping[Place, Change]], Tensor],
        aim: float,
    ) -> None:
        self.f, self.eps, self.replay, self.aim = f, eps, replay, aim
        self._steps: dict[tuple[Place, ...], Step] = {}

    def times(self, moved: Sequence[Moved], g: Sequence[Tensor], judge: Judge) -> Outcome:
        """Return A g with its error.

        Args:
            moved: the tensors with respect to which A is the derivative.
            g: a direction for each of them.
            judge: estimates the error of a product.
        """
        key = tuple(place for place, _, _ in moved)
        if key not in self._steps:
            return self._choose(key, moved, g, judge)
        return judge(self._product(moved, g, self._steps[key]))

    def _choose(
        self, key: tuple[Place, ...], moved: Sequence[Moved], g: Sequence[Tensor], judge: Judge
    ) -> Outcome:
        """Compute the first product, and remember the best step for each sample."""
        # Rounding of f grows as the step shrinks: eps^(1/2) and eps^(1/3) balance the two errors.
        usual = self.f.new_full((len(self.f),), self.eps**0.5, dtype=torch.float64)
        self._steps[key] = Step(False, usual)
        best = judge(self._product(moved, g, self._steps[key]))
        if bool((best.relative <= self.aim).all()):
            return best
        lengths = usual
        for factor in STEP_FACTORS:
            step = Step(True, torch.full_like(usual, factor * self.eps ** (1 / 3)))
            outcome = judge(self._product(moved, g, step))
            lengths = torch.where(outcome.relative < best.relative, step.relative, lengths)
            best = best.best_of(outcome)
            if bool((best.relative <= self.aim).all()):
                break
        self._steps[key] = Step(True, lengths)
        return best

    def _product(
        self, moved: Sequence[Moved], g: Sequence[Tensor], step: Step
    ) -> Float[Tensor, "b N"]:
        batch = len(self.f)
        x_norm = self._norms([(x, layout) for _, x, layout in moved])
        pairs = zip(g, moved, strict=True)
        g_norm = self._norms([(t, layout) for t, (_, _, layout) in pairs])
        entries = sum(x.numel() for _, x, _ in moved) / batch
        x_norm = torch.where(x_norm > 0, x_norm, entries**0.5)
        length = torch.where(g_norm > 0, step.relative * x_norm / g_norm, 1.0)
        ahead = self._outputs(moved, g, length)
        behind = self._outputs(moved, g, -length) if step.central else self.f
        width = (2 if step.central else 1) * length
        return ((ahead - behind).double() / width[:, None]).to(self.f)

    def _outputs(
        self, moved: Sequence[Moved], g: Sequence[Tensor], length: Float[Tensor, " b"]
    ) -> Tensor:
        changes = {
            place: partial(_add, change=times_per_sample(t, layout, length.to(t)))
            for t, (place, _, layout) in zip(g, moved, strict=True)
        }
        return self.replay(changes).detach()

    def _norms(self, tensors: Sequence[tuple[Tensor, Layout | None]]) -> Float[Tensor, " b"]:
        """Return the norm over some tensors for each sample."""
        squares = [
            split(t, layout, len(self.f)).flatten(1).double().square().sum(1)
            for t, layout in tensors
        ]
        return torch.stack(squares).sum(0).sqrt()


def times_per_sample(t: Tensor, layout: Layout | None, factors: Float[Tensor, " b"]) -> Tensor:
    """Multiply the entries of each sample by its factor."""
    scaled = t.clone()
    samples = split(scaled, layout, len(factors))  # a view of ``scaled``
    samples.mul_(factors.reshape(-1, *[1] * (samples.dim() - 1)))
    return scaled


def _add(x: Tensor, change: Tensor) -> Tensor:
    return x + change.reshape(x.shape)
