"""Tables of which samples take rows."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from traps.cases import Case, Net, case, shaken


def embedded(run: Callable[..., Any], **parts: Any) -> Case:
    net = shaken(Net(run, out=nn.Linear(2, 3), mix=nn.Linear(2, 2), **parts))
    tokens = torch.tensor([[0, 1, 1], [3, 2, 0], [1, 1, 1], [4, 0, 2]])
    return Case(net, (torch.randn(4, 3, 2), tokens))


@case
def tokens_beside_floats_repeat_within_a_sample():
    def run(s, x, tokens):
        return s.out(torch.tanh(s.mix(x + s.table(tokens)))).mean(1)

    return embedded(run, table=nn.Embedding(5, 2))


@case
def embedding_with_padding_counted_from_the_end():
    def run(s, x, tokens):
        return s.out(torch.tanh(s.mix(x * s.table(tokens)))).mean(1)

    return embedded(run, table=nn.Embedding(5, 2, padding_idx=-4))


@case
def one_table_looked_up_twice():
    def run(s, x, tokens):
        return s.out(torch.tanh(s.mix(x * s.table(tokens)) + s.table(tokens.flip(1)))).mean(1)

    return embedded(run, table=nn.Embedding(5, 2))


@case
def positions_looked_up_once_for_all_samples():
    def run(s, x, tokens):
        places = torch.arange(3).unsqueeze(0)
        return s.out(torch.tanh(s.mix(x + s.places(places) + s.table(tokens)))).mean(1)

    return embedded(run, table=nn.Embedding(5, 2), places=nn.Embedding(4, 2))


@case
def table_used_as_head():
    def run(s, x, tokens):
        return F.linear(torch.tanh(s.mix(x + s.table(tokens))).mean(1), s.table.weight)

    return embedded(run, table=nn.Embedding(5, 2))
