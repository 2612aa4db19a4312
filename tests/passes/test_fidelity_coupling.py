"""Samples that depend on one another are refused on every path, also one sample at a time."""

import pytest
import torch
from torch import nn

import flatlens as fl

MIXES = {
    "earlier samples": lambda h: torch.cumsum(h, 0),
    "later samples": lambda h: torch.cumsum(h.flip(0), 0).flip(0),
    "all samples": lambda h: h - h.mean(0),
    "neighbours": lambda h: h + h.roll(1, 0),
    "third neighbours": lambda h: h + (h.roll(3, 0) if len(h) > 3 else 0),
    "all but the first sample": lambda h: torch.cat([h[:1], h[1:] + h[1:].mean(0)]),
    "the order": lambda h: h * torch.arange(1, len(h) + 1)[:, None],
    "the derivative alone": lambda h: h + h.mean(0) - h.mean(0).detach(),
}


class Net(nn.Module):
    """A mix over the batch, and something that only single samples can measure."""

    def __init__(self, mix, why: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(3, 1)
        self.table = nn.Parameter(torch.randn(4, 4))
        self.mix, self.why = mix, why
        self.double()

    def forward(self, x):
        h = self.mix(self.a(x))
        if self.why == "a layer without samples":
            h = h * self.c(torch.ones(2, 3).double()).sum()
        elif self.why == "no fast rule":
            h = h * torch.linalg.matrix_exp(self.table)[0]
        elif self.why == "more calls for more samples":
            h = torch.cat([torch.tanh(self.a(row[None])) for row in h])
        return self.b(h)


REASONS = ["a layer without samples", "no fast rule", "more calls for more samples", "none"]
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).double()


@pytest.mark.slow
@pytest.mark.parametrize("why", REASONS)
@pytest.mark.parametrize("mix", MIXES)
def test_coupled_samples_are_refused(mix, why):
    with pytest.raises(fl.FlatlensError, match="changes with the other samples"):
        fl.probe(Net(MIXES[mix], why), X)


@pytest.mark.parametrize("why", REASONS)
def test_independent_samples_are_measured(why):
    net = Net(torch.tanh, why)
    p = fl.probe(net, X)
    alone = fl.probe(net, X, chunk=1)
    assert fl.sharpness(p) == pytest.approx(fl.sharpness(alone), rel=1e-12)


@pytest.mark.parametrize("mix", [name for name in MIXES if name != "the derivative alone"])
@pytest.mark.parametrize("why", ["none", "a layer without samples"])
def test_a_chunk_of_one_by_memory_is_checked(monkeypatch, mix, why):
    from flatlens.passes import choice

    monkeypatch.setattr(choice, "bytes_per_sample", lambda *_: 1000)
    net = Net(MIXES[mix], why)
    with pytest.raises(fl.FlatlensError, match="changes with the other samples"):
        fl.probe(net, X, memory=1500)


def test_later_batches_are_checked_too():
    net = Net(MIXES["earlier samples"], "none")
    with pytest.raises(fl.FlatlensError, match="changes with the other samples"):
        fl.probe(net, [X[:1], X[1:]])


@pytest.mark.parametrize("quantities", [["sharpness"], ["sharpness", "mls"]])
def test_the_sharpness_alone_is_checked_too(quantities):
    net = Net(MIXES["earlier samples"], "a layer without samples")
    with pytest.raises(fl.FlatlensError, match="changes with the other samples"):
        fl.measure(net, X, quantities=quantities)


def test_chunk_1_of_the_user_measures_each_alone():
    net = Net(MIXES["earlier samples"], "none")
    p = fl.probe(net, X, chunk=1)
    assert torch.allclose(torch.from_numpy(p.output[3:4]), net(X[3:4]).detach())
