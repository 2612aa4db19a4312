"""The Lipschitz sandwich: no violation on random chains, and its conditions are needed."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.perturb import margin_radius

MAPS = [
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Softplus, nn.CELU,
    nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, lambda: nn.GELU("tanh"), nn.Identity,
    lambda: nn.LeakyReLU(1.7), nn.Dropout,
]  # fmt: skip


def row(net, x):
    return fl.measure(net, x, quantities=["max_sensitivity", "lipschitz"]).bound("lipschitz")


def random_chain(seed: int):
    """Two to four dense layers of random width and scale with random maps between them."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    widths = rng.integers(1, 5, rng.integers(3, 6))
    parts = []
    for a, b in pairwise(widths):
        layer = nn.Linear(int(a), int(b)).double()
        layer.weight.data *= 10 ** rng.uniform(-1, 1)
        norm = nn.BatchNorm1d(int(b)).double()
        norm.running_var.fill_(float(rng.uniform(0.1, 2)))
        parts += [layer, *([norm] if rng.uniform() < 0.2 else []), MAPS[rng.integers(len(MAPS))]()]
    return nn.Sequential(*parts), 3 * torch.randn(2, int(widths[0])).double()


@pytest.mark.slow
def test_no_violation_on_random_chains():
    slack = []
    for seed in range(2000):
        net, x = random_chain(seed)
        p = fl.probe(net, x)
        inequality = fl.bounds(p)["lipschitz"]
        assert inequality.verdict == "theorem", (seed, inequality.why)
        assert inequality.holds, (seed, inequality)
        slack.append(inequality.slack)
    assert min(slack) < 1.05  # it is tight somewhere


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.GELU(), nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).double()  # fmt: skip


def test_convolutions_with_pooling_are_a_chain():
    inequality = row(conv_net(), torch.randn(3, 2, 8, 8).double())
    assert inequality.verdict == "theorem"
    assert inequality.holds


@pytest.mark.parametrize("options", [{"kernel_size": 3, "stride": 1}, {"kernel_size": 2}], ids=str)
def test_overlapping_pools_count_their_overlap(options):
    """All entries of a window equal the one that is read many times: sqrt(reads) is reached."""
    net = nn.Sequential(nn.Linear(25, 25, bias=False), nn.Unflatten(1, (1, 5, 5)))
    net = nn.Sequential(*net, nn.MaxPool2d(**options), nn.Flatten()).double()
    nn.init.eye_(net[0].weight)
    x = -torch.ones(1, 25).double()
    x[0, 12] = 1.0  # the middle one is the largest of every window that holds it
    inequality = row(net, x)
    reads = 9 if options["kernel_size"] == 3 else 1
    assert inequality.lhs == pytest.approx(reads**0.5)
    assert inequality.rhs == pytest.approx(reads**0.5)


class Residual(nn.Linear):
    def forward(self, x):
        return x + super().forward(x)


class Product(nn.Linear):
    def forward(self, x):
        z = super().forward(x)
        return z * z


class Repeated(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, :1] + torch.zeros(len(x), 5).double()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Residual(3, 3, bias=False), "joins several branches"),
        (lambda: Product(3, 3), "joins several branches"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "no known Lipschitz constant"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Softmax(1)), "no known Lipschitz constant"),
        (lambda: Repeated(3, 2), "repeated"),
    ],
)
def test_other_networks_are_not_judged(make, reason):
    torch.manual_seed(0)
    inequality = row(make().double(), torch.randn(2, 3).double())
    assert inequality.verdict == "not applicable"
    assert reason in inequality.why


@pytest.mark.parametrize(
    ("make", "scale"),
    [(lambda: Residual(3, 3, bias=False), 1.0), (lambda: Product(3, 3), 50.0),
     (lambda: Repeated(3, 2), 1.0)],
)  # fmt: skip
def test_without_its_condition_the_bound_fails(make, scale):
    """The product of norms alone is below the sensitivity of these networks."""
    torch.manual_seed(0)
    net = make().double()
    net.weight.data = 0.1 * torch.eye(*net.weight.shape).double()
    m = fl.measure(net, scale * torch.ones(2, 3).double())
    assert m["max_sensitivity"] > 1.01 * float(torch.linalg.matrix_norm(net.weight.detach(), 2))


def test_it_survives_merging_and_saving(tmp_path):
    net, x = conv_net(), torch.randn(4, 2, 8, 8).double()
    m = fl.measure(net, x)
    both = fl.probe(net, x[:2]).merge(fl.probe(net, x[2:]))
    assert fl.bounds(both)["lipschitz"].rhs == m.bound("lipschitz").rhs
    m.save(tmp_path / "m.json")
    assert fl.Measurement.load(tmp_path / "m.json").probe.chain == m.probe.chain


# -- margins


def test_margin_radius_is_the_distance_of_an_affine_network():
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).double(), torch.randn(6, 4).double()
    radii = margin_radius(net, x).samples
    W, f = net.weight.detach(), net(x).detach()
    top = f.topk(2, 1)
    for i in range(6):
        a, b = top.indices[i]
        want = (top.values[i, 0] - top.values[i, 1]) / (W[a] - W[b]).norm()
        assert radii[i] == pytest.approx(float(want), rel=1e-12)
    wrong = (f.argmax(1) + 1) % 3
    assert (margin_radius(net, x, wrong).samples < 0).all()
    assert all(p.grad is None for p in net.parameters())


def test_margins_need_two_outputs():
    with pytest.raises(fl.FlatlensError, match="one output"):
        margin_radius(copy.deepcopy(nn.Linear(2, 1)), torch.ones(1, 2))
