"""Parameters that no module of torch owns: scales, tokens, matrices in einsum or matmul."""

import torch
import torch.nn.functional as F
from torch import nn

from traps.cases import Net, case, made, parameter


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
