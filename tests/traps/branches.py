"""Branches, buffers and small whole networks of bare parameters."""

import torch
from torch import nn

from traps.cases import Net, case, made, parameter


@case
def branches_that_split_the_input():
    def run(s, x):
        a, b = x.split([2, 3], 1)
        return torch.cat([torch.tanh(a @ s.w), b @ s.v, x @ s.u], 1)

    return made(Net(run, w=parameter(2, 2), v=parameter(3, 1), u=parameter(5, 2)), 3, 5)


@case
def branches_that_meet_in_a_product():
    """Gating: one branch scales the other."""

    def run(s, x):
        return (torch.sigmoid(x @ s.gate) * torch.tanh(s.a(x))) @ s.out

    return made(Net(run, gate=parameter(3, 4), a=nn.Linear(3, 4), out=parameter(4, 2)), 3, 3)


@case
def one_matrix_in_two_modules():
    w = parameter(3, 2)
    net = Net(lambda s, x: s.one(x) + s.two(x**2 / 5), one=None, two=None)
    net.one, net.two = Net(lambda s, x: x @ s.w, w=w), Net(lambda s, x: x @ s.w, w=w)
    return made(net, 3, 3)


@case
def buffer_beside_a_matrix():
    net = Net(lambda s, x: (x @ s.w) * s.scale + x @ s.fixed, w=parameter(3, 2))
    net.register_buffer("scale", torch.randn(2))
    net.register_buffer("fixed", torch.randn(3, 2))
    return made(net, 3, 3)


@case
def module_that_returns_nothing():
    def run(s, x):
        s.seen(x)
        return s.a(x)

    net = Net(
        run, seen=Net(lambda s, x: {"nothing": [None, ()]}, w=parameter(3, 2)), a=nn.Linear(3, 2)
    )
    return made(net, 3, 3)


@case
def encoder_and_decoder():
    return made(
        Net(
            lambda s, x: s.t(x, torch.tanh(x)).mean(1),
            t=nn.Transformer(4, 2, 1, 1, 6, batch_first=True, dropout=0.0),
        ),
        3,
        2,
        4,
    )


@case
def low_rank_update_beside_a_frozen_layer():
    """LoRA: x W + x A B, with W frozen."""

    def run(s, x):
        return torch.tanh(s.base(x) + x @ s.a @ s.b) @ s.out

    parts = {"a": parameter(3, 2), "b": parameter(2, 4), "out": parameter(4, 2)}
    net = Net(run, base=nn.Linear(3, 4), **parts)
    net.base.requires_grad_(False)
    return made(net, 3, 3)


@case
def matrix_inside_a_tensordot_and_an_inner_product():
    def run(s, x):
        return torch.tanh(torch.tensordot(x, s.w, 1)) @ s.v

    return made(Net(run, w=parameter(3, 4), v=parameter(4, 2)), 3, 3)
