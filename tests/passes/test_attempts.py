"""Checks that are read at the end of a chunk give the numbers and messages of checks in place."""

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.algebra import looks
from flatlens.passes.attempts import Attempts
from flatlens.training import networks


class Apply(nn.Module):
    """Applies a function to the outputs of a small network."""

    def __init__(self, function, outputs=3):
        super().__init__()
        self.net = networks.mlp((4, 6, outputs), "tanh")
        self.function = function

    def forward(self, x):
        return self.function(self.net(x), x)


def samples(n=12):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1))


def with_row(number, value):
    x = samples()
    x[number] = value
    return x


def in_batches(x):
    return [x[:4], x[4:8], x[8:]]


UNUSUAL = {
    "an output is not finite": lambda: (
        Apply(lambda z, x: z / (x[:, :1] - 7)),
        with_row(6, 7.0),
    ),
    "a gradient is not finite": lambda: (
        Apply(lambda z, x: z + (x[:, :1] + 1).abs().sqrt()),
        with_row(7, -1.0),
    ),
    "samples change one another": lambda: (Apply(lambda z, x: z - z.mean(0)), samples()),
    "an input of a later batch is not finite": lambda: (
        Apply(lambda z, x: z),
        in_batches(with_row(9, torch.inf)),
    ),
    "a derivative vanishes in float32": lambda: (Apply(lambda z, x: z * 1e-25 * 1e-25), samples()),
    "derivatives are small": lambda: (Apply(lambda z, x: (8 * z).softmax(1) * 1e-4), samples()),
    "squares leave float32": lambda: (Apply(lambda z, x: z * 1e18), samples()),
    "a sample has no derivative": lambda: (
        Apply(lambda z, x: (z - 9 * x[:, :1]).relu()),
        samples(),
    ),
    "a head is saturated": lambda: (Apply(lambda z, x: (1e4 * z).sigmoid(), 9), samples()),
    "samples are equal": lambda: (Apply(lambda z, x: z), torch.ones(12, 4)),
}
WAYS = {
    "exact": {"method": "exact"},
    "sketch": {"method": "sketch", "directions": 2},
    "headline": {"quantities": "headline"},
    "sharpness": {"quantities": "sharpness"},
}


def outcome(case, way):
    """The numbers and notes of a measurement, or its message."""
    torch.manual_seed(0)
    model, x = case()
    try:
        m = fl.measure(model, x, chunk=4, **WAYS[way])
    except fl.FlatlensError as error:
        return str(error)
    return m.probe.notes, repr(m.to_dict())


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(looks, "can_look", lambda t: False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", UNUSUAL)
def test_an_unusual_chunk_ends_as_with_checks_in_place(case, way, monkeypatch):
    postponed = outcome(UNUSUAL[case], way)
    monkeypatch.setattr(Attempts, "begin", lambda self, f: None)
    assert postponed == outcome(UNUSUAL[case], way)


USUAL = {
    "mlp": lambda: (networks.mlp((4, 6, 5, 3), "tanh"), samples()),
    "head": lambda: (networks.mlp((4, 3, 9), "tanh"), samples()),
    "lenet": lambda: (networks.lenet(), torch.randn(8, 3, 32, 32)),
    "vit": lambda: (networks.vit(image=8, patch=4, dim=12, depth=1), torch.randn(8, 3, 8, 8)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", USUAL)
def test_a_usual_chunk_is_measured_once_and_to_the_last_bit(case, way, monkeypatch):
    calls = []
    usual = Attempts._usual
    monkeypatch.setattr(Attempts, "_usual", lambda *a: calls.append(usual(*a)) or calls[-1])
    postponed = outcome(USUAL[case], way)
    assert len(calls) >= 2
    assert None not in calls
    monkeypatch.setattr(Attempts, "begin", lambda self, f: None)
    assert postponed == outcome(USUAL[case], way)


def test_after_an_unusual_chunk_checks_stay_in_place():
    attempts = Attempts()
    attempts.begin(torch.zeros(1))
    seen = []

    def work():
        seen.append(looks.unusual(torch.tensor(True)))
        return len(seen)

    assert attempts.measure(work) == 2
    assert attempts.measure(work) == 3
    assert seen == [False, True, True]


def test_an_error_that_no_check_explains_is_raised_at_once():
    attempts = Attempts()
    attempts.begin(torch.zeros(1))
    runs = []

    def work():
        runs.append(looks.unusual(torch.tensor(False)))
        raise MemoryError

    with pytest.raises(MemoryError):
        attempts.measure(work)
    assert runs == [False]


def test_on_a_cpu_checks_are_read_in_place(monkeypatch):
    monkeypatch.undo()
    attempts = Attempts()
    attempts.begin(torch.zeros(1))
    assert attempts.measure(lambda: looks.unusual(torch.tensor(True)))
