"""A bias that is broadcast, and padding that is not part of the layer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from traps.cases import Case, Net, case, made, parameter


@case
def bias_of_one_entry_for_all_outputs():
    net = Net(lambda s, x: s.out(torch.tanh(F.linear(x, s.w, s.b))), w=parameter(4, 3))
    net.b, net.out = parameter(1), nn.Linear(4, 2)
    return made(net, 3, 3)


@case
def bias_of_one_entry_in_addmm():
    net = Net(lambda s, x: s.out(torch.tanh(torch.addmm(s.b, x, s.w))), w=parameter(3, 4))
    net.b, net.out = parameter(1), nn.Linear(4, 2)
    return made(net, 3, 3)


@case
def bias_for_each_position():
    net = Net(lambda s, x: s.out(torch.tanh(F.linear(x, s.w, s.b))).mean(1), w=parameter(4, 3))
    net.b, net.out = parameter(2, 4), nn.Linear(4, 2)
    return made(net, 3, 2, 3)


@case
def bias_computed_for_each_sample():
    net = Net(lambda s, x: s.out(torch.tanh(F.linear(x, s.w, s.film(x)))), w=parameter(4, 3))
    net.film, net.out = nn.Linear(3, 4), nn.Linear(4, 2)
    return made(net, 3, 3)


def padded_by_hand(between: Callable[[Tensor], Any]) -> Case:
    def run(s, x):
        wide = F.pad(x, (1, 1, 1, 1), "circular")
        between(wide)
        return s.out((s.own(x).mean((2, 3)) + s.plain(wide).mean((2, 3))).tanh())

    own = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    net = Net(run, own=own, plain=nn.Conv2d(2, 3, 3, padding=1), out=nn.Linear(3, 2))
    return made(net, 3, 2, 3, 3)


@case
def padded_by_hand_and_again_by_the_layer():
    return padded_by_hand(lambda wide: None)


@case
def padded_by_hand_overwritten_and_then_read():
    return padded_by_hand(lambda wide: wide.mul_(3))
