"""Random tiny networks: `random_network(seed)` always returns the same network for a seed.

Seeds cycle through the families (dense, conv, tokens, residual, reused, ...), so a few dozen
consecutive seeds cover all of them. In every family the parameters get scales over three decades.
Some networks also get dead units, frozen parameters, zero samples, zero features, or only one
sample.

    python tests/random_networks.py 130      # prints the network of seed 130
"""

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from traps import Case, Net, shaken

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.Identity,
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.LeakyReLU,
    nn.ELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.Softplus,
    nn.PReLU,
]
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
Made = tuple[nn.Module, tuple[int, ...]]  # a network and the shape of one sample


class Draw(random.Random):
    """Draw the structure of a network; the values come from torch's generator."""

    def maybe(self, chance: float) -> bool:
        return self.random() < chance

    def size(self, most: int = 5) -> int:
        return self.randint(1, most)

    def scale(self) -> float:
        """Draw a scale over three decades."""
        return 10 ** self.uniform(-1.5, 1.5)

    def act(self) -> nn.Module:
        return self.choice(ACTIVATIONS)()

    def linear(self, i: int, o: int) -> nn.Linear:
        return nn.Linear(i, o, bias=self.maybe(0.5))

    def layers(self, *widths: int) -> list[nn.Module]:
        """Return linear layers with an activation after each except the last."""
        found: list[nn.Module] = []
        for i, o in pairwise(widths):
            found += [self.linear(i, o), self.act()]
        return found[:-1]

    def widths(self, depth: int) -> list[int]:
        return [self.size() for _ in range(depth + 1)]

    def head(self, body: list[nn.Module], shape: tuple[int, ...]) -> nn.Module:
        """Return the body flattened and, half of the time, followed by one more layer."""
        net = nn.Sequential(*body, nn.Flatten())
        size = nn.Sequential(*body, nn.Flatten())(torch.zeros(1, *shape)).shape[1]
        if size > 4 or self.maybe(0.5):
            net.extend([self.act(), self.linear(size, self.size(4))])
        return net


# -- the families --------------------------------------------------------------


def dense(r: Draw) -> Made:
    widths = r.widths(r.size(4))
    return nn.Sequential(*r.layers(*widths), *r.choice([[], [], [nn.Softmax(1)]])), (widths[0],)


def linear_without_bias(r: Draw) -> Made:
    """Every bound is tight here for one sample and one layer."""
    widths = r.widths(r.size(3))
    return nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in pairwise(widths))), (widths[0],)


def conv(r: Draw) -> Made:
    """One or two convolutions with any option."""
    dims = r.choice([1, 1, 2, 2, 3])
    groups, channels = r.choice([1, 1, 2]), r.size(2)
    space = tuple(r.randint(2, 5 - dims) + 1 for _ in range(dims))
    shape = (groups * channels, *space)
    body: list[nn.Module] = [any_conv(r, shape, groups)]
    if r.maybe(0.4):
        between = tuple(nn.Sequential(*body)(torch.zeros(1, *shape)).shape[1:])
        body += [r.act(), any_conv(r, between, 1)]
    return r.head(body, shape), shape


