"""Tokens and images that stand in another axis than usual, or are folded into the batch."""

import torch
from torch import nn

from traps.cases import Case, Net, case, made, parameter, shaken


@case
def tokens_with_two_leading_axes():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x))).mean((1, 2)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)
        ),
        3,
        2,
        3,
        3,
    )


@case
def tokens_folded_into_the_batch():
    def run(s, x):
        h = s.b(torch.tanh(s.a(x.reshape(-1, 3))))
        return h.reshape(len(x), -1, 2).mean(1)

    return made(Net(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), 3, 2, 3)


@case
def tokens_time_first():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x.transpose(0, 1)))).mean(0),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        ),
        3,
        2,
        3,
    )


@case
def tokens_time_first_as_many_as_samples():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x.transpose(0, 1)))).pow(2).mean(0),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        ),
        3,
        3,
        3,
    )


@case
def tokens_time_major_folded():
    def run(s, x):
        h = s.b(torch.tanh(s.a(x.transpose(0, 1).reshape(-1, 3))))
        return h.reshape(-1, len(x), 2).mean(0)

    return made(Net(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), 3, 3, 3)


@case
def tokens_that_cancel():
    """Tokens (u, -u) with a mean: the weight's gradient is exactly 0, the input's is not."""
    model = shaken(Net(lambda s, x: s.a(x).mean(1), a=nn.Linear(3, 2, bias=False)))
    u = torch.randn(3, 1, 3)
    return Case(model, torch.cat([u, -u], 1))


@case
def images_folded_into_the_batch_for_a_conv():
    def run(s, x):
        h = torch.tanh(s.a(x.flatten(0, 1)))
        return s.b(h.reshape(len(x), -1))

    return made(Net(run, a=nn.Conv1d(1, 2, 2), b=nn.Linear(8, 3)), 3, 2, 1, 3)


@case
def more_positions_than_features():
    return made(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(14, 2)), 3, 7, 2)


@case
def wide_rows_with_few_positions():
    return made(
        nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)), 3, 2, 12
    )


@case
def tokens_time_first_with_norm_and_scale_as_many_as_samples():
    def run(s, x):
        h = s.norm(s.a(x.transpose(0, 1))) * s.scale + s.shift
        return s.b(torch.tanh(h)).mean(0)

    parts = {"scale": parameter(4), "shift": parameter(3, 1, 4), "b": nn.Linear(4, 2)}
    return made(Net(run, a=nn.Linear(3, 4), norm=nn.LayerNorm(4), **parts), 3, 3, 3)


@case
def images_folded_time_major_for_a_conv():
    def run(s, x):
        h = torch.tanh(s.a(x.transpose(0, 1).flatten(0, 1)))
        return s.b(h.unflatten(0, (-1, len(x))).transpose(0, 1).flatten(1))

    return made(Net(run, a=nn.Conv1d(1, 2, 2), b=nn.Linear(8, 3)), 3, 2, 1, 3)
