"""Modules that are called more than once, and parameters that layers share."""

import torch
import torch.nn.functional as F
from torch import nn

from traps.cases import Net, case, made, parameter


@case
def module_called_twice():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(torch.tanh(s.a(x))))),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 3),
        ),
        3,
        4,
    )


@case
def module_called_on_different_position_counts():
    def run(s, x):
        h = torch.tanh(s.a(x))
        return s.a(h.mean(1)) + s.b(h[:, :2]).sum(1)

    return made(Net(run, a=nn.Linear(3, 3), b=nn.Linear(3, 3)), 3, 4, 3)


@case
def module_list_reused_in_a_loop():
    def run(s, x):
        for _ in range(3):
            for layer in s.layers:
                x = torch.tanh(layer(x))
        return x

    return made(
        Net(run, layers=nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3, bias=False)])), 3, 3
    )


@case
def conv_called_twice():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(torch.tanh(s.a(x)))).flatten(1)),
            a=nn.Conv2d(2, 2, 3, padding=1),
            b=nn.Linear(18, 3),
        ),
        3,
        2,
        3,
        3,
    )


@case
def tied_linear_linear():
    net = Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    net.b.weight = net.a.weight
    return made(net, 3, 4)


@case
def tied_transposed():
    return made(
        Net(
            lambda s, x: F.linear(torch.tanh(s.a(x)), s.a.weight.t(), s.shift),
            a=nn.Linear(4, 3),
            shift=parameter(4),
        ),
        3,
        4,
    )


@case
def tied_embedding_and_output():
    def run(s, x):
        h = s.emb((x > 0).long()).mean(1) + s.a(x)
        return s.out(torch.tanh(h))

    net = Net(run, emb=nn.Embedding(3, 4), a=nn.Linear(5, 4), out=nn.Linear(4, 3, bias=False))
    net.out.weight = net.emb.weight
    return made(net, 3, 5)


@case
def tied_embedding_with_padding_and_a_bias():
    def run(s, x):
        h = s.emb((x > 0).long() + (x > 1).long()) + s.a(x).unsqueeze(1)
        return s.out(torch.tanh(h)).flatten(1)

    net = Net(run, emb=nn.Embedding(3, 4, padding_idx=1), a=nn.Linear(5, 4), out=nn.Linear(4, 3))
    net.out.weight = net.emb.weight
    return made(net, 3, 5)


@case
def one_table_for_two_lookups_and_two_layers():
    def run(s, x):
        ids = (x > 0).long()
        encoded = torch.tanh(s.shared(ids)).mean(1) + s.a(x)
        decoded = s.shared(ids[:, :2] + 1).sum(1) * encoded
        again = nn.functional.linear(torch.tanh(decoded), s.shared.weight)
        return nn.functional.linear(again, s.shared.weight)

    net = Net(run, shared=nn.Embedding(3, 3), a=nn.Linear(5, 3))
    return made(net, 3, 5)


@case
def one_table_for_two_lookups_and_one_layer():
    def run(s, x):
        ids = (x > 0).long()
        encoded = torch.tanh(s.shared(ids)).mean(1) + s.a(x)
        decoded = s.shared(ids[:, :2] + 1).sum(1) * encoded
        return nn.functional.linear(torch.tanh(decoded), s.shared.weight)

    return made(Net(run, shared=nn.Embedding(3, 4), a=nn.Linear(5, 4)), 3, 5)


@case
def shared_bias():
    net = Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 3))
    net.b.bias = net.a.bias
    return made(net, 3, 4)


@case
def weight_used_in_a_linear_and_elsewhere():
    return made(
        Net(lambda s, x: s.a(x) + x * s.a.weight.sum() + s.a.weight.diagonal(), a=nn.Linear(3, 3)),
        3,
        3,
    )


@case
def bias_used_elsewhere():
    return made(Net(lambda s, x: torch.tanh(s.a(x)) * s.a.bias, a=nn.Linear(4, 3)), 3, 4)


@case
def functional_linear_on_another_modules_weight():
    return made(
        Net(
            lambda s, x: F.linear(torch.tanh(s.a(x)), s.a.weight, s.b.bias),
            a=nn.Linear(3, 3),
            b=nn.Linear(2, 3),
        ),
        3,
        3,
    )


@case
def one_matrix_as_weight_and_as_bias():
    return made(Net(lambda s, x: F.linear(x, s.w, s.w[0]), w=parameter(3, 3)), 3, 3)


@case
def tied_conv_and_linear():
    def run(s, x):
        return F.linear(torch.tanh(s.conv(x)).flatten(1), s.conv.weight.flatten(1))

    return made(Net(run, conv=nn.Conv1d(2, 3, 3)), 3, 2, 4)


@case
def tied_conv_and_transposed_conv():
    def run(s, x):
        return F.conv_transpose1d(torch.tanh(s.conv(x)), s.conv.weight, s.shift).mean(2)

    return made(Net(run, conv=nn.Conv1d(2, 3, 2), shift=parameter(2)), 3, 2, 4)


@case
def conv_weight_at_two_dilations_and_strides():
    def run(s, x):
        h = torch.tanh(F.conv1d(x, s.w, padding=1))
        return F.conv1d(h, s.w, dilation=2, stride=2).flatten(1)

    return made(Net(run, w=parameter(2, 2, 2)), 3, 2, 4)


@case
def weight_that_is_also_the_input_of_a_layer():
    """w is the weight of one layer and what another layer reads."""

    def run(s, x):
        return F.linear(x, s.w) + F.linear(s.w, s.v).sum()

    return made(Net(run, w=parameter(3, 4), v=parameter(2, 4)), 3, 4)
