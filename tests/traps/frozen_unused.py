"""Frozen parameters, unused parameters, and branches without a gradient."""

import torch
import torch.nn.functional as F
from torch import nn

from traps.cases import Net, case, frozen, made, parameter


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
