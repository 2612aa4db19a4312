"""Losses as functions of the outputs: per sample, with a root of their Hessian.

A loss takes f as [batch, N] and targets y. Its root R [batch, N, k] has R R^T = d2L/df2. The
Gauss-Newton matrix of one sample is therefore (R^T df/dtheta)^T (R^T df/dtheta). Every inequality
between df/dx and df/dtheta also holds for R^T df/dx and R^T df/dtheta (docs/theory.md, section 3).

| name | loss of one sample | Hessian |
|---|---|---|
| ``half_squared`` | 1/2 sum_k (f_k - y_k)^2 | I |
| ``squared`` | sum_k (f_k - y_k)^2 | 2 I |
| ``mean_squared`` | (1/N) sum_k (f_k - y_k)^2 | (2/N) I |
| ``cross_entropy`` | -sum_k y_k log p_k, p = softmax(f) | diag(p) - p p^T |
| ``binary_cross_entropy`` | on logits, summed over outputs, s = sigmoid(f) | diag(s (1 - s)) |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError, counted, first_line

Outputs = Float[Tensor, "b N"]


@dataclass(frozen=True)
class RootProducts:
    """Products with a root R of the Hessian of each sample's loss, [b, N, k], without R itself.

    Attributes:
        width: k, the number of columns of R.
        times: v [b, k] -> R v [b, N].
        transposed_times: w [b, N] -> R^T w [b, k].
    """

    width: int
    times: Callable[[Tensor], Tensor]
    transposed_times: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss per sample with a root of its Hessian; ``get_loss`` returns it by name."""

    name: str
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise FlatlensError(
                f"label_smoothing={self.label_smoothing} is not a share; give 0 or more, below 1"
            )

    def __call__(self, f: Outputs, y: Any) -> Float[Tensor, " b"]:
        """Return the loss of each sample."""
        raise NotImplementedError

    def root(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N k"]:
        """Return R with R R^T = the Hessian of each sample's loss with respect to its outputs."""
        raise NotImplementedError

    def root_products(self, f: Outputs, y: Any = None) -> RootProducts:
        """Return products with the root; for losses with a name they take O(N) memory."""
        R = self.root(f, y)
        return RootProducts(
            R.shape[2],
            lambda v: (R @ v[..., None]).squeeze(-1),
            lambda w: (R.mT @ w[..., None]).squeeze(-1),
        )

    def hessian(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N N"]:
        """Return the Hessian of each sample's loss with respect to its outputs."""
        R = self.root(f, y)
        return R @ R.mT

    def check_second_derivative(self, f: Outputs, y: Any) -> None:
        """Refuse a wrong second derivative; the losses with a name have a right one."""

    def targets(self, y: Any, N: int, like: Outputs) -> Outputs:
        """Return one target value per output: class indices become one-hot, values stay."""
        return targets(y, N, like)


def targets(y: Any, N: int, like: Outputs) -> Outputs:
    """Return targets with one value per output; integers are classes where N > 1.

    Args:
        y: class indices, or one value per output.
        N: number of outputs.
        like: outputs [n, N], whose dtype and device the targets take.

    Raises:
        FlatlensError: if y does not have one target per sample, or a class that does not exist.

    >>> targets([1, 0], 2, torch.zeros(2, 2))
    tensor([[0., 1.],
            [1., 0.]])
    """
    y, n = as_tensor(y, like.device), len(like)
    if y.dim() == 0 or len(y) != n:
        entries = 1 if y.dim() == 0 else len(y)
        raise FlatlensError(
            f"y has {counted(entries, 'entry')} for {counted(n, 'sample')}; give one target "
            "a sample"
        )
    whole = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    if whole and y.numel() == n and N > 1:
        labels = y.reshape(n).long()
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= N:
            raise FlatlensError(
                f"y has the class {high if low >= 0 else low}, "
                f"but the network has the outputs 0 to {N - 1}"
            )
        return F.one_hot(labels, N).to(like.dtype)
    if y.numel() != n * N:
        raise FlatlensError(
            f"y has shape {tuple(y.shape)} for {counted(n, 'sample')} of "
            f"{counted(N, 'output')}; give class indices or one value per output"
        )
    return y.reshape(n, N).to(like.dtype)


def as_tensor(y: Any, device: torch.device | str) -> Tensor:
    """Return y as a tensor on ``device``, whatever the default device is."""
    y = y.detach() if isinstance(y, Tensor) else torch.as_tensor(y, device="cpu")
    return y.to(device)


FACTORS: dict[str, Callable[[int], float]] = {
    "half_squared": lambda N: 0.5,
    "squared": lambda N: 1.0,
    "mean_squared": lambda N: 1 / N,
}


class Squared(Loss):
    """A multiple of the squared error: the paper's 1/2 sum, the sum, or the mean over outputs."""

    def __call__(self, f: Outputs, y: Any) -> Float[Tensor, " b"]:
        N = f.shape[1]
        return FACTORS[self.name](N) * (f - self.targets(y, N, f)).square().sum(1)

    def root(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N k"]:
        N = f.shape[1]
        return (2 * FACTORS[self.name](N)) ** 0.5 * self._identity(f)

    def root_products(self, f: Outputs, y: Any = None) -> RootProducts:
        factor = (2 * FACTORS[self.name](f.shape[1])) ** 0.5
        return RootProducts(f.shape[1], lambda v: factor * v, lambda w: factor * w)

    def hessian(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N N"]:
        return 2 * FACTORS[self.name](f.shape[1]) * self._identity(f)

    def _identity(self, f: Outputs) -> Float[Tensor, "b N N"]:
        return torch.eye(f.shape[1], dtype=f.dtype, device=f.device).expand(len(f), -1, -1)


class CrossEntropy(Loss):
    """Cross-entropy of classes or probabilities y against softmax(f), with label smoothing.

    >>> loss = get_loss("cross_entropy:0.1")
    >>> R = loss.root(torch.zeros(1, 2))
    >>> R @ R.mT  # diag(p) - p p^T
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]])
    """

    def targets(self, y: Any, N: int, like: Outputs) -> Outputs:
        if N < 2:
            raise FlatlensError("cross_entropy needs two outputs; use binary_cross_entropy for one")
        t = targets(y, N, like)
        if bool((t < 0).any()) or bool(((t.sum(1) - 1).abs() > 1e-3).any()):
            raise FlatlensError("cross_entropy needs classes or probabilities that sum to 1 as y")
        return (1 - self.label_smoothing) * t + self.label_smoothing / N

    def __call__(self, f: Outputs, y: Any) -> Float[Tensor, " b"]:
        return -(self.targets(y, f.shape[1], f) * f.log_softmax(1)).sum(1)

    def root(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N k"]:
        # R = diag(sqrt p) - p sqrt(p)^T, on the diagonal sqrt(p) (1 - p)
        p, rest = self._probabilities(f)
        R = -p.unsqueeze(2) * p.sqrt().unsqueeze(1)
        return R.diagonal_scatter(p.sqrt() * rest, dim1=1, dim2=2)

    def root_products(self, f: Outputs, y: Any = None) -> RootProducts:
        p, rest = self._probabilities(f)
        roots, top = p.sqrt(), p.argmax(1, keepdim=True)

        def others(terms: Outputs) -> Outputs:
            # The sum over all other classes. For the likeliest class it may be far below that
            # class's own term, so it is not computed as a difference.
            without = terms.scatter(1, top, 0.0).sum(1, keepdim=True)
            return (terms.sum(1, keepdim=True) - terms).scatter(1, top, without)

        return RootProducts(
            f.shape[1],
            lambda v: roots * rest * v - p * others(roots * v),
            lambda w: roots * (rest * w - others(p * w)),
        )

    def hessian(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N N"]:
        p, rest = self._probabilities(f)
        return (-p.unsqueeze(2) * p.unsqueeze(1)).diagonal_scatter(p * rest, dim1=1, dim2=2)

    def _probabilities(self, f: Outputs) -> tuple[Outputs, Outputs]:
        """Return p and 1 - p.

        1 - p of the likeliest class may be far below the rounding of 1, so it is computed as the
        sum of the other probabilities.
        """
        p = f.detach().softmax(1)
        top = p.argmax(1, keepdim=True)
        return p, (1 - p).scatter(1, top, p.scatter(1, top, 0.0).sum(1, keepdim=True))


class BinaryCrossEntropy(Loss):
    """Binary cross-entropy of each output, on logits, summed over outputs.

    ``label_smoothing`` s makes targets y (1 - s) + s / 2.
    """

    def targets(self, y: Any, N: int, like: Outputs) -> Outputs:
        t = targets(y, N, like)
        if bool((t < 0).any()) or bool((t > 1).any()):
            raise FlatlensError("binary_cross_entropy needs classes or values from 0 to 1 as y")
        return (1 - self.label_smoothing) * t + self.label_smoothing / 2

    def __call__(self, f: Outputs, y: Any) -> Float[Tensor, " b"]:
        t = self.targets(y, f.shape[1], f)
        return F.binary_cross_entropy_with_logits(f, t, reduction="none").sum(1)

    def root(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N k"]:
        return self.hessian(f).sqrt()

    def root_products(self, f: Outputs, y: Any = None) -> RootProducts:
        f = f.detach()
        factor = (f.sigmoid() * (-f).sigmoid()).sqrt()
        return RootProducts(f.shape[1], lambda v: factor * v, lambda w: factor * w)

    def hessian(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N N"]:
        f = f.detach()
        return torch.diag_embed(f.sigmoid() * (-f).sigmoid())


@dataclass(frozen=True)
class Custom(Loss):
    """A loss from any function of f [b, N] and y [b, ...] that returns [b] losses or one number.

    The losses are averaged over samples, each counted once. A function that returns one number is
    called sample by sample, so that a mean and a sum give the same loss. It is refused if it is
    neither a mean nor a sum, as with class weights, ignored targets or losses that compare samples.
    """

    function: Callable[[Tensor, Any], Tensor] = lambda f, y: f.new_zeros(len(f))
    # f and y of an earlier sample: a batch of one does not show how the function averages
    earlier: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, f: Outputs, y: Any) -> Float[Tensor, " b"]:
        y = as_tensor(y, f.device)
        if y.dim() == 0 or len(y) != len(f):
            raise FlatlensError(f"y does not have one entry for each of the {len(f)} samples")
        values = self._of(f, y)
        if isinstance(values, Tensor) and not values.is_floating_point():
            raise FlatlensError(
                f"the loss {self.name} returns values of {values.dtype}; return floating-point "
                "numbers"
            )
        if isinstance(values, Tensor) and f.requires_grad and not values.requires_grad:
            raise FlatlensError(
                f"the loss {self.name} has no derivative with respect to the outputs (a detach, "
                "an argmax?); give one that can be differentiated"
            )
        if isinstance(values, Tensor) and values.shape in (f.shape[:1], (len(f), 1)):
            return values.reshape(-1)
        if isinstance(values, Tensor) and values.numel() == 1:
            each = values.reshape(1) if len(f) == 1 else self._each(f, y)
            self._check(f.detach(), y, values.detach(), each.detach())
            return each
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise FlatlensError(
            f"the loss returns {shape} for {counted(len(f), 'sample')}; return one "
            "loss per sample or the mean"
        )

    def _of(self, f: Tensor, y: Tensor) -> Any:
        """Call the function, with a module's own tensors (class weights) in the precision of f."""
        if isinstance(self.function, nn.Module):
            own = {**dict(self.function.named_parameters()), **dict(self.function.named_buffers())}
            cast = {k: t.to(f) for k, t in own.items() if t.is_floating_point()}
            if any(cast[k] is not own[k] for k in cast):
                return self._called(torch.func.functional_call, self.function, cast, (f, y))
        return self._called(self.function, f, y)

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the user's function; if it fails, say that it was the loss."""
        try:
            return function(*arguments)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            if isinstance(error, (FlatlensError, torch.OutOfMemoryError)):
                raise
            raise FlatlensError(f"the loss {self.name} fails: {first_line(error)}") from error

    def _each(self, f: Tensor, y: Tensor) -> Tensor:
        samples = [slice(i, i + 1) for i in range(len(f))]
        return torch.stack([self._of(f[i], y[i]).reshape(()) for i in samples])

    @torch.no_grad()
    def _check(self, f: Tensor, y: Tensor, whole: Tensor, each: Tensor) -> None:
        """Raise if a number for a batch is neither the mean nor the sum, up to rounding."""
        row = [f[:1], y[:1]]
        if [t.shape for t in self.earlier] == [t.shape for t in row]:
            row = [old.to(new) for old, new in zip(self.earlier, row, strict=True)]
            each = torch.cat([each, self._each(*row)])
            whole = self._of(torch.cat([f, row[0]]), torch.cat([y, row[1]]))
        rtol = torch.finfo(each.dtype).eps ** 0.5
        sums = torch.stack([each.sum(), each.mean()])
        room = rtol * torch.stack([each.abs().sum(), each.abs().mean()])
        same = (whole == sums) | (whole.isnan() & sums.isnan()) | ((whole - sums).abs() <= room)
        if not bool(same.any()):
            raise FlatlensError(
                "the loss returns one number for a batch that is neither the mean nor the sum over "
                'its samples (class weights, ignored targets?); give it with reduction="none", '
                "whose values are averaged over all samples"
            )
        self.earlier[:] = [t.clone() for t in row]

    def hessian(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N N"]:
        y = as_tensor(y, f.device)
        self.check_second_derivative(f[:1], y[:1])
        with torch.enable_grad():
            H = torch.stack([self._hessian_of(f[i].detach(), y[i : i + 1]) for i in range(len(f))])
        if not bool(H.isfinite().all()):
            raise FlatlensError(
                f"the second derivative of the loss {self.name} by the outputs of a sample is not "
                "finite; give a loss that is smooth there"
            )
        return H

    def _hessian_of(self, f: Float[Tensor, " N"], y: Tensor) -> Float[Tensor, "N N"]:
        try:
            return torch.autograd.functional.hessian(lambda v: self(v.unsqueeze(0), y).sum(), f)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise FlatlensError(
                f"the loss {self.name} has no second derivative with respect to the outputs "
                f"({first_line(error)}); give one that has"
            ) from error

    def check_second_derivative(self, f: Outputs, y: Any) -> None:
        """Refuse a second derivative that differs from differences of the first one, at one sample.

        Autograd takes what a backward pass of one's own does not differentiate for a constant.
        Differences of two step sizes must agree with one another: they do not at a kink.
        """
        f = f.detach()
        v = torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).to(f)
        step = torch.finfo(f.dtype).eps ** 0.25 * max(1.0, float(f.abs().max()))

        def slope(at: Tensor) -> Tensor:
            with torch.enable_grad():
                at = at.requires_grad_()
                return torch.autograd.grad(self(at, y).sum(), at)[0]

        def difference(h: float) -> Tensor:
            return (slope(f + h * v) - slope(f - h * v)) / (2 * h)

        half, whole = difference(step / 2), difference(step)
        size = float(half.norm())
        if not float((half - whole).norm()) < 0.05 * size:
            return
        if float((half[0] - self._hessian_of(f[0], y) @ v[0]).norm()) > 0.5 * size:
            raise FlatlensError(
                f"the second derivative of the loss {self.name} by the outputs is wrong: its first "
                "derivative changes otherwise (a backward pass of one's own?); give a loss that "
                "can be differentiated twice"
            )

    def root(self, f: Outputs, y: Any = None) -> Float[Tensor, "b N k"]:
        values, vectors = torch.linalg.eigh(self.hessian(f.detach().double(), y).double())
        # Largest rounding of a zero: of the largest eigenvalue, and of probabilities next to 1.
        eps = torch.finfo(torch.float64).eps
        rounding = eps**0.5 * values.abs().amax(1, keepdim=True) + 64 * eps
        if bool((values < -rounding).any()):
            raise FlatlensError(
                "the loss is not convex in the outputs, so that its Hessian has no root and there "
                "is no Gauss-Newton matrix; use the Hessian itself (hessian_trace)"
            )
        return (vectors * values.clamp(min=0).sqrt().unsqueeze(1)).to(f.dtype)


LOSSES: dict[str, type[Loss]] = {
    **dict.fromkeys(FACTORS, Squared),
    "cross_entropy": CrossEntropy,
    "binary_cross_entropy": BinaryCrossEntropy,
}


@no_type_check
def get_loss(spec: str | Loss | Callable[..., Any], *, label_smoothing: float = 0.0) -> Loss:
    """Return the loss with a name, or wrap a function as a loss.

    Args:
        spec: a name of the table above, a name with its label smoothing such as
            "cross_entropy:0.1", a Loss, or a function of outputs [b, N] and targets.
        label_smoothing: share of each target that is spread over all classes.

    Returns:
        The loss.

    Raises:
        FlatlensError: if the loss is unknown or takes no label smoothing.

    >>> get_loss("half_squared")(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    tensor([12.5000])
    >>> get_loss("cross_entropy:0.1") == get_loss("cross_entropy", label_smoothing=0.1)
    True
    """
    if isinstance(spec, Loss):
        return spec
    if not isinstance(spec, str):
        if not callable(spec):
            raise FlatlensError(
                f"loss is a value of type {type(spec).__name__}; give a name, one of "
                f"{', '.join(LOSSES)}, or a function (f, y)"
            )
        return Custom(getattr(spec, "__name__", type(spec).__name__), function=spec)
    name, colon, share = spec.partition(":")
    kind = LOSSES.get(name)
    if kind is None:
        raise FlatlensError(
            f"loss {name!r} is unknown; choose from {', '.join(LOSSES)}, or give a function (f, y)"
        )
    try:
        smoothing = float(share) if colon else label_smoothing
    except ValueError:
        raise FlatlensError(
            f"{share!r} in loss={spec!r} is not a label smoothing; give a number"
        ) from None
    if smoothing and kind is Squared:
        raise FlatlensError(f"{name} takes no label smoothing; leave it out or at 0")
    return kind(name, smoothing)
