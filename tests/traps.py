"""Tiny networks, each named after the trap it holds.

`ZOO[name]()` builds a fresh Case: float64, a seed of its own, three samples or so. A network is a
`Net`: parts by keyword and a forward written as a plain function, so that one reads the trap.
"""

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


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
        if isinstance(self.x, dict):
            return {key: change(value) for key, value in self.x.items()}
        return (
            tuple(change(value) for value in self.x)
            if isinstance(self.x, tuple)
            else change(self.x)
        )

    def sample(self, i: int) -> Any:
        """Sample i as a batch of one."""
        return self.mapped(lambda t: t[i : i + 1])

    def run(self, model: nn.Module) -> Tensor:
        """The selected output of `model` at x."""
        x = self.mapped(torch.clone)
        out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
        if self.output is None:
            return out
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


# -- in place ------------------------------------------------------------------


@case
def plain_mlp():
    return made(
        nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), 4, 5
    )


@case
def inplace_relu():
    return made(nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), 3, 5)


@case
def inplace_relu_on_a_view_of_token_outputs():
    return made(
        Net(
            lambda s, x: s.b(F.relu(s.a(x), inplace=True)).mean(1),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 3),
        ),
        3,
        2,
        3,
    )


@case
def inplace_relu_after_conv():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 3))
    return made(net, 3, 1, 3, 3)


@case
def inplace_add_on_the_input_of_a_frozen_layer():
    def run(s, x):
        h = torch.sin(s.a(x))
        z = s.b(h)  # b is frozen, so autograd does not keep h and allows the next line
        h += 1.0
        return z + s.c(h)

    return made(Net(run, a=nn.Linear(4, 4), b=frozen(nn.Linear(4, 3)), c=nn.Linear(4, 3)), 3, 4)


@case
def inplace_scale_of_tokens_that_a_frozen_layer_read():
    def run(s, x):
        h = s.a(x)  # 3-d: h is a view
        z = s.b(h)
        h *= 2.0
        return (z + h).sum(1)

    return made(Net(run, a=nn.Linear(4, 3), b=frozen(nn.Linear(3, 3))), 3, 2, 4)


@case
def inplace_change_of_the_models_input():
    def run(s, x):
        x *= 2.0
        x[:, 0] = 1.0
        return s.b(torch.tanh(s.a(x)))

    return made(Net(run, a=nn.Linear(4, 4), b=nn.Linear(4, 2)), 3, 4)


@case
def inplace_bias_add_on_a_layers_output():
    def run(s, x):
        h = s.a(x)
        h += s.shift
        h[:, 1] = 0.0
        return s.b(h.tanh_())

    return made(Net(run, a=nn.Linear(4, 4), b=nn.Linear(4, 3), shift=parameter(4)), 3, 4)


# -- bypass --------------------------------------------------------------------


@case
def residual():
    return made(
        Net(lambda s, x: s.b(x + torch.tanh(s.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 3)), 3, 4
    )


@case
def residual_added_in_place():
    def run(s, x):
        h = s.a(x)
        h += x
        return s.b(torch.tanh(h))

    return made(Net(run, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), 3, 4)


@case
def skip_read_before_the_layer():
    def run(s, x):
        h = torch.sigmoid(s.a(x))
        skip = h**2
        return s.b(h) + skip

    return made(Net(run, a=nn.Linear(4, 3), b=nn.Linear(3, 3)), 3, 4)


@case
def dense_skip():
    def run(s, x):
        a = torch.tanh(s.a(x))
        b = torch.tanh(s.b(torch.cat([x, a], 1)))
        return s.c(torch.cat([x, a, b], 1))

    return made(Net(run, a=nn.Linear(3, 3), b=nn.Linear(6, 2), c=nn.Linear(8, 3)), 3, 3)


@case
def qkv_on_one_tensor():
    def run(s, x):
        q, k, v = s.q(x), s.k(x), s.v(x)
        return (torch.softmax(q @ k.transpose(1, 2), -1) @ v).mean(1)

    return made(Net(run, q=nn.Linear(3, 2), k=nn.Linear(3, 2), v=nn.Linear(3, 4)), 3, 4, 3)


@case
def two_heads_on_one_tensor():
    return made(
        Net(
            lambda s, x: torch.cat([s.b(h := torch.tanh(s.a(x))), s.c(h)], 1),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 2),
            c=nn.Linear(4, 2),
        ),
        3,
        4,
    )


@case
def skip_that_takes_half_of_the_layer_away():
    """A = B / 2: the total derivative is smaller than the one through the layer."""

    def run(s, x):
        h = torch.tanh(s.a(x))
        return s.b(h) - h @ s.b.weight.T / 2

    return made(Net(run, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), 3, 4)


# -- reuse and tying -----------------------------------------------------------


@case
def module_called_twice():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(torch.tanh(s.a(x))))),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 3),
        ),
        3,
        4,
    )


@case
def module_called_on_different_position_counts():
    def run(s, x):
        h = torch.tanh(s.a(x))
        return s.a(h.mean(1)) + s.b(h[:, :2]).sum(1)

    return made(Net(run, a=nn.Linear(3, 3), b=nn.Linear(3, 3)), 3, 4, 3)


@case
def module_list_reused_in_a_loop():
    def run(s, x):
        for _ in range(3):
            for layer in s.layers:
                x = torch.tanh(layer(x))
        return x

    return made(
        Net(run, layers=nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3, bias=False)])), 3, 3
    )


@case
def conv_called_twice():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(torch.tanh(s.a(x)))).flatten(1)),
            a=nn.Conv2d(2, 2, 3, padding=1),
            b=nn.Linear(18, 3),
        ),
        3,
        2,
        3,
        3,
    )


@case
def tied_linear_linear():
    net = Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    net.b.weight = net.a.weight
    return made(net, 3, 4)


@case
def tied_transposed():
    return made(
        Net(
            lambda s, x: F.linear(torch.tanh(s.a(x)), s.a.weight.t(), s.shift),
            a=nn.Linear(4, 3),
            shift=parameter(4),
        ),
        3,
        4,
    )


@case
def tied_embedding_and_output():
    def run(s, x):
        h = s.emb((x > 0).long()).mean(1) + s.a(x)
        return s.out(torch.tanh(h))

    net = Net(run, emb=nn.Embedding(3, 4), a=nn.Linear(5, 4), out=nn.Linear(4, 3, bias=False))
    net.out.weight = net.emb.weight
    return made(net, 3, 5)


@case
def shared_bias():
    net = Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 3))
    net.b.bias = net.a.bias
    return made(net, 3, 4)


@case
def weight_used_in_a_linear_and_elsewhere():
    return made(
        Net(lambda s, x: s.a(x) + x * s.a.weight.sum() + s.a.weight.diagonal(), a=nn.Linear(3, 3)),
        3,
        3,
    )


@case
def bias_used_elsewhere():
    return made(Net(lambda s, x: torch.tanh(s.a(x)) * s.a.bias, a=nn.Linear(4, 3)), 3, 4)


@case
def functional_linear_on_another_modules_weight():
    return made(
        Net(
            lambda s, x: F.linear(torch.tanh(s.a(x)), s.a.weight, s.b.bias),
            a=nn.Linear(3, 3),
            b=nn.Linear(2, 3),
        ),
        3,
        3,
    )


@case
def one_matrix_as_weight_and_as_bias():
    return made(Net(lambda s, x: F.linear(x, s.w, s.w[0]), w=parameter(3, 3)), 3, 3)


