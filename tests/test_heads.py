"""Where a head narrower than the outputs saves products, and where it must not."""

import pytest
import torch
from torch import nn
from zoo import ZOO

import flatlens as fl
from flatlens import products

NARROW = ["narrow_head", "narrow_head_then_sigmoid", "narrow_head_then_softmax_reshaped"]
NARROW += ["narrow_head_of_lower_rank", "narrow_head_frozen"]
WIDE = ["narrow_head_then_learned_temperature", "narrow_head_beside_a_skip_from_the_input"]
WIDE += ["narrow_head_used_twice", "narrow_head_weight_normed", "narrow_head_on_tokens"]


@pytest.mark.parametrize("name", NARROW + WIDE)
def test_products_are_saved_only_behind_a_head(name, monkeypatch):
    seen = []
    real = products.Products._rows

    def counted(self, again):
        seen.append((self.N, self.outputs))
        return real(self, again)

    monkeypatch.setattr(products.Products, "_rows", counted)
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
