"""Inputs and outputs that are tuples, dicts, masks or have unusual axes."""

from dataclasses import replace

import torch
from torch import nn

from traps.cases import Case, Net, case, made, shaken


@case
def output_in_a_dict():
    return made(
        Net(
            lambda s, x: {"hidden": s.a(x), "logits": s.b(torch.tanh(s.a(x)))},
            a=nn.Linear(4, 3),
            b=nn.Linear(3, 2),
        ),
        3,
        4,
        output="logits",
    )


@case
def output_in_a_tuple():
    return made(
        Net(lambda s, x: (s.a(x), s.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 2)), 3, 4, output=1
    )


@case
def output_nested():
    net = Net(
        lambda s, x: {"heads": [s.a(x), (s.b(torch.tanh(s.a(x))),)]},
        a=nn.Linear(4, 3),
        b=nn.Linear(3, 2),
    )
    return made(net, 3, 4, output=lambda out: out["heads"][1][0])


@case
def output_of_two_axes():
    return made(
        Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3)), 3, 2, 3
    )


@case
def output_without_axes():
    return made(
        Net(lambda s, x: s.b(torch.tanh(s.a(x))).squeeze(1), a=nn.Linear(3, 4), b=nn.Linear(4, 1)),
        3,
        3,
    )


@case
def tuple_of_inputs():
    made_case = made(
        Net(
            lambda s, x, y: s.b(torch.tanh(s.a(x)) * y.flatten(1)),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        ),
        3,
        3,
    )
    return replace(made_case, x=(made_case.x, torch.randn(3, 2, 2)))


@case
def dict_of_inputs_with_token_ids():
    net = shaken(
        Net(
            lambda s, ids, gain: s.b(torch.tanh(s.a(s.emb(ids))).mean(1) * gain),
            emb=nn.Embedding(5, 3),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        )
    )
    return Case(net, {"ids": torch.randint(5, (3, 2)), "gain": torch.randn(3, 4)})


@case
def input_that_the_output_ignores():
    made_case = made(
        Net(lambda s, x, y: s.b(torch.tanh(s.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2)), 3, 3
    )
    return replace(made_case, x=(made_case.x, torch.randn(3, 2)))


@case
def boolean_mask_among_the_inputs():
    def run(s, x, padded):
        return s.attn(x, x, x, key_padding_mask=padded, need_weights=False)[0].mean(1)

    net = shaken(Net(run, attn=nn.MultiheadAttention(4, 2, batch_first=True)))
    padded = torch.tensor([[False, False, True], [False, True, True], [False, False, False]])
    return Case(net, (torch.randn(3, 3, 4), padded))