@case
def tied_conv_and_linear():
    def run(s, x):
        return F.linear(torch.tanh(s.conv(x)).flatten(1), s.conv.weight.flatten(1))

    return made(Net(run, conv=nn.Conv1d(2, 3, 3)), 3, 2, 4)


@case
def tied_conv_and_transposed_conv():
    def run(s, x):
        return F.conv_transpose1d(torch.tanh(s.conv(x)), s.conv.weight, s.shift).mean(2)

    return made(Net(run, conv=nn.Conv1d(2, 3, 2), shift=parameter(2)), 3, 2, 4)


@case
def conv_weight_at_two_dilations_and_strides():
    def run(s, x):
        h = torch.tanh(F.conv1d(x, s.w, padding=1))
        return F.conv1d(h, s.w, dilation=2, stride=2).flatten(1)

    return made(Net(run, w=parameter(2, 2, 2)), 3, 2, 4)


@case
def weight_that_is_also_the_input_of_a_layer():
    """w is the weight of one layer and what another layer reads."""

    def run(s, x):
        return F.linear(x, s.w) + F.linear(s.w, s.v).sum()

    return made(Net(run, w=parameter(3, 4), v=parameter(2, 4)), 3, 4)


# -- frozen and unused ---------------------------------------------------------


@case
def frozen_weight():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    frozen(net[0].weight)
    return made(net, 3, 4)


@case
def frozen_bias():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    frozen(net[2].bias)
    return made(net, 3, 4)


@case
def frozen_all_but_one():
    net = frozen(
        nn.Sequential(
            nn.Conv1d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
        )
    )
    net[3].weight.requires_grad_(True)
    return made(net, 3, 2, 3)


@case
def frozen_everything():
    return made(frozen(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))), 3, 4)


@case
def frozen_embedding_before_frozen_linear():
    def run(s, x):
        return s.a(s.emb((x > 0).long())).mean(1) + s.b(x)

    net = Net(run, emb=frozen(nn.Embedding(2, 3)), a=frozen(nn.Linear(3, 2)), b=nn.Linear(4, 2))
    return made(net, 3, 4)


@case
def unused_parameters():
    net = Net(lambda s, x: s.a(x), a=nn.Linear(4, 3), b=nn.Linear(3, 3), lonely=parameter(2))
    return made(net, 3, 4)


@case
def dead_branch():
    def run(s, x):
        s.dead(torch.tanh(s.a(x)))
        return s.b(torch.tanh(s.a(x)))

    return made(Net(run, a=nn.Linear(4, 4), dead=nn.Linear(4, 2), b=nn.Linear(4, 3)), 3, 4)


@case
def detached_branch():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x))) + s.c(x).detach(),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 3),
            c=nn.Linear(4, 3),
        ),
        3,
        4,
    )


@case
def branch_without_grad():
    def run(s, x):
        with torch.no_grad():
            gate = torch.sigmoid(s.gate(x))
        return s.b(torch.tanh(s.a(x)) * gate)

    return made(Net(run, a=nn.Linear(4, 3), gate=nn.Linear(4, 3), b=nn.Linear(3, 3)), 3, 4)


@case
def custom_function_with_a_linear_inside():
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            z = F.linear(x, w)
            ctx.save_for_backward(x, w, z)
            return z**3

        @staticmethod
        def backward(ctx, g):
            x, w, z = ctx.saved_tensors
            g = g * 3 * z**2
            return g @ w, g.T @ x

    net = Net(lambda s, x: s.a(Cubed.apply(x, s.w)), w=parameter(3, 4), a=nn.Linear(3, 2))
    return made(net, 3, 4)


@case
def straight_through_estimator():
    def run(s, x):
        h = s.a(x)
        return s.b((h > 0).to(h) + h - h.detach())

    return made(Net(run, a=nn.Linear(4, 3), b=nn.Linear(3, 2)), 3, 4)


# -- free parameters -----------------------------------------------------------


@case
def free_scale_and_shift():
    return made(
        Net(
            lambda s, x: s.scale * s.a(x) + s.shift,
            a=nn.Linear(4, 3),
            scale=parameter(3),
            shift=parameter(),
        ),
        3,
        4,
    )


@case
def parameter_used_by_matmul():
    return made(
        Net(
            lambda s, x: torch.tanh(s.a(x) @ s.w) @ s.v,
            a=nn.Linear(4, 3),
            w=parameter(3, 4),
            v=parameter(4, 2),
        ),
        3,
        4,
    )


@case
def bare_parameter_in_functional_linear():
    return made(
        Net(
            lambda s, x: F.linear(torch.tanh(F.linear(x, s.w)), s.v, s.c),
            w=parameter(3, 4),
            v=parameter(2, 3),
            c=parameter(2),
        ),
        3,
        4,
    )


@case
def parameter_in_a_list_and_in_einsum():
    def run(s, x):
        h = torch.einsum("nd,kd->nk", s.a(x), s.weights[0])
        return torch.addmm(s.weights[1], h, s.weights[2])

    weights = nn.ParameterList([parameter(3, 4), parameter(2), parameter(3, 2)])
    return made(Net(run, a=nn.Linear(3, 4), weights=weights), 3, 3)


@case
def scaled_weight_as_in_equalised_learning_rates():
    return made(
        Net(
            lambda s, x: F.linear(torch.tanh(F.linear(x, s.w * 0.5, s.c)), s.v / 3),
            w=parameter(3, 4),
            c=parameter(3),
            v=parameter(2, 3),
        ),
        3,
        4,
    )


@case
def output_that_is_a_parameter_times_the_input():
    return made(
        Net(lambda s, x: s.a(x) + s.scale * x[:, :3], a=nn.Linear(4, 3), scale=parameter(1)), 3, 4
    )


@case
def hypernetwork_without_samples():
    def run(s, x):
        w = s.hyper(s.code).reshape(3, 4)  # one weight for the whole batch
        return s.out(torch.tanh(F.linear(x, w)))

    net = Net(run, hyper=nn.Linear(2, 12), code=parameter(2), out=nn.Linear(3, 2))
    return made(net, 3, 4)


@case
def computed_bias():
    net = Net(lambda s, x: F.linear(x, s.w, 2 * s.c), w=parameter(3, 4), c=parameter(3))
    return made(net, 3, 4)


@case
def broadcasts_of_many_kinds():
    def run(s, x):
        h = torch.addcmul(s.a(x), s.p, s.p, value=0.5)
        h = torch.sub(h, s.q, alpha=2) / s.p.exp()
        h = torch.lerp(h, s.q, 0.3) + torch.where(h > 0, h, s.p)
        return torch.maximum(h, s.q) ** 2 - 1 / (2 + s.p**2) + (1 - s.q)

    return made(Net(run, a=nn.Linear(4, 3), p=parameter(3), q=parameter(1, 3)), 3, 4)


@case
def parameter_times_itself_without_samples():
    net = Net(
        lambda s, x: s.a(x) * (s.p * s.p + s.q), a=nn.Linear(4, 3), p=parameter(3), q=parameter(3)
    )
    return made(net, 3, 4)


