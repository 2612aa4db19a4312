"""The short pass, where it differs from the whole one; all networks are in test_zoo."""

import pytest
import torch
from torch import nn

import flatlens as fl


def both(net, x, **options):
    """Sharpness alone, and from the whole pass."""
    alone = fl.measure(net, x, quantities=["sharpness"], **options)
    whole = fl.measure(net, x, **options)
    assert alone["sharpness"] == pytest.approx(whole["sharpness"], rel=1e-10)
    return alone


def test_less_memory_keeps_fewer_rows_before_fewer_samples():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 26 * 26, 10)).double()
    x = torch.randn(20, 1, 28, 28, dtype=torch.float64)
    little = both(net, x, memory=6 << 20)
    assert little.probe.chunk >= 8


def test_derivatives_whose_squares_vanish_in_float32():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))
    with torch.no_grad():
        net[2].weight.mul_(1e-25)
    x = torch.randn(4, 2, 5)
    alone = fl.measure(net, x, quantities=["sharpness"]).probe.parameters[0].grad
    exact = fl.measure(net.double(), x.double(), quantities=["sharpness"]).probe.parameters[0].grad
    assert (alone > 0).all()
    assert alone == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("positions", [2, 6, 40], ids="T={}".format)
def test_pairs_of_positions_that_cancel(positions):
    # the gradients of the first and the second half are equal and opposite, up to a billionth
    net = nn.Conv1d(30, 20, 1, bias=False).double()
    signs = torch.ones(positions, dtype=torch.float64)
    signs[positions // 2 :] = -1
    x = torch.ones(2, 30, positions, dtype=torch.float64)
    x[:, 0, 0] += 1e-9

    class Cancels(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return (self.net(x) * signs).sum(-1)

    m = fl.measure(Cancels(), x, quantities=["sharpness"])
    assert m["sharpness"] == pytest.approx(20 * 1e-18, rel=1e-6)


def test_a_narrow_head_takes_few_products():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 15), nn.Tanh(), nn.Linear(15, 40))
    both(net.double(), torch.randn(3, 6, dtype=torch.float64))


def test_many_outputs_are_sketched_without_spectra():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300)).double()
    x = torch.randn(2, 300, dtype=torch.float64)
    m = fl.measure(net, x, quantities=["sharpness"], method="sketch", directions=4)
    assert set(m.values) == {"sharpness", "sharpness_se"}
    assert m.layers.empty
    whole = fl.measure(net, x, method="sketch", directions=4)
    assert m["sharpness"] == pytest.approx(whole["sharpness"], rel=1e-12)
    assert m["sharpness_se"] == pytest.approx(whole["sharpness_se"], rel=1e-9)


def test_shares_merge_and_targets_are_read():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2).double(), torch.randn(6, 3, dtype=torch.float64)
    parts = [fl.measure(net, part, quantities=["sharpness"]).probe for part in x.split(2)]
    whole = both(net, x, y=torch.tensor([0, 1, 0, 1, 0, 1]))
    assert fl.sharpness(parts[0].merge(*parts[1:])) == pytest.approx(whole["sharpness"])
    assert {"loss", "accuracy"} < set(whole.values)


def test_it_says_what_is_not_there():
    m = fl.measure(nn.Linear(3, 2), torch.ones(1, 3), quantities=["sharpness"])
    assert "no layers, no inequalities" in str(m)
    assert m.to_dict() == {"sharpness": m["sharpness"]}
    assert list(m.samples) == ["sharpness"]
    assert m.layers.empty
    assert '"layers": []' in m.to_json()
    with pytest.raises(KeyError, match="there are sharpness"):
        m["eq12"]
    with pytest.raises(KeyError, match="there are sharpness"):
        m["mls"]
