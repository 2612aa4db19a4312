"""Layers whose input or output is overwritten in place."""

import torch
import torch.nn.functional as F
from torch import nn

from traps.cases import Net, case, frozen, made, parameter


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
