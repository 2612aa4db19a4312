"""Further families of random networks: products, recurrent cells, gates, branches, routing.

`grown_network(seed)` cycles through these and the families of `random_networks`, with parameters
and samples over six decades. Families in `ROUTED` send samples to different weights; they are used
only on request.
"""

from typing import Any

import torch
import torch.nn.functional as F
from random_networks import FAMILIES, Draw, Made, rescaled, samples
from torch import Tensor, nn
from traps import Case, Net, parameter, shaken


class WideDraw(Draw):
    """Scales over six decades."""

    def scale(self) -> float:
        return 10 ** self.uniform(-3, 3)


def matrices(r: Draw) -> Made:
    """A multilayer perceptron of bare matrices, some of them stored transposed."""
    widths = r.widths(r.size(3))
    turned = [r.maybe(0.5) for _ in widths[1:]]
    pairs = zip(widths[:-1], widths[1:], turned, strict=True)
    weights = nn.ParameterList(parameter(o, i) if t else parameter(i, o) for i, o, t in pairs)
    act = r.act()

    def run(s: Any, x: Tensor) -> Tensor:
        for k, (w, t) in enumerate(zip(s.weights, turned, strict=True)):
            x = x @ (w.T if t else w)
            x = s.act(x) if k + 1 < len(turned) else x
        return x

    return Net(run, weights=weights, act=act), (widths[0],)


def token_mixer(r: Draw) -> Made:
    """A matrix from the left mixes tokens, one from the right features."""
    T, d, h = r.size(4), r.size(3), r.size(3)
    parts = {"left": parameter(r.size(3), T), "right": parameter(d, h), "act": r.act()}
    return Net(lambda s, x: s.act(s.left @ x @ s.right).flatten(1), **parts), (T, d)


def grouped(r: Draw) -> Made:
    """One matrix for each group, by einsum, bmm or broadcasting."""
    g, i, o, kind = r.randint(2, 3), r.size(3), r.size(3), r.choice(["einsum", "bmm", "broadcast"])
    w, out = parameter(g, i, o), parameter(g * o, r.size(3))

    def run(s: Any, x: Tensor) -> Tensor:
        if kind == "einsum":
            z = torch.einsum("bgi,gio->bgo", x, s.w)
        elif kind == "bmm":
            z = torch.bmm(x.transpose(0, 1), s.w).transpose(0, 1)
        else:
            z = (x.mean(1)[:, None, None] @ s.w).squeeze(2)
        return s.act(z).flatten(1) @ s.out

    return Net(run, w=w, out=out, act=r.act()), (g, i)


def recurrent(r: Draw) -> Made:
    """A recurrent layer of any kind."""
    kind, d, h = r.choice([nn.RNN, nn.GRU, nn.LSTM]), r.size(3), r.randint(2, 3)
    options = {"num_layers": r.size(2), "bidirectional": r.maybe(0.3), "bias": r.maybe(0.6)}
    if kind is nn.LSTM and r.maybe(0.3):
        options["proj_size"] = h - 1
    rnn = kind(d, h, batch_first=True, **options)
    width = (options.get("proj_size") or h) * (1 + options["bidirectional"])
    net = Net(lambda s, x: s.out(s.rnn(x)[0][:, -1]), rnn=rnn, out=r.linear(width, r.size(3)))
    return net, (r.size(3), d)


