"""What every trap is built from: a Case, a Net written as a plain function, and the two tables."""

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Case:
    """A model, its samples, and the output that is meant."""

    model: nn.Module
    x: Any
    output: Any = None

    def unwrapped(self) -> nn.Module:
        """What torch.compile or DataParallel wraps."""
        return getattr(self.model, "_orig_mod", getattr(self.model, "module", self.model))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Any:
        """`change` of every tensor of x."""
        return pytree.tree_map(change, self.x)

    def sample(self, i: int) -> Any:
        """Sample i as a batch of one."""
        return self.mapped(lambda t: t[i : i + 1])

    def run(self, model: nn.Module) -> Tensor:
        """The selected output of `model` at x."""
        x = self.mapped(torch.clone)
        out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
        if self.output is None:
            return out
        if self.output == "*":
            return torch.cat([t.flatten(1) for t in pytree.tree_leaves(out)], 1)
        return self.output(out) if callable(self.output) else out[self.output]

    def float32(self) -> "Case":
        """The same case in single precision (a copy)."""
        model = copy.deepcopy(self.model).float()
        return replace(
            self, model=model, x=self.mapped(lambda t: t.float() if t.is_floating_point() else t)
        )


ZOO: dict[str, Callable[[], Case]] = {}
UNEVEN: dict[str, Callable[[], Case]] = {}  # samples that do not make the same calls


def enter(build: Callable[[], Case], into: dict[str, Callable[[], Case]]) -> Callable[[], Case]:
    """Enter a constructor into the zoo: it builds in float64, from a seed of its own."""

    def seeded() -> Case:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(zlib.crc32(build.__name__.encode()))
                return build()
        finally:
            torch.set_default_dtype(before)

    into[build.__name__] = seeded
    return seeded


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    return enter(build, ZOO)


def uneven(build: Callable[[], Case]) -> Callable[[], Case]:
    return enter(build, UNEVEN)


class Net(nn.Module):
    """Modules and parameters by keyword; `run(self, *inputs)` is the forward."""

    def __init__(self, run: Callable[..., Any], **parts: Any):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Once(torch.autograd.Function):
    """tanh that can be differentiated once."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


def shaken(model: nn.Module) -> nn.Module:
    """Every parameter and running statistic moved off its special initial value (ones, zeros)."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn_like(buffer))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand_like(buffer))
    return model


def made(model: nn.Module, *shape: int, **options: Any) -> Case:
    """A case on normal inputs of this shape (n first), with a shaken model."""
    return Case(shaken(model), torch.randn(*shape), **options)


def frozen(part: nn.Module | nn.Parameter) -> Any:
    return part.requires_grad_(False)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def conv_case(conv: nn.Module, *shape: int, outputs: int = 3, **options: Any) -> Case:
    """conv, tanh, flatten, linear."""
    size = conv(torch.zeros(1, *shape)).numel()
    return made(
        nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(size, outputs)), 3, *shape, **options
    )
