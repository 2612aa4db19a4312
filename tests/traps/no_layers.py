"""Networks without a measured layer: sharpness and MLS are still defined."""

import torch
from torch import nn

from traps.cases import Net, case, made, parameter


@case
def no_parameter_at_all():
    return made(nn.Sequential(nn.Tanh(), nn.Softmax(1)), 3, 4)


@case
def norm_layer_alone():
    return made(nn.Sequential(nn.LayerNorm(4), nn.Tanh()), 3, 4)


class Times(torch.autograd.Function):
    """x W with a derivative of its own."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


@case
def custom_function_alone():
    return made(Net(lambda s, x: torch.tanh(Times.apply(x, s.w) / 4), w=parameter(3, 2)), 3, 3)


@case
def scale_that_is_summed():
    return made(
        Net(lambda s, x: (x * s.w).sum(1, keepdim=True) + s.b, w=parameter(4), b=parameter(1)), 3, 4
    )
