"""Norm layers and other elementwise layers with parameters."""

import torch
from torch import nn

from traps.cases import Net, case, frozen, made, parameter


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
