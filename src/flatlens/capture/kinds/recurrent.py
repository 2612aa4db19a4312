"""Recurrent layers, unrolled step by step: every step calls linear layers with the same weights.

``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and their cells hide their products in one fused function. Here
the function is written out, so that ``weight_ih``, ``weight_hh`` and ``weight_hr`` are measured as
layers with one call for each step. A packed sequence is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatlens.capture.kinds.linear import call_linear
from flatlens.capture.recording import Recording

State = tuple[Tensor, ...]  # h, and c of an LSTM


@dataclass(frozen=True)
class Weights:
    """The parameters of one layer in one direction."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None  # projection of an LSTM

    def gates(self, recording: Recording, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the contributions of the input and of the state to the gates."""
        from_input = call_linear(recording, x, self.ih, self.bias_ih)
        return from_input, call_linear(recording, h, self.hh, self.bias_hh)


Step = Callable[[Recording, Tensor, State, Weights], State]


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(recording: Recording, x: Tensor, state: State, weights: Weights) -> State:
        from_input, from_state = weights.gates(recording, x, state[0])
        return (activation(from_input + from_state),)

    return step


def _lstm_step(recording: Recording, x: Tensor, state: State, weights: Weights) -> State:
    h, c = state
    from_input, from_state = weights.gates(recording, x, h)
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if weights.hr is None else call_linear(recording, h, weights.hr)), c


def _gru_step(recording: Recording, x: Tensor, state: State, weights: Weights) -> State:
    (h,) = state
    from_input, from_state = weights.gates(recording, x, h)
    (r, z, n), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    reset, update = (r + r_h).sigmoid(), (z + z_h).sigmoid()
    new = (n + reset * n_h).tanh()
    return (new + update * (h - new),)


STEPS: dict[str, Step] = {
    "rnn_tanh": _rnn_step(torch.tanh),
    "rnn_relu": _rnn_step(torch.relu),
    "lstm": _lstm_step,
    "gru": _gru_step,
}


def _sequence(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Unroll a whole sequence, layer by layer and in both directions."""
    if len(args) != 9 or kwargs or isinstance(args[-1], Tensor) or not _is_sequence(args):
        return func(*args, **kwargs)
    x, hx, flat, biases, layers, dropout, training, both_ways, batch_first = args
    if dropout and training:
        return func(*args, **kwargs)
    step = STEPS[func.__name__]
    states = _start(hx)
    time = 1 if batch_first and x.dim() == 3 else 0
    steps = list(x.unbind(time))
    each = _weights(flat, biases, layers * (1 + both_ways))
    last: list[State] = []
    for _ in range(layers):
        outputs = []
        for way in range(2 if both_ways else 1):
            number = len(last)
            state = tuple(s[number] for s in states)
            hidden, state = _unroll(recording, step, steps, state, each[number], way == 1)
            outputs.append(hidden)
            last.append(state)
        steps = [
            torch.cat(pair, -1) if both_ways else pair[0] for pair in zip(*outputs, strict=True)
        ]
    ends = [torch.stack(kind) for kind in zip(*last, strict=True)]
    return (torch.stack(steps, time), *ends)


def _start(hx: Any) -> State:
    """Return the initial state; a constant gets an edge, as gates and products both read it."""
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    return tuple(s if s.requires_grad else s.detach().requires_grad_() for s in states)


def _is_sequence(args: Any) -> bool:
    """Whether these are the arguments of a plain sequence, not of a packed one."""
    return isinstance(args[2], (tuple, list)) and isinstance(args[3], bool)


def _weights(flat: Sequence[Tensor], biases: bool, count: int) -> list[Weights]:
    """Split the flat list of ``count`` sets of parameters: ih, hh, biases, and the projection."""
    size = len(flat) // count
    projected = size == 3 + 2 * biases
    groups = [flat[k : k + size] for k in range(0, len(flat), size)]
    return [
        Weights(
            g[0],
            g[1],
            g[2] if biases else None,
            g[3] if biases else None,
            g[-1] if projected else None,
        )
        for g in groups
    ]


def _unroll(
    recording: Recording,
    step: Step,
    steps: list[Tensor],
    state: State,
    weights: Weights,
    backwards: bool,
) -> tuple[list[Tensor], State]:
    """Run one layer in one direction; return its outputs in time order, and its last state."""
    outputs = []
    for x in reversed(steps) if backwards else steps:
        state = step(recording, x, state, weights)
        outputs.append(state[0])
    return (outputs[::-1] if backwards else outputs), state


def _cell(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Run one step of a cell."""
    x, hx, *parameters = args
    if kwargs or len(parameters) < 2:
        return func(*args, **kwargs)
    state = _start(hx)
    step = STEPS[func.__name__.removesuffix("_cell")]
    end = step(recording, x, state, Weights(*parameters))
    return end[0] if len(end) == 1 else end


HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.rnn_tanh, torch.rnn_relu, torch.lstm, torch.gru), _sequence),
    **dict.fromkeys(
        (torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.lstm_cell, torch.gru_cell), _cell
    ),
}
