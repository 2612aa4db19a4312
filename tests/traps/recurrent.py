"""Recurrent networks: fused ones, cells, and loops written by hand."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

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


def read_last(s, x):
    return s.out(s.rnn(x)[0][:, -1])


@case
def gru_of_three_layers_without_biases():
    rnn = nn.GRU(2, 3, num_layers=3, bias=False, batch_first=True)
    return made(Net(read_last, rnn=rnn, out=nn.Linear(3, 2)), 3, 3, 2)


@case
def lstm_with_a_projection_both_ways():
    rnn = nn.LSTM(2, 4, num_layers=2, proj_size=3, bidirectional=True, batch_first=True)
    return made(Net(read_last, rnn=rnn, out=nn.Linear(6, 2)), 3, 3, 2)


@case
def lstm_whose_states_are_the_output():
    def run(s, x):
        _, (h, c) = s.rnn(x)
        return torch.cat([h[-1], c[0]], 1)

    return made(Net(run, rnn=nn.LSTM(2, 2, num_layers=2, batch_first=True)), 3, 3, 2)


@case
def rnn_with_relu_and_a_start_computed_from_the_input():
    def run(s, x):
        start = s.start(x[:, 0]).reshape(len(x), 2, 3).transpose(0, 1).contiguous()
        return s.rnn(x, start)[0].mean(1)

    rnn = nn.RNN(2, 3, nonlinearity="relu", bidirectional=True, batch_first=True)
    return made(Net(run, rnn=rnn, start=nn.Linear(2, 6)), 3, 3, 2)


@case
def lstm_and_gru_cells_in_a_loop():
    def run(s, x):
        state, h = None, None
        for t in range(x.shape[1]):
            state = s.one(x[:, t], state)
            h = s.two(state[0], h)
        return h

    return made(Net(run, one=nn.LSTMCell(2, 3), two=nn.GRUCell(3, 2)), 3, 3, 2)


@case
def lstm_on_a_single_step():
    rnn = nn.LSTM(2, 3, batch_first=True)
    return made(Net(read_last, rnn=rnn, out=nn.Linear(3, 2)), 3, 1, 2)


@case
def gru_called_twice():
    def run(s, x):
        return s.rnn(s.rnn(x)[0])[0].mean(1)

    return made(Net(run, rnn=nn.GRU(2, 2, batch_first=True)), 3, 2, 2)


@case
def lstm_with_a_projection_and_no_biases():
    rnn = nn.LSTM(2, 3, proj_size=2, bias=False, batch_first=True)
    return made(Net(read_last, rnn=rnn, out=nn.Linear(2, 2)), 3, 2, 2)


def packed(kind: type[nn.Module]):
    """Samples of different lengths in one packed sequence."""

    def run(s, x):
        lengths = (x[:, :, 0].abs() > 0.3).sum(1).clamp(min=1)
        _, state = s.rnn(pack_padded_sequence(x, lengths, True, enforce_sorted=False))
        return s.out((state[0] if isinstance(state, tuple) else state)[-1])

    return made(Net(run, rnn=kind(2, 3, batch_first=True), out=nn.Linear(3, 2)), 3, 4, 2)


@case
def packed_gru():
    return packed(nn.GRU)


@case
def packed_lstm():
    return packed(nn.LSTM)