def cell(r: Draw) -> Made:
    """A cell in a loop written by hand."""
    kind, d, h = r.choice([nn.RNNCell, nn.GRUCell, nn.LSTMCell]), r.size(3), r.size(3)

    def run(s: Any, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = s.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state

    return Net(run, cell=kind(d, h)), (r.size(3), d)


def gated(r: Draw) -> Made:
    """One branch scales another: a gate, a bilinear layer, or SwiGLU."""
    d, h, kind = r.size(3), r.size(3), r.choice(["gate", "bilinear", "swiglu"])
    if kind == "bilinear":
        mix = nn.Bilinear(d, d, h, bias=r.maybe(0.5))
        return Net(lambda s, x: s.out(s.mix(x, torch.tanh(x))), mix=mix, out=r.linear(h, 2)), (d,)
    parts = {"a": r.linear(d, h), "b": parameter(d, h), "out": r.linear(h, r.size(3))}
    act = torch.sigmoid if kind == "gate" else F.silu
    return Net(lambda s, x: s.out(s.a(x) * act(x @ s.b)), **parts), (d,)


def branches(r: Draw) -> Made:
    """Branches that read all or a part of the input and meet in a sum or side by side."""
    d, h, joined = r.randint(2, 4), r.size(3), r.maybe(0.5)
    parts = {"a": r.linear(d, h), "b": parameter(d - 1, h), "c": parameter(h, h), "act": r.act()}

    def run(s: Any, x: Tensor) -> Tensor:
        one, two = s.act(s.a(x)), s.act(x[:, 1:] @ s.b) @ s.c
        return torch.cat([one, two], 1) if joined else one + two

    return Net(run, **parts), (d,)


def transposed_weight(r: Draw) -> Made:
    """A weight used through a view: transposed, reshaped, or both ways."""
    d, h, kind = r.size(4), r.size(4), r.choice(["transposed", "reshaped", "both"])
    if kind == "reshaped":
        w, v = parameter(d * h), parameter(h, 2)
        return Net(lambda s, x: s.act(x @ s.w.view(d, h)) @ s.v, w=w, v=v, act=r.act()), (d,)
    if kind == "both":
        return Net(lambda s, x: s.act(x @ s.w) @ s.w.T, w=parameter(d, h), act=r.act()), (d,)
    parts = {"w": parameter(h, d), "v": parameter(2, h), "act": r.act()}
    return Net(lambda s, x: F.linear(s.act(x @ s.w.t()), s.v), **parts), (d,)


# -- samples that use different weights ----------------------------------------


def routed(r: Draw) -> Made:
    """Each sample goes to one of two experts of equal shape."""
    d, h = r.size(3), r.size(3)
    parts = {"a": r.linear(d, h), "b": r.linear(d, h), "out": r.linear(h, 2)}

    def run(s: Any, x: Tensor) -> Tensor:
        return s.out(torch.cat([(s.a if row[0, 0] > 0 else s.b)(row) for row in x.split(1)]))

    return Net(run, **parts), (d,)


def weight_per_sample(r: Draw) -> Made:
    """A hypernetwork computes the weight from the sample."""
    d, h = r.size(3), r.size(3)

    def run(s: Any, x: Tensor) -> Tensor:
        w = s.hyper(x).reshape(len(x), h, d)
        return s.out(torch.cat([F.linear(row, m) for row, m in zip(x.split(1), w, strict=True)]))

    return Net(run, hyper=nn.Linear(d, h * d), out=r.linear(h, 2)), (d,)


def mixture(r: Draw) -> Made:
    """A gate sends each sample, or each token, to its best expert and scales the result."""
    d, h, experts, tokens = r.size(3), r.size(3), r.randint(2, 4), r.choice([1, 1, 3])
    parts = {
        "gate": r.linear(d, experts),
        "experts": nn.ModuleList(
            nn.Sequential(r.linear(d, h), r.act(), r.linear(h, 2)) for _ in range(experts)
        ),
    }

    def run(s: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1, d)
        weight, best = s.gate(flat).softmax(1).max(1)
        out = flat.new_zeros(len(flat), 2)
        for e, expert in enumerate(s.experts):
            chosen = torch.nonzero(best == e).squeeze(1)
            if len(chosen):
                out = out.index_add(0, chosen, weight[chosen, None] * expert(flat[chosen]))
        return out.reshape(len(x), tokens, 2).sum(1)

    return Net(run, **parts), (tokens, d)


def own_depth(r: Draw) -> Made:
    """Each sample passes the same block once, twice or not at all."""
    d = r.size(3)

    def run(s: Any, x: Tensor) -> Tensor:
        results = []
        for h in x.split(1):
            for _ in range(int((h > 0).sum()) % 3):
                h = s.act(s.block(h))
            results.append(s.out(h))
        return torch.cat(results)

    return Net(run, block=r.linear(d, d), act=nn.Tanh(), out=r.linear(d, 2)), (d,)


GROWN = [
    *FAMILIES,
    *(matrices, token_mixer, grouped, recurrent, cell, gated, branches, transposed_weight),
]
ROUTED = [routed, weight_per_sample, mixture, own_depth]


def grown_network(seed: int, routing: bool = False) -> tuple[str, Case]:
    """Return the family and the network of this seed, in float64."""
    families = GROWN + ROUTED if routing else GROWN
    family, r, before = families[seed % len(families)], WideDraw(seed), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, shape = family(r)
            shaken(model)
            rescaled(r, model)
            return family.__name__, Case(model, samples(r, shape))
    finally:
        torch.set_default_dtype(before)