@case
def tokens_by_expand_and_repeat():
    def run(s, x):
        n = len(x)
        parts = [
            s.cls.expand(n, 1, 3),
            s.register.repeat(n, 2, 1),
            s.pair.repeat(n, 2)[:, None, :3],
        ]
        return s.a(torch.tanh(torch.cat([x, *parts], 1))).mean(1) + s.row.expand_as(x[:, 0])

    parts = {
        "cls": parameter(1, 1, 3),
        "register": parameter(1, 3),
        "pair": parameter(2),
        "row": parameter(3),
    }
    return made(Net(run, a=nn.Linear(3, 3), **parts), 3, 2, 3)


@case
def mask_token_by_where():
    def run(s, x):
        return s.a(torch.where(x[..., :1] > 0, x, s.token)).mean(1)

    return made(Net(run, a=nn.Linear(3, 2), token=parameter(3)), 3, 2, 3)


# -- convolutions --------------------------------------------------------------


def conv_case(conv: nn.Module, *shape: int, outputs: int = 3, **options: Any) -> Case:
    """conv, tanh, flatten, linear."""
    size = conv(torch.zeros(1, *shape)).numel()
    return made(
        nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(size, outputs)), 3, *shape, **options
    )


@case
def conv2d_plain():
    return conv_case(nn.Conv2d(2, 3, 3, padding=1), 2, 3, 3)


@case
def conv_without_bias():
    return conv_case(nn.Conv2d(2, 2, 2, bias=False), 2, 3, 3)


@case
def conv_grouped():
    return conv_case(nn.Conv2d(4, 6, 2, groups=2), 4, 3, 2)


@case
def conv_depthwise_with_multiplier():
    return conv_case(nn.Conv2d(2, 4, 2, groups=2), 2, 3, 3)


@case
def conv_strided_with_unread_border():
    return conv_case(nn.Conv2d(1, 2, 2, stride=2), 1, 5, 4)


@case
def conv_dilated():
    return conv_case(nn.Conv2d(1, 2, 2, dilation=2, padding=1), 1, 4, 3)


@case
def conv_rectangular_everything():
    return conv_case(
        nn.Conv2d(2, 2, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1)), 2, 3, 5
    )


@case
def conv_same_with_even_kernel():
    return conv_case(nn.Conv2d(1, 2, (2, 4), padding="same"), 1, 3, 4)


@case
def conv_same_dilated():
    return conv_case(nn.Conv1d(2, 2, 2, padding="same", dilation=3), 2, 5)


@case
def conv_valid():
    return conv_case(nn.Conv2d(1, 2, 2, padding="valid"), 1, 3, 3)


@case
def conv_one_by_one():
    return conv_case(nn.Conv2d(3, 2, 1), 3, 2, 2)


@case
def conv_kernel_larger_than_the_image():
    return conv_case(nn.Conv2d(1, 2, 5, padding=2), 1, 3, 3)


@case
def conv_circular():
    return conv_case(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), 1, 4, 3)


@case
def conv_circular_wrapping_almost_twice():
    return conv_case(nn.Conv1d(1, 2, 5, padding=3, padding_mode="circular"), 1, 3)


@case
def conv_reflect_strided():
    return conv_case(nn.Conv2d(1, 2, 3, padding=(2, 1), stride=2, padding_mode="reflect"), 1, 4, 4)


@case
def conv_replicate_3d():
    return conv_case(nn.Conv3d(1, 2, 2, padding=1, padding_mode="replicate"), 1, 2, 2, 2, outputs=2)


@case
def conv_same_with_even_kernel_reflected():
    return conv_case(nn.Conv1d(2, 2, 4, padding="same", padding_mode="reflect"), 2, 4)


@case
def conv_grouped_circular_same():
    return conv_case(nn.Conv1d(2, 4, 3, padding="same", groups=2, padding_mode="circular"), 2, 4)


@case
def padded_conv_inside_a_residual():
    """The layer's input is the tensor before the pad: the skip reads that very tensor."""

    def run(s, x):
        h = torch.tanh(s.a(x))
        return s.out((h + s.b(h)).flatten(1))

    b = nn.Conv2d(2, 2, 3, padding=1, padding_mode="replicate")
    return made(Net(run, a=nn.Conv2d(1, 2, 2), b=b, out=nn.Linear(8, 3)), 3, 1, 3, 3)


@case
def conv1d_strided():
    return conv_case(nn.Conv1d(2, 3, 3, stride=2, padding=1), 2, 5)


@case
def conv3d_grouped():
    return conv_case(nn.Conv3d(2, 2, 2, groups=2), 2, 2, 3, 2, outputs=2)


@case
def functional_conv_on_bare_parameters():
    return made(
        Net(
            lambda s, x: F.conv2d(
                torch.tanh(F.conv2d(x, s.w, stride=2)), s.v, s.c, padding=1
            ).flatten(1),
            w=parameter(2, 1, 2, 2),
            v=parameter(1, 2, 2, 2),
            c=parameter(1),
        ),
        3,
        1,
        3,
        3,
    )


@case
def conv_in_channels_last():
    net = nn.Sequential(nn.Conv2d(2, 2, 2), nn.ReLU(), nn.Conv2d(2, 2, 2), nn.Flatten())
    made_case = made(net.to(memory_format=torch.channels_last), 3, 2, 3, 4)
    return replace(made_case, x=made_case.x.to(memory_format=torch.channels_last))


@case
def transposed_conv1d_strided():
    return conv_case(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), 2, 3)


@case
def transposed_conv2d_overlapping():
    return conv_case(
        nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=(1, 0)), 2, 2, 3
    )


@case
def transposed_conv2d_grouped_dilated():
    return conv_case(nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2, bias=False), 4, 2, 2)


@case
def transposed_conv_cropping_whole_taps():
    return conv_case(nn.ConvTranspose1d(2, 2, 3, padding=2), 2, 4)


@case
def transposed_conv_output_padding_beyond_stride():
    return conv_case(nn.ConvTranspose1d(1, 2, 2, stride=1, dilation=3, output_padding=2), 1, 3)


@case
def transposed_conv3d():
    return conv_case(nn.ConvTranspose3d(2, 1, 2, stride=2), 2, 1, 2, 2, outputs=2)


@case
def transposed_conv_with_output_size():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x, output_size=[6])).flatten(1)),
            a=nn.ConvTranspose1d(1, 2, 2, stride=2),
            b=nn.Linear(12, 3),
        ),
        3,
        1,
        3,
    )


# -- norm layers ---------------------------------------------------------------


@case
def batchnorm1d_eval():
    return made(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), 3, 4)


@case
def batchnorm2d_eval():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 2, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )
    return made(net, 3, 1, 3, 3)


@case
def batchnorm_left_in_training_mode():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    return made(net.train(), 3, 4)


@case
def batchnorm_without_affine():
    return made(nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)), 3, 4)


@case
def batchnorm_on_tokens():
    return made(
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(9, 2)), 3, 2, 4
    )


@case
def layernorm_on_tokens():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.norm(s.a(x)))).mean(1),
            a=nn.Linear(3, 4),
            norm=nn.LayerNorm(4),
            b=nn.Linear(4, 3),
        ),
        3,
        2,
        3,
    )


@case
def layernorm_over_two_axes():
    return made(
        Net(
            lambda s, x: s.b(s.norm(s.a(x)).flatten(1)),
            a=nn.Linear(3, 3),
            norm=nn.LayerNorm([2, 3]),
            b=nn.Linear(6, 3),
        ),
        3,
        2,
        3,
    )


