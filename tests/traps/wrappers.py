"""Wrapped networks, buffers, and networks left in training mode."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from traps.cases import Net, case, made


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
