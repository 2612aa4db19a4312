"""Rows of which it is hard to say to which sample they belong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from traps.cases import Case, Net, case, made, parameter


def positions(run: Callable[..., Any], **parts: Any) -> Case:
    return made(Net(run, out=nn.Linear(2, 3), **parts), 4, 3, 2)


@case
def positions_looked_up_for_all_and_then_indexed():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.arange(3)[None])[0])).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def positions_looked_up_for_all_and_then_averaged():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.arange(3)[None]).mean(0))).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def positions_looked_up_for_all_and_then_viewed():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.arange(3)[None]).view(3, 2))).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def positions_looked_up_for_all_and_read_twice():
    def run(s, x):
        places = s.places(torch.arange(3)[None])
        return s.out(torch.tanh(x + places)).mean(1) * places.sum()

    return positions(run, places=nn.Embedding(4, 2))


@case
def positions_looked_up_for_all_without_a_batch():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.arange(3)))).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def a_row_looked_up_for_each_sample_of_which_the_first_serves_all():
    def run(s, x):
        return s.out(torch.tanh(x + s.places(torch.zeros(len(x), dtype=torch.long))[0])).mean(1)

    return positions(run, places=nn.Embedding(4, 2))


@case
def a_parameter_expanded_to_the_batch_of_which_the_first_serves_all():
    def run(s, x):
        return s.out(x * s.hyper(s.p.expand(len(x), -1))[0]).mean(1)

    return positions(run, p=parameter(3), hyper=nn.Linear(3, 2))


@case
def a_scale_applied_to_samples_in_reverse_and_forward():
    def run(s, x):
        return s.out(torch.tanh(x * s.p + (x.flip(0).square() * s.p).flip(0))).mean(1)

    return positions(run, p=parameter(2))


@case
def layer_norm_on_samples_in_the_order_of_their_sums():
    def run(s, x):
        order = x.sum((1, 2)).argsort()
        return s.out(s.norm(x[order])[order.argsort()] + s.norm(x.square())).mean(1)

    return made(Net(run, norm=nn.LayerNorm(5), out=nn.Linear(5, 3)), 4, 2, 5)