@case
def layernorm_without_bias_or_affine():
    net = nn.Sequential(
        nn.Linear(3, 4),
        nn.LayerNorm(4, bias=False),
        nn.Linear(4, 4),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.Linear(4, 2),
    )
    return made(net, 3, 3)


@case
def layernorm_called_twice():
    return made(
        Net(
            lambda s, x: s.norm(torch.tanh(s.a(s.norm(x)))), a=nn.Linear(4, 4), norm=nn.LayerNorm(4)
        ),
        3,
        4,
    )


@case
def layernorm_frozen_weight():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    frozen(net[1].weight)
    return made(net, 3, 3)


@case
def groupnorm():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    return made(net, 3, 1, 3, 3)


@case
def instancenorm_affine():
    net = nn.Sequential(
        nn.Conv1d(2, 3, 2),
        nn.InstanceNorm1d(3, affine=True),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(9, 2),
    )
    return made(net, 3, 2, 4)


@case
def instancenorm_with_running_statistics():
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    return made(nn.Sequential(nn.Conv1d(2, 3, 2), norm, nn.Flatten(), nn.Linear(9, 2)), 3, 2, 4)


@case
def rmsnorm():
    net = nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 3))
    return made(net, 3, 3)


@case
def handwritten_rmsnorm():
    def run(s, x):
        h = s.a(x)
        return s.b(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * s.gain)

    return made(Net(run, a=nn.Linear(3, 4), gain=parameter(4), b=nn.Linear(4, 2)), 3, 3)


@case
def prelu_single():
    return made(nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)), 3, 4)


@case
def prelu_per_channel():
    return made(
        nn.Sequential(nn.Conv1d(1, 3, 2), nn.PReLU(3), nn.Flatten(), nn.Linear(9, 2)), 3, 1, 4
    )


@case
def bilinear():
    return made(
        Net(lambda s, x: s.mix(s.a(x), x), a=nn.Linear(4, 3), mix=nn.Bilinear(3, 4, 2)), 3, 4
    )


# -- embeddings ----------------------------------------------------------------


@case
def embedding_by_internal_indices():
    return made(
        Net(
            lambda s, x: s.a(x) + s.emb((x > 0).long()).sum(1),
            a=nn.Linear(4, 3),
            emb=nn.Embedding(3, 3),
        ),
        3,
        4,
    )


@case
def embedding_with_padding_index():
    return made(
        Net(
            lambda s, x: s.a(x) + s.emb((x > 0).long()).sum(1),
            a=nn.Linear(4, 3),
            emb=nn.Embedding(3, 3, padding_idx=0),
        ),
        3,
        4,
    )


@case
def embedding_into_a_linear():
    return made(
        Net(
            lambda s, x: s.a(s.emb((x > 0).long())).flatten(1) * x.sum(1, keepdim=True),
            emb=nn.Embedding(2, 3),
            a=nn.Linear(3, 2),
        ),
        3,
        2,
    )


@case
def embedding_bag():
    return made(
        Net(
            lambda s, x: s.a(x) + s.bag((x > 0).long()),
            a=nn.Linear(4, 3),
            bag=nn.EmbeddingBag(3, 3, mode="mean"),
        ),
        3,
        4,
    )


@case
def position_table_by_arange():
    def run(s, x):
        return s.a(torch.tanh(x + s.pos(torch.arange(x.shape[1])))).mean(1)

    return made(Net(run, pos=nn.Embedding(4, 3), a=nn.Linear(3, 3)), 3, 4, 3)


@case
def as_many_positions_as_samples():
    """The looked-up table has n rows by accident; they are positions, not samples."""

    def run(s, x):
        return s.a(torch.tanh(x + s.pos(torch.arange(x.shape[1])))).mean(1)

    return made(Net(run, pos=nn.Embedding(3, 3), a=nn.Linear(3, 3)), 3, 3, 3)


@case
def as_many_features_as_samples():
    """A shift of n entries and a square weight: nothing about their shapes is about samples."""
    return made(
        Net(
            lambda s, x: s.shift * torch.tanh(s.a(x)) + s.table[0],
            a=nn.Linear(3, 3),
            shift=parameter(3),
            table=parameter(3, 3),
        ),
        3,
        3,
    )


@case
def linear_on_a_position_table():
    """A layer whose input is the same for all samples, with n rows by accident."""

    def run(s, x):
        return s.a(torch.tanh(x + s.proj(s.pos))).mean(1)

    return made(Net(run, pos=parameter(3, 2), proj=nn.Linear(2, 3), a=nn.Linear(3, 3)), 3, 3, 3)


@case
def layernorm_on_a_position_table():
    return made(
        Net(
            lambda s, x: s.a(x * s.norm(s.pos)).mean(1),
            pos=parameter(3, 3),
            norm=nn.LayerNorm(3),
            a=nn.Linear(3, 2),
        ),
        3,
        3,
        3,
    )


@case
def cls_token_position_and_layerscale():
    def run(s, x):
        tokens = s.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([s.cls.expand(len(x), -1, -1), tokens], 1) + s.pos
        h = s.norm1(tokens)
        tokens = tokens + s.gamma1 * s.attn(h, h, h, need_weights=False)[0]
        tokens = tokens + s.gamma2 * s.mlp(s.norm2(tokens))
        return s.head(s.norm3(tokens)[:, 0])

    parts = {
        "patch": nn.Conv2d(1, 4, 2, stride=2),
        "cls": parameter(1, 1, 4),
        "pos": parameter(1, 5, 4),
        "norm1": nn.LayerNorm(4),
        "attn": nn.MultiheadAttention(4, 2, batch_first=True),
        "gamma1": parameter(4),
        "norm2": nn.LayerNorm(4),
        "mlp": nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)),
        "gamma2": parameter(4),
        "norm3": nn.LayerNorm(4),
        "head": nn.Linear(4, 3),
    }
    return made(Net(run, **parts), 3, 1, 4, 4)


@case
def position_table_sliced():
    def run(s, x):
        return s.a(torch.tanh(x + s.pos[:, : x.shape[1]])).mean(1)

    return made(Net(run, pos=parameter(1, 5, 3), a=nn.Linear(3, 2)), 3, 2, 3)


@case
def embedding_with_sparse_gradients():
    run = {"a": nn.Linear(4, 3), "emb": nn.Embedding(3, 3, sparse=True)}
    return made(Net(lambda s, x: s.a(x) + s.emb((x > 0).long()).sum(1), **run), 3, 4)


# -- attention -----------------------------------------------------------------


@case
def attention_self_batch_first():
    return made(
        Net(
            lambda s, x: s.out(s.attn(x, x, x)[0].mean(1)),
            attn=nn.MultiheadAttention(4, 2, batch_first=True),
            out=nn.Linear(4, 3),
        ),
        3,
        2,
        4,
    )


@case
def attention_self_fused():
    return made(
        Net(
            lambda s, x: s.out((x + s.attn(x, x, x, need_weights=False)[0]).mean(1)),
            attn=nn.MultiheadAttention(4, 2, batch_first=True),
            out=nn.Linear(4, 3),
        ),
        3,
        3,
        4,
    )


@case
def attention_self_time_first_with_residual():
    def run(s, x):
        x = x.transpose(0, 1).contiguous()
        return s.out((x + s.attn(x, x, x)[0]).mean(0))

    return made(Net(run, attn=nn.MultiheadAttention(4, 2), out=nn.Linear(4, 3)), 3, 2, 4)