def any_conv(r: Draw, shape: tuple[int, ...], groups: int) -> nn.Module:
    channels, space = shape[0], shape[1:]
    dims, out = len(space), groups * r.size(2)
    kernel = [r.size(3) for _ in space]
    dilation = [r.choice([1, 1, 2]) for _ in space]
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    options: dict[str, Any] = {"dilation": tuple(dilation), "groups": groups}
    options |= {"bias": r.maybe(0.5), "padding_mode": r.choice(["zeros", "zeros", *MODES])}
    if r.maybe(0.2):
        options["padding"] = "same"
        small = all(t < s for t, s in zip(reach, space, strict=True))
    else:
        need = [max(0, (t + 2 - s) // 2) for t, s in zip(reach, space, strict=True)]
        padding = [n + r.choice([0, 0, 1]) for n in need]
        options |= {"padding": tuple(padding), "stride": tuple(r.size(2) for _ in space)}
        small = all(p < s for p, s in zip(padding, space, strict=True))
    if not small:  # torch can reflect and wrap around only once
        options["padding_mode"] = "zeros"
    return CONVS[dims](channels, out, tuple(kernel), **options)


MODES = ["reflect", "replicate", "circular"]


def transposed_conv(r: Draw) -> Made:
    dims, groups = r.choice([1, 1, 2, 3]), r.choice([1, 1, 2])
    shape = (groups * r.size(2), *(r.size(3) for _ in range(dims)))
    kernel = tuple(r.randint(2, 3) for _ in range(dims))
    stride, dilation = r.size(2), r.size(2)
    layer = TRANSPOSED[dims](
        shape[0],
        groups * r.size(2),
        kernel,
        stride=stride,
        padding=r.choice([0, 0, (min(kernel) - 1) // 2]),
        output_padding=r.randint(0, max(stride, dilation) - 1),
        groups=groups,
        dilation=dilation,
        bias=r.maybe(0.5),
    )
    return r.head([layer], shape), shape


def conv_at_one_position(r: Draw) -> Made:
    """As good as dense where it reads every entry once, and only there."""
    size, channels = r.size(4), r.size(2)
    trap = r.choice(["", "groups", "unread", "wrapped"])
    groups = 2 if trap == "groups" else 1
    options: dict[str, Any] = {"groups": groups, "bias": r.maybe(0.5)}
    if trap == "wrapped":
        pad = r.size(size)
        kernel = size + 2 * pad
        options |= {"padding": pad, "padding_mode": "circular"}
    else:
        kernel = max(1, size - (trap == "unread"))
        options |= {"stride": size + 1}
    layer = nn.Conv1d(groups * channels, groups * r.size(2), kernel, **options)
    shape = (groups * channels, size)
    return r.head([layer], shape), shape


def tokens(r: Draw) -> Made:
    """Layers on tokens: samples first, time first or folded into the batch; pooled or not."""
    order, pool = r.choice(["", "time first", "folded"]), r.choice(["mean", "flat", "signed"])
    fewest = 2 if order == "time first" else 1  # one token or feature has only one order
    T, d, h, o = r.randint(fewest, 4), r.randint(fewest, 4), r.size(4), r.size(3)
    norm = [nn.LayerNorm(h)] if h > 2 and r.maybe(0.5) else []
    body = nn.Sequential(r.linear(d, h), *norm, r.act())
    size = h * T if pool == "flat" else h

    def run(s: Any, x: Tensor) -> Tensor:
        if order == "time first":
            h = s.body(x.transpose(0, 1)).transpose(0, 1)
        elif order == "folded":
            h = s.body(x.reshape(-1, x.shape[-1])).unflatten(0, (len(x), -1))
        else:
            h = s.body(x)
        signs = 1 - 2 * (torch.arange(h.shape[1])[:, None] % 2)
        h = {"mean": h.mean(1), "flat": h.flatten(1), "signed": (signs * h).sum(1)}[pool]
        return s.out(h)

    return Net(run, body=body, out=r.linear(size, o) if r.maybe(0.6) else nn.Identity()), (T, d)


def attention(r: Draw) -> Made:
    T, d, h = r.size(3), r.size(3), r.size(3)

    def run(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.q(x), s.k(x), s.v(x)
        return (torch.softmax(q @ k.mT, -1) @ v).mean(1)

    return Net(run, q=r.linear(d, h), k=r.linear(d, h), v=r.linear(d, r.size(3))), (T, d)


def residual(r: Draw) -> Made:
    """Blocks with a skip of some kind: of two layers, weighted, concatenated, or a convolution."""
    d, kind = r.size(4), r.choice(["deep", "weak", "concat", "conv", "whole"])
    weak = 10 ** r.uniform(-12, 0)
    if kind == "conv":
        body = nn.Conv1d(d, d, 3, padding=1, bias=r.maybe(0.5))
        net = Net(lambda s, x: s.out((x + s.body(x)).mean(2)), body=body, out=r.linear(d, r.size()))
        return net, (d, r.size(4))
    body = nn.Sequential(*(r.layers(d, r.size(), d) if kind == "deep" else [r.linear(d, d)]))
    joins: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "deep": torch.add,
        "whole": torch.add,
        "weak": lambda h, z: weak * h + z,
        "concat": lambda h, z: torch.cat([h, z], 1),
    }
    out = nn.Identity() if kind == "whole" else r.linear(d * (1 + (kind == "concat")), r.size(4))
    net = Net(lambda s, x: s.out(joins[kind](x, s.act(s.body(x)))), body=body, act=r.act(), out=out)
    return nn.Sequential(*r.choice([[], [r.linear(d, d), r.act()]]), net), (d,)


def chain(r: Draw) -> Made:
    """x_{l+1} = x_l + act(W_l x_l) and a linear last layer: Eq. 17 telescopes."""
    d, depth = r.size(4), r.size(3)

    def run(s: Any, x: Tensor) -> Tensor:
        for layer, act in zip(s.layers, s.acts, strict=True):
            x = x + act(layer(x))
        return s.out(x)

    layers = nn.ModuleList(r.linear(d, d) for _ in range(depth))
    acts = nn.ModuleList(r.act() for _ in range(depth))
    return Net(run, layers=layers, acts=acts, out=r.linear(d, r.size())), (d,)


def read_beside(r: Draw) -> Made:
    """The first layer reads a view of the input; something else reads the input too."""
    d, o, weak = r.size(4), r.size(3), r.choice([0.0, 1.0, 10 ** r.uniform(-12, 0)])
    skip = r.choice([lambda x: x, torch.tanh])
    kind = r.choice(["linear", "chain"])

    def run(s: Any, x: Tensor) -> Tensor:
        h = x.view(len(x), -1)
        if kind == "chain":
            return s.out(h + s.a(h) + weak * skip(x))
        return s.a(h) + weak * skip(x) @ s.side

    if kind == "chain":
        return Net(run, a=r.linear(d, d), out=r.linear(d, o)), (d,)
    return Net(run, a=r.linear(d, o), side=nn.Buffer(torch.randn(d, o))), (d,)


def reused(r: Draw) -> Made:
    """One module called several times: dense, on tokens or a convolution."""
    d, times, kind = r.size(4), r.randint(2, 3), r.choice(["dense", "tokens", "conv"])

    def run(s: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = s.act(s.a(x))
        return s.out(x.flatten(1))

    a = nn.Conv1d(d, d, 3, padding=1) if kind == "conv" else r.linear(d, d)
    shape = {"dense": (d,), "tokens": (r.size(3), d), "conv": (d, r.size(4))}[kind]
    size = torch.Size(shape).numel()
    return Net(run, a=a, act=r.act(), out=r.linear(size, r.size(4))), shape


def tied(r: Draw) -> Made:
    """One parameter in two places, of five kinds."""
    d, kind = r.size(4), r.choice(["weight", "bias", "transposed", "elsewhere", "both"])
    net = nn.Sequential(nn.Linear(d, d), r.act(), nn.Linear(d, d))
    if kind == "transposed":
        a = r.linear(d, r.size(4))
        return Net(lambda s, x: F.linear(torch.tanh(s.a(x)), s.a.weight.t()), a=a), (d,)
    if kind == "elsewhere":
        which = r.choice([0, 2])
        return Net(lambda s, x: s.net(x) * s.net[which].weight.sum(), net=net), (d,)
    if kind in ("weight", "both"):
        net[2].weight = net[0].weight
    if kind in ("bias", "both"):
        net[2].bias = net[0].bias
    return net, (d,)


def normed(r: Draw) -> Made:
    """Norm layers somewhere, or weights computed by a parametrisation."""
    i, h, o = r.randint(3, 5), r.randint(3, 5), r.size(4)  # a norm of fewer features is constant
    net = nn.Sequential(*r.layers(i, h, o))
    kind = r.choice(["layer", "batch", "weight", "spectral", "group", "front"])
    wrap = {"weight": parametrizations.weight_norm, "spectral": parametrizations.spectral_norm}
    if kind in wrap:
        wrap[kind](net[r.choice([0, 2])])
        return net, (i,)
    norms = {"layer": nn.LayerNorm(h), "batch": nn.BatchNorm1d(h), "front": nn.LayerNorm(i)}
    if kind == "group":
        body: list[nn.Module] = [nn.Conv1d(i, h, 2), nn.GroupNorm(1, h)]
        return r.head(body, (i, 3)), (i, 3)
    net.insert(0 if kind == "front" else 1, norms[kind])
    return net, (i,)


FAMILIES = [
    dense,
    linear_without_bias,
    conv,
    transposed_conv,
    conv_at_one_position,
    tokens,
    attention,
    residual,
    chain,
    read_beside,
    reused,
    tied,
    normed,
]


# -- what may happen to any of them --------------------------------------------


def rescaled(r: Draw, model: nn.Module) -> None:
    """Give every parameter its own scale; make some units dead and freeze some parameters."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(r.scale())
            if "parametrizations" in name:  # zero has no direction
                continue
            if r.maybe(0.1):
                p[r.randrange(len(p))] = 0.0  # a unit without weights
            if r.maybe(0.1) and p.dim() > 1:
                p[:, r.randrange(p.shape[1])] = 0.0  # an input without weights
            if r.maybe(0.05) and p.dim() == 1:
                p.fill_(-50.0)  # a bias that kills every ReLU
    if r.maybe(0.2):
        for p in model.parameters():
            p.requires_grad_(r.maybe(0.5))


def samples(r: Draw, shape: tuple[int, ...]) -> Tensor:
    x = r.scale() * torch.randn(r.choice([1, 1, 2, 3, 4]), *shape)
    if r.maybe(0.15):
        x[r.randrange(len(x))] = 0.0
    if r.maybe(0.1):
        x[:, r.randrange(shape[0])] = 0.0
    if r.maybe(0.1) and len(shape) > 1 and shape[0] > 1:
        x[:, 1] = -x[:, 0]  # tokens that cancel
    return x


def random_network(seed: int) -> Case:
    """Return the network of this seed, in float64."""
    r, before = Draw(seed), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, shape = FAMILIES[seed % len(FAMILIES)](r)
            shaken(model)
            rescaled(r, model)
            return Case(model, samples(r, shape))
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    found = random_network(int(sys.argv[1]))
    print(FAMILIES[int(sys.argv[1]) % len(FAMILIES)].__name__, found.model, found.x, sep="\n")
