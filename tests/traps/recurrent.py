"""Recurrent networks: fused ones, cells, and loops written by hand."""

import torch
from torch import nn

from traps.cases import Net, case, made, parameter


@case
def gru():
    return made(
        Net(
            lambda s, x: s.out(s.rnn(x)[0][:, -1]),
            rnn=nn.GRU(2, 3, batch_first=True),
            out=nn.Linear(3, 2),
        ),
        3,
        4,
        2,
    )


@case
def lstm_two_layers_both_ways():
    return made(
        Net(
            lambda s, x: s.out(s.rnn(x.transpose(0, 1))[0][-1]),
            rnn=nn.LSTM(2, 2, num_layers=2, bidirectional=True),
            out=nn.Linear(4, 2),
        ),
        3,
        3,
        2,
    )


@case
def rnn_cell_in_a_loop():
    def run(s, x):
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = s.cell(x[:, t], h)
        return s.out(h)

    return made(Net(run, cell=nn.RNNCell(2, 3), out=nn.Linear(3, 2)), 3, 3, 2)


@case
def recurrent_linear_with_learned_start():
    def run(s, x):
        h = s.start.expand(len(x), -1)
        for t in range(x.shape[1]):
            h = torch.tanh(s.read(x[:, t]) + s.turn(h))
        return s.out(h)

    net = Net(
        run, start=parameter(3), read=nn.Linear(2, 3), turn=nn.Linear(3, 3), out=nn.Linear(3, 2)
    )
    return made(net, 3, 3, 2)