@case
def attention_as_many_tokens_as_samples_time_first():
    def run(s, x):
        x = x.transpose(0, 1)
        return s.out(s.attn(x, x, x, need_weights=False)[0][0])

    return made(Net(run, attn=nn.MultiheadAttention(4, 2), out=nn.Linear(4, 3)), 3, 3, 4)


@case
def attention_without_bias():
    return made(
        Net(
            lambda s, x: s.attn(x, x, x)[0].mean(1),
            attn=nn.MultiheadAttention(4, 1, bias=False, batch_first=True),
        ),
        3,
        2,
        4,
    )


@case
def attention_cross_with_other_widths():
    def run(s, x):
        return s.attn(s.a(x), x, x[..., :2])[0].mean(1)

    attn = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)
    return made(Net(run, a=nn.Linear(3, 4), attn=attn), 3, 2, 3)


@case
def attention_cross_with_one_width():
    def run(s, x):
        return s.attn(s.query.expand(len(x), -1, -1), x, x)[0].flatten(1)

    attn = nn.MultiheadAttention(4, 2, batch_first=True)
    return made(Net(run, query=parameter(1, 1, 4), attn=attn), 3, 3, 4)


@case
def attention_on_three_tensors():
    def run(s, x):
        return s.attn(x, torch.tanh(x), torch.sigmoid(x))[0].mean(1)

    return made(Net(run, attn=nn.MultiheadAttention(4, 2, batch_first=True)), 3, 2, 4)


@case
def attention_with_extra_key_and_value():
    attn = nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True)
    return made(Net(lambda s, x: s.attn(x, x, x)[0].mean(1), attn=attn), 3, 2, 4)


@case
def attention_with_frozen_in_projection():
    attn = nn.MultiheadAttention(4, 2, batch_first=True)
    frozen(attn.in_proj_weight)
    return made(Net(lambda s, x: s.attn(x, x, x)[0].mean(1), attn=attn), 3, 2, 4)


@case
def transformer_encoder_layer():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
    return made(nn.Sequential(layer, nn.Flatten(), nn.Linear(8, 3)), 3, 2, 4)


@case
def transformer_encoder_layer_norm_first_time_first():
    def run(s, x):
        return s.out(s.layer(x.transpose(0, 1)).mean(0))

    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, norm_first=True, activation="gelu")
    return made(Net(run, layer=layer, out=nn.Linear(4, 2)), 3, 2, 4)


@case
def transformer_encoder_all_frozen_but_head():
    """Nothing in the encoder asks for a gradient: the fused fast path would swallow its layers."""
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return made(nn.Sequential(frozen(encoder), nn.Flatten(), nn.Linear(8, 2)), 3, 2, 4)


@case
def transformer_decoder_layer():
    layer = nn.TransformerDecoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return made(
        Net(
            lambda s, x: s.out(s.layer(x[:, :1], x[:, 1:]).flatten(1)),
            layer=layer,
            out=nn.Linear(4, 2),
        ),
        3,
        3,
        4,
    )


# -- tokens --------------------------------------------------------------------


@case
def tokens_with_two_leading_axes():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x))).mean((1, 2)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)
        ),
        3,
        2,
        3,
        3,
    )


@case
def tokens_folded_into_the_batch():
    def run(s, x):
        h = s.b(torch.tanh(s.a(x.reshape(-1, 3))))
        return h.reshape(len(x), -1, 2).mean(1)

    return made(Net(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), 3, 2, 3)


@case
def tokens_time_first():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x.transpose(0, 1)))).mean(0),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        ),
        3,
        2,
        3,
    )


@case
def tokens_time_first_as_many_as_samples():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x.transpose(0, 1)))).pow(2).mean(0),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        ),
        3,
        3,
        3,
    )


@case
def tokens_time_major_folded():
    def run(s, x):
        h = s.b(torch.tanh(s.a(x.transpose(0, 1).reshape(-1, 3))))
        return h.reshape(-1, len(x), 2).mean(0)

    return made(Net(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), 3, 3, 3)


@case
def tokens_that_cancel():
    """Tokens (u, -u) with a mean: the weight's gradient is exactly 0, the input's is not."""
    model = shaken(Net(lambda s, x: s.a(x).mean(1), a=nn.Linear(3, 2, bias=False)))
    u = torch.randn(3, 1, 3)
    return Case(model, torch.cat([u, -u], 1))


@case
def images_folded_into_the_batch_for_a_conv():
    def run(s, x):
        h = torch.tanh(s.a(x.flatten(0, 1)))
        return s.b(h.reshape(len(x), -1))

    return made(Net(run, a=nn.Conv1d(1, 2, 2), b=nn.Linear(8, 3)), 3, 2, 1, 3)


@case
def more_positions_than_features():
    return made(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(14, 2)), 3, 7, 2)


@case
def wide_rows_with_few_positions():
    return made(
        nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)), 3, 2, 12
    )


@case
def tokens_time_first_with_norm_and_scale_as_many_as_samples():
    def run(s, x):
        h = s.norm(s.a(x.transpose(0, 1))) * s.scale + s.shift
        return s.b(torch.tanh(h)).mean(0)

    parts = {"scale": parameter(4), "shift": parameter(3, 1, 4), "b": nn.Linear(4, 2)}
    return made(Net(run, a=nn.Linear(3, 4), norm=nn.LayerNorm(4), **parts), 3, 3, 3)


@case
def images_folded_time_major_for_a_conv():
    def run(s, x):
        h = torch.tanh(s.a(x.transpose(0, 1).flatten(0, 1)))
        return s.b(h.unflatten(0, (-1, len(x))).transpose(0, 1).flatten(1))

    return made(Net(run, a=nn.Conv1d(1, 2, 2), b=nn.Linear(8, 3)), 3, 2, 1, 3)


