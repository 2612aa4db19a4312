"""Products A g with the Jacobian of a chunk; Lanczos needs them and the gradients A^T v.

There are three ways, and the first that the network allows is taken:

1. **second derivative**: A^T v is linear in v, and its derivative with respect to v along g is A g.
   The network needs second derivatives.
2. **forward mode**: the network runs again with dual numbers. Its operations need forward mode.
3. **differences**: the network runs again with its inputs, or the inputs of a layer, moved along g.
   This needs only the forward pass, but has an error.

Products of the last two ways are compared with gradients. For a random direction r of +-1,
r . (A g) = (A^T r) . g, and the right side is known without error from one backward pass. The mean
square of the difference over r is the squared error of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from flatlens.algebra.looks import unusual
from flatlens.capture.injection import Change, Place, place_of
from flatlens.capture.layout import Layout, split
from flatlens.errors import FlatlensError, first_line
from flatlens.passes.derivative_rows import Setup
from flatlens.passes.difference_steps import Differences, Outcome
from flatlens.passes.directions import Signs

CHECKS = 3  # random directions that products are compared along
CHECK_SEED = 20230
REFUSED = 0.1  # from this relative error on, a product does not agree with autograd's derivative


class ProductsDisagreeError(FlatlensError):
    """No way to take products with the Jacobian agrees with gradients."""


Replay = Callable[[Mapping[Place, Change]], Tensor]  # runs the network again and returns f


@dataclass(frozen=True)
class Way:
    """A way to compute products with the Jacobian.

    Attributes:
        name: the way.
        why: why no better way was possible; "" for second derivatives.
    """

    name: Literal["second derivative", "forward mode", "differences"] = "second derivative"
    why: str = ""

    @property
    def note(self) -> str:
        """A sentence for the user, or "" for second derivatives."""
        if self.name == "second derivative":
            return ""
        error = "; mls_se and the other errors include theirs" if self.name == "differences" else ""
        return f"products of Lanczos by {self.name}{error} ({self.why})"


@dataclass(frozen=True)
class Target:
    """The tensor at an edge: where a forward pass makes it, and its values.

    Attributes:
        place: where it is made.
        x: values of the tensor.
        layout: where the tensor keeps its samples.
    """

    place: Place
    x: Tensor
    layout: Layout | None


def targets(setup: Setup) -> dict[int, Target]:
    """Return the tensors at the edges of the network's input and of the layers' inputs."""
    forward, plan = setup.forward, setup.plan
    start, calls = forward.first_node, forward.recording.calls
    by_value = len(forward.edges) - len(forward.recording.embedded)
    places = {}
    for j, k in enumerate(plan.inputs):
        place = Place("embedding", j - by_value)
        places[k] = (place_of(forward.edges[j], start) if j < by_value else place, forward.fed[j])
    constants = [call.through.node for call in calls if call.total is None]
    for call, q in zip(plan.calls, plan.layers, strict=False):  # empty if no layer is asked for
        if call.total is None:
            place = through = Place("constant", constants.index(call.through.node))
        else:
            place, through = place_of(call.total, start), place_of(call.through, start)
        # A tensor that nothing else reads is changed at the layer.
        places.setdefault(q.total, (through if q.total == q.through else place, call.x))
        places.setdefault(q.through, (through, call.x))
    return {k: Target(*places[k], plan.kept_rows[k][0]) for k in places if k >= 0}


class SecondDerivative:
    """Products A g as the derivative of A^T v0 with respect to v0 along g."""

    def __init__(self, setup: Setup, v0: Float[Tensor, "b N"], wanted: Sequence[int]) -> None:
        self.v0 = v0.requires_grad_()
        edges = [setup.plan.edges[k] for k in wanted]
        with torch.enable_grad():
            grads = torch.autograd.grad(
                setup.f, edges, self.v0, create_graph=True, allow_unused=True
            )
        self.backs = dict(zip(wanted, grads, strict=True))

    def alive(self, k: int) -> bool:
        """Whether the outputs depend on the tensor at an edge."""
        back = self.backs[k]
        return back is not None and back.requires_grad

    def times(self, numbers: Sequence[int], g: Sequence[Tensor]) -> Float[Tensor, "b N"]:
        """Return A g."""
        backs = [back for k in numbers if (back := self.backs[k]) is not None]
        return torch.autograd.grad(backs, self.v0, g, retain_graph=True)[0]


class AdjointCheck:
    """The comparison of products A g with gradients A^T r along random directions r of +-1."""

    def __init__(self, setup: Setup, signs: Signs, tensors: Mapping[int, Target]) -> None:
        generator = torch.Generator().manual_seed(CHECK_SEED)
        drawn = torch.randint(0, 2, (CHECKS, signs.width), generator=generator, device="cpu")
        edges = [setup.plan.edges[k] for k in tensors]
        self.batch, self.tensors = setup.batch, tensors
        self.directions, self.gradients = [], []
        for r in 2 * drawn.to(setup.f) - 1:
            direction = signs.to_outputs(r.expand(self.batch, -1)).contiguous()
            grads = torch.autograd.grad(
                setup.f, edges, direction, retain_graph=True, allow_unused=True
            )
            self.directions.append(direction)
            detached = (None if grad is None else grad.detach() for grad in grads)
            self.gradients.append(dict(zip(tensors, detached, strict=True)))

    def alive(self, k: int) -> bool:
        """Whether the outputs depend on the tensor at an edge."""
        return self.gradients[0][k] is not None

    def __call__(
        self, numbers: Sequence[int], g: Sequence[Tensor], w: Float[Tensor, "b N"]
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        """Estimate the norm of the error of w = A g, and the norm of A g, for each sample."""
        errors, sizes = [], []
        for direction, grads in zip(self.directions, self.gradients, strict=True):
            known = sum(
                self._product(k, back, t)
                for k, t in zip(numbers, g, strict=True)
                if (back := grads[k]) is not None
            )
            errors.append((direction.double() * w.double()).sum(1) - known)
            sizes.append(torch.as_tensor(known).expand_as(errors[-1]))
        error, size = (torch.stack(t).square().mean(0).sqrt() for t in (errors, sizes))
        return error, size

    def _product(self, k: int, a: Tensor, b: Tensor) -> Float[Tensor, " b"]:
        layout = self.tensors[k].layout
        a, b = (split(t, layout, self.batch).flatten(1).double() for t in (a, b))
        return (a * b).sum(1)


class ForwardProducts:
    """The products A g of one chunk, by the first way that the network allows.

    Args:
        setup: the chunk.
        signs: the directions of its samples.
        replay: runs the network on the chunk again.
        wanted: indices of the edges at which products are needed.
        way: the way to try first.
        tolerance: tolerance of Lanczos; differences aim at a fifth of it.

    Attributes:
        way: the way of the last product.
    """

    def __init__(
        self,
        setup: Setup,
        signs: Signs,
        replay: Replay,
        wanted: Sequence[int],
        way: Way,
        tolerance: float,
    ) -> None:
        self.setup, self.signs, self.replay, self.way = setup, signs, replay, way
        self.aim = 0.2 * tolerance  # the squared errors of about ten products add up
        self._rounding = rounding_of_products(setup.forward.precision)
        self._second: SecondDerivative | None = None
        self._check: AdjointCheck | None = None
        self._differences: Differences | None = None
        self._tensors: dict[int, Target] = {}
        v0 = signs.to_outputs(signs.next())
        if way.name == "second derivative":
            try:
                self._second = SecondDerivative(setup, v0, wanted)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._without_second(error)
        else:
            self._prepare()

    def alive(self, k: int) -> bool:
        """Whether the outputs depend on the tensor at an edge."""
        if self._second is not None:
            return self._second.alive(k)
        assert self._check is not None
        return self._check.alive(k)

    def times(
        self, numbers: Sequence[int], g: Sequence[Tensor]
    ) -> tuple[Float[Tensor, "b N"], Float[Tensor, " b"] | None]:
        """Return A g and the norm of its error for each sample, or None if the error is rounding.

        Args:
            numbers: the indices of the edges.
            g: a tensor for each edge.
        """
        if self._second is not None:
            try:
                return self._second.times(numbers, g), None
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._without_second(error)
        if self.way.name == "forward mode":
            try:
                return self._by_forward_mode(numbers, g)
            except FlatlensError as error:
                self.way = Way("differences", f"{self.way.why}; {first_line(error)}")
        return self._by_differences(numbers, g)

    def second_derivative_agrees(self, v: Tensor, w: Tensor, energy: Float[Tensor, " b"]) -> bool:
        """Check that v . (A A^T v) is ||A^T v||^2; if not, use the next way from now on.

        A function that can be differentiated only once (``once_differentiable``) silently drops out
        of a second derivative if other paths lead around it.

        Args:
            v: a direction of the outputs for each sample.
            w: A A^T v by second derivatives.
            energy: ||A^T v||^2.
        """
        wide_v, wide_w = v.double(), w.double()
        difference = ((wide_v * wide_w).sum(1) - energy).abs()
        size = torch.maximum(energy, wide_v.norm(dim=1) * wide_w.norm(dim=1))
        if not unusual((difference > self._rounding * size).any()):
            return True
        self._without_second("it does not agree with gradients")
        return False

    def _without_second(self, error: RuntimeError | str) -> None:
        reason = error if isinstance(error, str) else first_line(error)
        if "not have been used in the graph" in reason:  # torch's message then
            reason = "a function can be differentiated once"
        self.way = Way("forward mode", f"no second derivative: {reason}")
        self._second = None
        self._prepare()

    def _prepare(self) -> None:
        self._tensors = targets(self.setup)
        self._check = AdjointCheck(self.setup, self.signs, self._tensors)

    def _by_forward_mode(
        self, numbers: Sequence[int], g: Sequence[Tensor]
    ) -> tuple[Float[Tensor, "b N"], Float[Tensor, " b"]]:
        with forward_ad.dual_level():
            changes = {
                self._tensors[k].place: partial(_as_dual, tangent=t)
                for k, t in zip(numbers, g, strict=True)
            }
            f, tangent = forward_ad.unpack_dual(self.replay(changes))
            w = torch.zeros_like(f) if tangent is None else tangent
            w = w.detach().clone()
        assert self._check is not None
        error, size = self._check(numbers, g, w)
        limit = self._rounding * torch.maximum(size, w.double().norm(dim=1))
        if unusual((error > limit).any()):
            raise FlatlensError("forward mode does not agree with gradients")
        return w, error

    def _by_differences(
        self, numbers: Sequence[int], g: Sequence[Tensor]
    ) -> tuple[Float[Tensor, "b N"], Float[Tensor, " b"]]:
        if self._differences is None:
            eps = torch.finfo(self.setup.forward.precision).eps
            self._differences = Differences(self.setup.f.detach(), eps, self.replay, self.aim)
        check = self._check
        assert check is not None
        tensors = [self._tensors[k] for k in numbers]
        places = [(t.place, t.x, t.layout) for t in tensors]

        def judge(w: Tensor) -> Outcome:
            return Outcome(w, *check(numbers, g, w))

        outcome = self._differences.times(places, g, judge)
        poor = outcome.relative > REFUSED
        if bool(poor.any()):
            sample = self.setup.forward.start + int(poor.nonzero()[0])
            raise ProductsDisagreeError(
                "Lanczos needs products with the Jacobian that this network does not give "
                f"({self.way.why}), and differences of the outputs of sample {sample} do not "
                'agree with its gradients; use method="exact"'
            )
        return outcome.w, outcome.error


def rounding_of_products(dtype: torch.dtype) -> float:
    """Return the largest relative difference of two exact products that rounding can cause."""
    limits = torch.finfo(dtype)
    return {64: 1e-8, 32: 1e-3}.get(limits.bits, 16 * limits.eps)


def _as_dual(x: Tensor, tangent: Tensor) -> Tensor:
    tangent = tangent.reshape(x.shape).clone()  # in-place operations would change it
    return forward_ad.make_dual(x, tangent)
