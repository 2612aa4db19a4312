"""Weights that are computed from other parameters."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from traps.cases import Case, Net, case, conv_case, frozen, made


@case
def weight_norm():
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    return made(net, 3, 4)


@case
def weight_norm_conv_called_twice():
    a = parametrizations.weight_norm(nn.Conv1d(2, 2, 3, padding=1))
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(torch.tanh(s.a(x)))).flatten(1)), a=a, b=nn.Linear(6, 2)
        ),
        3,
        2,
        3,
    )


@case
def spectral_norm():
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    return Case(net, torch.randn(3, 4))


@case
def orthogonal():
    net = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    return Case(net, torch.randn(3, 4))


@case
def linear_subclass():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 0.5 * super().forward(x + 1)

    return made(nn.Sequential(Scaled(4, 4), nn.Tanh(), Scaled(4, 3, bias=False)), 3, 4)


@case
def conv_subclass_with_standardised_weight():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return self._conv_forward(x, w, self.bias)

    return conv_case(Standardised(1, 2, 2), 1, 3, 3)


def standardised_by_batch_norm(conv: nn.Conv2d) -> Case:
    def run(s, x):
        w = F.batch_norm(s.conv.weight.flatten(1)[None], None, None, training=True)
        return s.out(torch.tanh(s.conv._conv_forward(x, w.view_as(s.conv.weight), None)).flatten(1))

    return made(Net(run, conv=conv, out=nn.Linear(8, 3)), 3, 1, 3, 3)


@case
def conv_weight_standardised_by_batch_norm():
    return standardised_by_batch_norm(nn.Conv2d(1, 2, 2, bias=False))


@case
def frozen_conv_weight_standardised_by_batch_norm():
    return standardised_by_batch_norm(frozen(nn.Conv2d(1, 2, 2, bias=False)))


@case
def low_rank_adapter_on_a_frozen_layer():
    parts = {
        "down": nn.Linear(4, 1, bias=False),
        "up": nn.Linear(1, 4, bias=False),
        "out": nn.Linear(4, 3),
    }
    return made(
        Net(
            lambda s, x: s.out(torch.tanh(s.base(x) + s.up(s.down(x)))),
            base=frozen(nn.Linear(4, 4)),
            **parts,
        ),
        3,
        4,
    )


@case
def lazy_linear_materialised():
    net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    net(torch.zeros(1, 5))
    return made(net, 3, 5)
