"""Layers that store their weight as [in, out]."""

import torch
import torch.nn.functional as F

from traps.cases import Net, case, made, parameter


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
