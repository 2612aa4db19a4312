"""Where a head narrower than the outputs saves products, and where it must not."""

import pytest
import torch
from torch import nn
from traps import ZOO

import flatlens as fl
from flatlens.passes import exact
from flatlens.passes.derivative_rows import NeedsEachOutputError

NARROW = ["narrow_head", "narrow_head_then_sigmoid", "narrow_head_then_softmax_reshaped"]
NARROW += ["narrow_head_of_lower_rank", "narrow_head_frozen"]
WIDE = ["narrow_head_then_learned_temperature", "narrow_head_beside_a_skip_from_the_input"]
WIDE += ["narrow_head_used_twice", "narrow_head_weight_normed", "narrow_head_on_tokens"]


@pytest.mark.parametrize("name", NARROW + WIDE)
def test_products_are_saved_only_behind_a_head(name, monkeypatch):
    seen = []
    real = exact.collect

    def counted(setup, *options):
        seen.append((setup.count, setup.outputs))
        return real(setup, *options)

    monkeypatch.setattr(exact, "collect", counted)
    case = ZOO[name]()
    p = fl.probe(case.model, case.x)
    assert {outputs for _, outputs in seen} == {p.N}
    assert {rows for rows, _ in seen} == {4 if name in NARROW else p.N}


def test_a_wide_output_has_volume_zero_and_a_top_volume():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 40)).double()
    p = fl.probe(net, torch.randn(2, 5, dtype=torch.float64))
    assert p.input.singular.shape == (2, 5)
    assert fl.volume(p) == 0.0
    assert fl.log_volume(p) == -float("inf")
    assert -20 < fl.log_volume(p, top=3) < 20


@pytest.mark.parametrize("method", ["exact", "auto", "sketch"])
def test_where_a_head_is_lost_in_rounding_each_output_is_asked(method, monkeypatch):
    case = ZOO["narrow_head"]()
    want = fl.measure(case.model, case.x)["sharpness"]

    def lost(*_):
        raise NeedsEachOutputError

    monkeypatch.setattr(exact, "check_head", lost)
    m = fl.measure(case.model, case.x, method=method)
    assert m["sharpness"] == pytest.approx(want, rel=1e-12)


def test_outputs_that_are_saturated_are_asked_one_by_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 5), nn.Softmax(1)).double()
    with torch.no_grad():
        net[2].weight *= 300
    x = torch.randn(2, 2, dtype=torch.float64)
    A = torch.stack([torch.autograd.functional.jacobian(net, v[None])[0, :, 0] for v in x])
    want = torch.linalg.svdvals(A)[:, 0]
    assert want.min() < 1e-10 < want.max()
    torch.testing.assert_close(
        torch.from_numpy(fl.probe(net, x).input.singular[:, 0]), want, rtol=1e-9, atol=0
    )
