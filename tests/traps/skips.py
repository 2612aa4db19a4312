"""Skip connections and branches: the derivative does not flow through one layer alone."""

import torch
from torch import nn

from traps.cases import Net, case, made


@case
def residual():
    return made(
        Net(lambda s, x: s.b(x + torch.tanh(s.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 3)), 3, 4
    )


@case
def residual_added_in_place():
    def run(s, x):
        h = s.a(x)
        h += x
        return s.b(torch.tanh(h))

    return made(Net(run, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), 3, 4)


@case
def skip_read_before_the_layer():
    def run(s, x):
        h = torch.sigmoid(s.a(x))
        skip = h**2
        return s.b(h) + skip

    return made(Net(run, a=nn.Linear(4, 3), b=nn.Linear(3, 3)), 3, 4)


@case
def dense_skip():
    def run(s, x):
        a = torch.tanh(s.a(x))
        b = torch.tanh(s.b(torch.cat([x, a], 1)))
        return s.c(torch.cat([x, a, b], 1))

    return made(Net(run, a=nn.Linear(3, 3), b=nn.Linear(6, 2), c=nn.Linear(8, 3)), 3, 3)


@case
def qkv_on_one_tensor():
    def run(s, x):
        q, k, v = s.q(x), s.k(x), s.v(x)
        return (torch.softmax(q @ k.transpose(1, 2), -1) @ v).mean(1)

    return made(Net(run, q=nn.Linear(3, 2), k=nn.Linear(3, 2), v=nn.Linear(3, 4)), 3, 4, 3)


@case
def two_heads_on_one_tensor():
    return made(
        Net(
            lambda s, x: torch.cat([s.b(h := torch.tanh(s.a(x))), s.c(h)], 1),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 2),
            c=nn.Linear(4, 2),
        ),
        3,
        4,
    )


@case
def skip_that_takes_half_of_the_layer_away():
    """A = B / 2: the total derivative is smaller than the one through the layer."""

    def run(s, x):
        h = torch.tanh(s.a(x))
        return s.b(h) - h @ s.b.weight.T / 2

    return made(Net(run, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), 3, 4)
