"""A derivative that is not finite is refused and names the sample, by every method."""

import numpy as np
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.metrics import participation

WAYS = {
    "exact": lambda net, x: fl.probe(net, x),
    "one at a time": lambda net, x: fl.probe(net, x, chunk=1),
    "sketch": lambda net, x: fl.sketch(net, x, directions=2),
    "sketch of the input alone": lambda net, x: fl.sketch(net, x, directions=2, layers=False),
    "measure": lambda net, x: fl.measure(net, x),
}
every_way = pytest.mark.parametrize("way", WAYS)


class RootOfZero(nn.Module):
    """Add sqrt(0 x): its derivative by x is 0 times infinity, that by the weights is finite."""

    def __init__(self, N: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, N)

    def forward(self, x):
        return self.linear(x) + (0 * x).sum(1, keepdim=True).sqrt()


class Prototypes(nn.Module):
    """Distances to prototypes: their derivative by a sample that is a prototype is NaN."""

    def __init__(self, N: int) -> None:
        super().__init__()
        self.register_buffer("prototypes", torch.ones(2, 3))
        self.linear = nn.Linear(2, N)

    def forward(self, x):
        return self.linear((x[:, None] - self.prototypes).pow(2).sum(-1).sqrt())


class InfiniteSlope(nn.Module):
    """Add the square root of one entry: where it is 0 the derivative is infinite."""

    def __init__(self, N: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, N)

    def forward(self, x):
        return self.linear(x) + (x[:, :1] - 1).abs().sqrt()


class InsideAlone(nn.Module):
    """Only the derivative by a hidden layer's input is NaN: the input is detached."""

    def __init__(self, N: int) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(3, 3), nn.Linear(3, N)

    def forward(self, x):
        h = self.linear(x)
        zero = h - h.detach()
        return self.out(h) + (0 * zero).sum(1, keepdim=True).sqrt() * (x[:, :1] == 1)


@every_way
@pytest.mark.parametrize("N", [1, 2, 5, 40])
def test_nan_by_the_input_of_all_samples(N, way):
    torch.manual_seed(0)
    with pytest.raises(fl.FlatlensError, match=r"input gradient of sample 0 is not finite"):
        WAYS[way](RootOfZero(N), torch.randn(4, 3))


@every_way
@pytest.mark.parametrize("kind", [Prototypes, InfiniteSlope])
@pytest.mark.parametrize("N", [1, 2, 40])
def test_one_bad_sample_is_named(N, kind, way):
    torch.manual_seed(0)
    x = torch.randn(5, 3)
    x[3] = 1
    with pytest.raises(fl.FlatlensError, match=r"input gradient of sample 3 is not finite"):
        WAYS[way](kind(N), x)


@every_way
def test_nan_inside_the_network(way):
    torch.manual_seed(0)
    with pytest.raises(fl.FlatlensError, match=r"of sample 0 is not finite"):
        WAYS[way](InsideAlone(40), torch.ones(2, 3))


def test_nan_in_a_later_batch_counts_all_samples():
    torch.manual_seed(0)
    bad = torch.randn(2, 3)
    bad[1] = 1
    with pytest.raises(fl.FlatlensError, match=r"sample 5 is not finite"):
        fl.probe(Prototypes(2), [torch.randn(4, 3), bad])


def test_an_infinite_activation_before_a_frozen_layer_is_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.Hardtanh(), nn.Linear(2, 2))
    net[0].requires_grad_(False)

    class Blown(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x / x.abs().clamp(max=1).detach().floor())

    with pytest.raises(fl.FlatlensError, match=r"is not finite"):
        fl.probe(Blown(), torch.full((1, 2), 0.5))


class Corner(nn.Module):
    """|x - 1|^1.5: its first derivative at 1 is 0, its second one is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 40)
        self.after = nn.Linear(3, 40)

    def forward(self, x):
        return self.after((self.linear(x)[:, :3] * 0 + x - 1).abs().pow(1.5))


def test_the_exact_pass_needs_no_second_derivative():
    p = fl.probe(Corner(), torch.ones(2, 3))
    assert (p.input.singular == 0).all()


def test_lanczos_gives_a_number_or_names_the_sample():
    """The estimate is finite (0 here), or the refusal names the sample; never NaN."""
    p = fl.sketch(Corner(), torch.ones(2, 3), directions=2)
    assert (p.input.singular[:, 0] == 0).all()


def test_dimension_of_unknown_values_is_unknown():
    values = np.array([[np.nan, np.nan], [1.0, np.nan], [0.0, 0.0], [1.0, 1.0]])
    dimension = participation(values)
    assert np.isnan(dimension[:2]).all()
    assert dimension[2:].tolist() == [0.0, 2.0]