def routed(s, x):
    """Each token goes to the expert that the sign of its first entry names."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_zeros(len(rows), 2)
    for e, expert in enumerate(s.experts):
        chosen = torch.nonzero((rows[:, 0] > 0) == bool(e)).squeeze(1)
        out = out.index_add(0, chosen, expert(rows[chosen]))
    return out.reshape(len(x), -1, 2).sum(1) + s.a(x).mean(1)


def routed_case(signs: list[list[int]]) -> Case:
    net = Net(routed, experts=nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), a=nn.Linear(3, 2))
    made_case = made(net, len(signs), len(signs[0]), 3)
    made_case.x[..., 0] = made_case.x[..., 0].abs() * torch.tensor(signs)
    return made_case


@case
def experts_with_as_many_tokens_of_each_sample():
    return routed_case([[1, 1, -1], [-1, 1, 1], [1, -1, 1]])


@uneven
def experts_with_more_tokens_of_one_sample():
    return routed_case([[1, 1, -1], [-1, 1, 1], [-1, -1, 1]])


@uneven
def experts_whose_rows_divide_evenly_by_accident():
    """Expert 1 gets 2, 2, 1, 3 tokens: 8 rows for 4 samples, but not 2 of each."""
    return routed_case([[1, 1, -1], [-1, 1, 1], [-1, -1, 1], [1, 1, 1]])


@uneven
def samples_scattered_over_experts():
    return routed_case([[1], [-1], [1], [1]])


@uneven
def depth_that_depends_on_the_sample():
    def run(s, x):
        for _ in range(1 + int(x[0, 0] > 0)):
            x = torch.tanh(s.a(x))
        return x

    made_case = made(Net(run, a=nn.Linear(3, 3)), 3, 3)
    made_case.x[:, 0] = torch.tensor([1.0, -1.0, 2.0])
    return made_case


# -- recurrent -----------------------------------------------------------------


@case
def gru():
    return made(
        Net(
            lambda s, x: s.out(s.rnn(x)[0][:, -1]),
            rnn=nn.GRU(2, 3, batch_first=True),
            out=nn.Linear(3, 2),
        ),
        3,
        4,
        2,
    )


@case
def lstm_two_layers_both_ways():
    return made(
        Net(
            lambda s, x: s.out(s.rnn(x.transpose(0, 1))[0][-1]),
            rnn=nn.LSTM(2, 2, num_layers=2, bidirectional=True),
            out=nn.Linear(4, 2),
        ),
        3,
        3,
        2,
    )


@case
def rnn_cell_in_a_loop():
    def run(s, x):
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = s.cell(x[:, t], h)
        return s.out(h)

    return made(Net(run, cell=nn.RNNCell(2, 3), out=nn.Linear(3, 2)), 3, 3, 2)


@case
def recurrent_linear_with_learned_start():
    def run(s, x):
        h = s.start.expand(len(x), -1)
        for t in range(x.shape[1]):
            h = torch.tanh(s.read(x[:, t]) + s.turn(h))
        return s.out(h)

    net = Net(
        run, start=parameter(3), read=nn.Linear(2, 3), turn=nn.Linear(3, 3), out=nn.Linear(3, 2)
    )
    return made(net, 3, 3, 2)


# -- parametrisations ----------------------------------------------------------


@case
def weight_norm():
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    return made(net, 3, 4)


@case
def weight_norm_conv_called_twice():
    a = parametrizations.weight_norm(nn.Conv1d(2, 2, 3, padding=1))
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(torch.tanh(s.a(x)))).flatten(1)), a=a, b=nn.Linear(6, 2)
        ),
        3,
        2,
        3,
    )


@case
def spectral_norm():
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    return Case(net, torch.randn(3, 4))


@case
def orthogonal():
    net = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    return Case(net, torch.randn(3, 4))


@case
def linear_subclass():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 0.5 * super().forward(x + 1)

    return made(nn.Sequential(Scaled(4, 4), nn.Tanh(), Scaled(4, 3, bias=False)), 3, 4)


@case
def conv_subclass_with_standardised_weight():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return self._conv_forward(x, w, self.bias)

    return conv_case(Standardised(1, 2, 2), 1, 3, 3)


def standardised_by_batch_norm(conv: nn.Conv2d) -> Case:
    def run(s, x):
        w = F.batch_norm(s.conv.weight.flatten(1)[None], None, None, training=True)
        return s.out(torch.tanh(s.conv._conv_forward(x, w.view_as(s.conv.weight), None)).flatten(1))

    return made(Net(run, conv=conv, out=nn.Linear(8, 3)), 3, 1, 3, 3)


@case
def conv_weight_standardised_by_batch_norm():
    return standardised_by_batch_norm(nn.Conv2d(1, 2, 2, bias=False))


@case
def frozen_conv_weight_standardised_by_batch_norm():
    return standardised_by_batch_norm(frozen(nn.Conv2d(1, 2, 2, bias=False)))


@case
def low_rank_adapter_on_a_frozen_layer():
    parts = {
        "down": nn.Linear(4, 1, bias=False),
        "up": nn.Linear(1, 4, bias=False),
        "out": nn.Linear(4, 3),
    }
    return made(
        Net(
            lambda s, x: s.out(torch.tanh(s.base(x) + s.up(s.down(x)))),
            base=frozen(nn.Linear(4, 4)),
            **parts,
        ),
        3,
        4,
    )


@case
def lazy_linear_materialised():
    net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    net(torch.zeros(1, 5))
    return made(net, 3, 5)


# -- sizes and ranks -----------------------------------------------------------


@case
def one_output():
    return made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), 3, 4)


@case
def one_sample():
    return made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), 1, 4)


@case
def one_sample_one_token_one_feature():
    return made(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Flatten(), nn.Linear(1, 1)), 1, 1, 1)


@case
def more_outputs_than_inputs():
    return made(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 5)), 3, 2)


@case
def bottleneck_makes_rank_deficient():
    return made(nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 4)), 3, 4)


@case
def bottleneck_in_the_middle():
    net = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4))
    return made(net, 3, 5)


@case
def dead_relu():
    net = shaken(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    with torch.no_grad():
        net[0].bias.fill_(-50.0)
    return Case(net, torch.randn(3, 3))


@case
def relu_dead_at_one_sample():
    net = shaken(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    with torch.no_grad():
        net[0].weight.abs_()
        net[0].bias.fill_(0.1)
    x = torch.rand(3, 3)
    x[1] = -9.0
    return Case(net, x)


@case
def zero_sample():
    made_case = made(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 3, 3)
    made_case.x[1] = 0.0
    return made_case


@case
def zero_sample_without_bias():
    made_case = made(
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)), 3, 3
    )
    made_case.x[1] = 0.0
    return made_case


@case
def coordinates_nobody_reads():
    return made(Net(lambda s, x: s.a(x[:, 1:3]), a=nn.Linear(2, 3)), 3, 5)


@case
def ill_conditioned_jacobian():
    net = shaken(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    with torch.no_grad():
        net[2].weight.mul_(torch.tensor([[1.0], [1e-3], [1e-6]]))
    return Case(net, torch.randn(3, 4))


@case
def tiny_and_huge_scales():
    net = shaken(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    with torch.no_grad():
        net[0].weight.mul_(1e-9)
        net[2].weight.mul_(1e6)
    return Case(net, torch.randn(3, 4))


@case
def noncontiguous_input():
    model = shaken(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    return Case(model, torch.randn(4, 3).t())


# -- inputs, outputs -----------------------------------------------------------


@case
def output_in_a_dict():
    return made(
        Net(
            lambda s, x: {"hidden": s.a(x), "logits": s.b(torch.tanh(s.a(x)))},
            a=nn.Linear(4, 3),
            b=nn.Linear(3, 2),
        ),
        3,
        4,
        output="logits",
    )


@case
def output_in_a_tuple():
    return made(
        Net(lambda s, x: (s.a(x), s.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 2)), 3, 4, output=1
    )


@case
def output_nested():
    net = Net(
        lambda s, x: {"heads": [s.a(x), (s.b(torch.tanh(s.a(x))),)]},
        a=nn.Linear(4, 3),
        b=nn.Linear(3, 2),
    )
    return made(net, 3, 4, output=lambda out: out["heads"][1][0])


@case
def output_of_two_axes():
    return made(
        Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3)), 3, 2, 3
    )


@case
def output_without_axes():
    return made(
        Net(lambda s, x: s.b(torch.tanh(s.a(x))).squeeze(1), a=nn.Linear(3, 4), b=nn.Linear(4, 1)),
        3,
        3,
    )


@case
def tuple_of_inputs():
    made_case = made(
        Net(
            lambda s, x, y: s.b(torch.tanh(s.a(x)) * y.flatten(1)),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        ),
        3,
        3,
    )
    return replace(made_case, x=(made_case.x, torch.randn(3, 2, 2)))


@case
def dict_of_inputs_with_token_ids():
    net = shaken(
        Net(
            lambda s, ids, gain: s.b(torch.tanh(s.a(s.emb(ids))).mean(1) * gain),
            emb=nn.Embedding(5, 3),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        )
    )
    return Case(net, {"ids": torch.randint(5, (3, 2)), "gain": torch.randn(3, 4)})


@case
def input_that_the_output_ignores():
    made_case = made(
        Net(lambda s, x, y: s.b(torch.tanh(s.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2)), 3, 3
    )
    return replace(made_case, x=(made_case.x, torch.randn(3, 2)))


@case
def boolean_mask_among_the_inputs():
    def run(s, x, padded):
        return s.attn(x, x, x, key_padding_mask=padded, need_weights=False)[0].mean(1)

    net = shaken(Net(run, attn=nn.MultiheadAttention(4, 2, batch_first=True)))
    padded = torch.tensor([[False, False, True], [False, True, True], [False, False, False]])
    return Case(net, (torch.randn(3, 3, 4), padded))


# -- wrappers and modes --------------------------------------------------------


@case
def compiled():
    case = made(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), 3, 4)
    return replace(case, model=torch.compile(case.model, backend="eager"))


@case
def data_parallel():
    case = made(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), 3, 4)
    return replace(case, model=nn.DataParallel(case.model))


@case
def dropout_left_in_training_mode():
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
    return made(net.train(), 3, 4)


@case
def buffers_used_in_the_forward():
    parts = {"centre": nn.Buffer(torch.randn(4)), "mask": nn.Buffer(torch.tensor([1.0, 0.0, 2.0]))}
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x - s.centre) * s.mask)),
            a=nn.Linear(4, 3),
            b=nn.Linear(3, 2),
            **parts,
        ),
        3,
        4,
    )


@case
def random_features_from_a_buffer_weight():
    """A measured layer whose weight is a buffer: no parameter, still a layer."""
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(F.linear(x, s.w))),
            w=nn.Buffer(torch.randn(4, 3)),
            b=nn.Linear(4, 2),
        ),
        3,
        3,
    )


@case
def compiled_part():
    a = torch.compile(nn.Linear(4, 4), backend="eager")
    return made(Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=a, b=nn.Linear(4, 3)), 3, 4)


# -- architectures -------------------------------------------------------------


@case
def swiglu_gate():
    parts = {
        "gate": nn.Linear(3, 4, bias=False),
        "up": nn.Linear(3, 4, bias=False),
        "down": nn.Linear(4, 3, bias=False),
    }
    return made(Net(lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x)).mean(1), **parts), 3, 2, 3)


@case
def softmax_head():
    return made(nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3), nn.Softmax(1)), 3, 4)


@case
def sigmoid_head():
    return made(nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2), nn.Sigmoid()), 3, 4)


@case
def max_pool():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, stride=1), nn.Flatten(), nn.Linear(8, 3)
    )
    return made(net, 3, 1, 4, 4)


@case
def squeeze_excite():
    def run(s, x):
        h = torch.relu(s.conv(x))
        gate = torch.sigmoid(s.up(torch.relu(s.down(h.mean((2, 3))))))
        return s.out((h * gate[:, :, None, None]).flatten(1))

    parts = {
        "conv": nn.Conv2d(1, 3, 2),
        "down": nn.Linear(3, 2),
        "up": nn.Linear(2, 3),
        "out": nn.Linear(12, 3),
    }
    return made(Net(run, **parts), 3, 1, 3, 3)


@case
def lenet():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Conv2d(2, 3, 2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.ReLU(inplace=True),
        nn.Linear(5, 4),
    )
    return made(net, 3, 1, 4, 6)


@case
def densenet_concat():
    def run(s, x):
        h = s.a(x)
        h = torch.cat([h, s.b(torch.relu(s.norm(h)))], 1)
        return s.out(h.mean((2, 3)))

    parts = {
        "a": nn.Conv2d(1, 2, 2),
        "norm": nn.BatchNorm2d(2),
        "b": nn.Conv2d(2, 2, 3, padding=1),
        "out": nn.Linear(4, 3),
    }
    return made(Net(run, **parts), 3, 1, 3, 3)


@case
def unet():
    def run(s, x):
        fine = torch.tanh(s.a(x))
        coarse = torch.tanh(s.b(fine))
        up = s.up(coarse)
        return s.out(torch.cat([fine, up], 1)).mean((2, 3))

    parts = {
        "a": nn.Conv2d(1, 2, 3, padding=1),
        "b": nn.Conv2d(2, 3, 2, stride=2),
        "up": nn.ConvTranspose2d(3, 2, 2, stride=2),
        "out": nn.Conv2d(4, 3, 1),
    }
    return made(Net(run, **parts), 3, 1, 4, 4)


@case
def basic_block_with_projection():
    def run(s, x):
        h = torch.relu_(s.n1(s.a(x)))
        h = s.n2(s.b(h))
        h += s.short(x)
        return s.out(torch.relu_(h).mean((2, 3)))

    parts = {
        "a": nn.Conv2d(1, 2, 3, stride=2, padding=1, bias=False),
        "n1": nn.BatchNorm2d(2),
        "b": nn.Conv2d(2, 2, 3, padding=1, bias=False),
        "n2": nn.BatchNorm2d(2),
        "short": nn.Conv2d(1, 2, 1, stride=2, bias=False),
        "out": nn.Linear(2, 2),
    }
    return made(Net(run, **parts), 3, 1, 4, 4)


@case
def mixer_transposes_tokens():
    def run(s, x):
        x = x + s.tokens(x.transpose(1, 2)).transpose(1, 2)
        return (x + s.channels(x)).mean(1)

    return made(Net(run, tokens=nn.Linear(2, 2), channels=nn.Linear(3, 3)), 3, 2, 3)


@case
def soft_mixture_of_experts():
    def run(s, x):
        gate = torch.softmax(s.gate(x), 1)
        return sum(gate[:, e : e + 1] * expert(x) for e, expert in enumerate(s.experts))

    net = Net(run, gate=nn.Linear(3, 2), experts=nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]))
    return made(net, 3, 3)


@case
def double_backward_inside_the_forward():
    """The output contains a derivative (as energy models do)."""

    def run(s, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.clone().requires_grad_()
            energy = s.b(torch.tanh(s.a(x))).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force

    return made(Net(run, a=nn.Linear(3, 4), b=nn.Linear(4, 1)), 3, 3)


# -- a head narrower than the outputs: fewer products than outputs are enough, or are they? -------


def behind_a_narrow_head(run: Callable[..., Any], **parts: Any) -> Case:
    parts = {"a": nn.Conv1d(1, 2, 3), "head": nn.Linear(4, 6), **parts}
    return made(Net(run, **parts), 3, 1, 4)


def narrow(s: Any, x: Tensor) -> Tensor:
    return s.head(torch.tanh(s.a(x)).flatten(1))


@case
def narrow_head():
    return behind_a_narrow_head(narrow)


@case
def narrow_head_then_sigmoid():
    return behind_a_narrow_head(lambda s, x: torch.sigmoid(narrow(s, x)))


@case
def narrow_head_then_softmax_reshaped():
    return behind_a_narrow_head(lambda s, x: torch.softmax(narrow(s, x), 1).reshape(-1, 2, 3))


@case
def narrow_head_then_learned_temperature():
    temperature = nn.Parameter(torch.tensor(1.5))
    return behind_a_narrow_head(lambda s, x: narrow(s, x) / s.t, t=temperature)


@case
def narrow_head_beside_a_skip_from_the_input():
    return behind_a_narrow_head(lambda s, x: narrow(s, x) + x.sum((1, 2))[:, None])


@case
def narrow_head_used_twice():
    return behind_a_narrow_head(lambda s, x: narrow(s, x) * narrow(s, x.flip(-1)))


@case
def narrow_head_of_lower_rank():
    net = behind_a_narrow_head(narrow)
    with torch.no_grad():
        net.model.head.weight[:, 1] = net.model.head.weight[:, 0]
        net.model.head.weight[3] = 0
    return net


@case
def narrow_head_frozen():
    net = behind_a_narrow_head(narrow)
    net.model.head.requires_grad_(False)
    return net


@case
def narrow_head_weight_normed():
    head = parametrizations.weight_norm(nn.Linear(4, 6))
    return behind_a_narrow_head(narrow, head=head)


@case
def narrow_head_on_tokens():
    return made(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 5)), 3, 2, 2)


# -- weights kept as [in, out], tables that samples take rows of ---------------------------------


@case
def linear_layers_that_keep_their_weight_turned():
    """Conv1D of transformers: addmm on flattened tokens."""

    def layer(x, w, b):
        return torch.addmm(b, x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)

    parts = {"w": parameter(3, 4), "b": parameter(4), "v": parameter(4, 2), "c": parameter(2)}
    net = Net(lambda s, x: layer(torch.tanh(layer(x, s.w, s.b)), s.v, s.c).mean(1), **parts)
    return made(net, 3, 2, 3)


@case
def turned_weight_also_used_upright():
    parts = {"w": parameter(3, 3), "b": parameter(3)}
    net = Net(lambda s, x: F.linear(torch.tanh(torch.addmm(s.b, x, s.w)), s.w), **parts)
    return made(net, 3, 3)


def embedded(run: Callable[..., Any], **parts: Any) -> Case:
    net = shaken(Net(run, out=nn.Linear(2, 3), mix=nn.Linear(2, 2), **parts))
    tokens = torch.tensor([[0, 1, 1], [3, 2, 0], [1, 1, 1], [4, 0, 2]])
    return Case(net, (torch.randn(4, 3, 2), tokens))


@case
def tokens_beside_floats_repeat_within_a_sample():
    def run(s, x, tokens):
        return s.out(torch.tanh(s.mix(x + s.table(tokens)))).mean(1)

    return embedded(run, table=nn.Embedding(5, 2))


@case
def embedding_with_padding_counted_from_the_end():
    def run(s, x, tokens):
        return s.out(torch.tanh(s.mix(x * s.table(tokens)))).mean(1)

    return embedded(run, table=nn.Embedding(5, 2, padding_idx=-4))


@case
def one_table_looked_up_twice():
    def run(s, x, tokens):
        return s.out(torch.tanh(s.mix(x * s.table(tokens)) + s.table(tokens.flip(1)))).mean(1)

    return embedded(run, table=nn.Embedding(5, 2))


@case
def positions_looked_up_once_for_all_samples():
    def run(s, x, tokens):
        places = torch.arange(3).unsqueeze(0)
        return s.out(torch.tanh(s.mix(x + s.places(places) + s.table(tokens)))).mean(1)

    return embedded(run, table=nn.Embedding(5, 2), places=nn.Embedding(4, 2))


@case
def table_used_as_head():
    def run(s, x, tokens):
        return F.linear(torch.tanh(s.mix(x + s.table(tokens))).mean(1), s.table.weight)

    return embedded(run, table=nn.Embedding(5, 2))


# -- whose row is it? ------------------------------------------------------------


def positions(run: Callable[..., Any], **parts: Any) -> Case:
    return made(Net(run, out=nn.Linear(2, 3), **parts), 4, 3, 2)


@case
def positions_looked_up_for_all_and_then_indexed():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.arange(3)[None])[0])).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def positions_looked_up_for_all_and_then_averaged():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.arange(3)[None]).mean(0))).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def positions_looked_up_for_all_and_then_viewed():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.arange(3)[None]).view(3, 2))).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def positions_looked_up_for_all_and_read_twice():
    def run(s, x):
        places = s.places(torch.arange(3)[None])
        return s.out(torch.tanh(x + places)).mean(1) * places.sum()

    return positions(run, places=nn.Embedding(4, 2))


@case
def positions_looked_up_for_all_without_a_batch():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.arange(3)))).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def a_row_looked_up_for_each_sample_of_which_the_first_serves_all():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.zeros(len(x), dtype=torch.long))[0])).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def a_parameter_expanded_to_the_batch_of_which_the_first_serves_all():
    def run(s, x):
        return s.out(x * s.hyper(s.p.expand(len(x), -1))[0]).mean(1)

    return positions(run, p=parameter(3), hyper=nn.Linear(3, 2))


@case
def a_scale_applied_to_samples_in_reverse_and_forward():
    def run(s, x):
        return s.out(torch.tanh(x * s.p + (x.flip(0).square() * s.p).flip(0))).mean(1)

    return positions(run, p=parameter(2))


@case
def layer_norm_on_samples_in_the_order_of_their_sums():
    def run(s, x):
        order = x.sum((1, 2)).argsort()
        return s.out(s.norm(x[order])[order.argsort()] + s.norm(x.square())).mean(1)

    return made(Net(run, norm=nn.LayerNorm(5), out=nn.Linear(5, 3)), 4, 2, 5)


# -- a bias that is broadcast, a pad that is not the layer's ------------------------


@case
def bias_of_one_entry_for_all_outputs():
    net = Net(lambda s, x: s.out(torch.tanh(F.linear(x, s.w, s.b))), w=parameter(4, 3))
    net.b, net.out = parameter(1), nn.Linear(4, 2)
    return made(net, 3, 3)


@case
def bias_of_one_entry_in_addmm():
    net = Net(lambda s, x: s.out(torch.tanh(torch.addmm(s.b, x, s.w))), w=parameter(3, 4))
    net.b, net.out = parameter(1), nn.Linear(4, 2)
    return made(net, 3, 3)


@case
def bias_for_each_position():
    net = Net(lambda s, x: s.out(torch.tanh(F.linear(x, s.w, s.b))).mean(1), w=parameter(4, 3))
    net.b, net.out = parameter(2, 4), nn.Linear(4, 2)
    return made(net, 3, 2, 3)


@case
def bias_computed_for_each_sample():
    net = Net(lambda s, x: s.out(torch.tanh(F.linear(x, s.w, s.film(x)))), w=parameter(4, 3))
    net.film, net.out = nn.Linear(3, 4), nn.Linear(4, 2)
    return made(net, 3, 3)


def padded_by_hand(between: Callable[[Tensor], Any]) -> Case:
    def run(s, x):
        wide = F.pad(x, (1, 1, 1, 1), "circular")
        between(wide)
        return s.out((s.own(x).mean((2, 3)) + s.plain(wide).mean((2, 3))).tanh())

    own = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    net = Net(run, own=own, plain=nn.Conv2d(2, 3, 3, padding=1), out=nn.Linear(3, 2))
    return made(net, 3, 2, 3, 3)


@case
def padded_by_hand_and_again_by_the_layer():
    return padded_by_hand(lambda wide: None)


@case
def padded_by_hand_overwritten_and_then_read():
    return padded_by_hand(lambda wide: wide.mul_(3))
