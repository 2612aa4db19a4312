"""Views of parameters and permutations of the input change no number and no verdict."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from traps import Net, parameter

import flatlens as fl


def twins(viewed: Net, plain: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor):
    """A network with views and the same network without; ``weights`` are those of the second."""
    plain.load_state_dict(weights)
    return viewed.double(), plain.double(), x.double()


def transposed():
    net = Net(lambda s, x: F.linear(F.linear(x, s.w.t()).tanh(), s.v.mT),
              w=parameter(3, 4), v=parameter(4, 2))  # fmt: skip
    layers = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
    plain = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    return twins(net, plain, {"0.weight": net.w.t(), "2.weight": net.v.t()}, torch.randn(3, 3))


def cut_from_a_flat_parameter():
    net = Net(lambda s, x: F.linear(x, s.w.view(4, 3)).tanh(), w=parameter(12))
    plain = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh())
    return twins(net, plain, {"0.weight": net.w.view(4, 3)}, torch.randn(3, 3))


def copied_after_a_transpose():
    net = Net(lambda s, x: F.linear(x, s.w.t().contiguous()).tanh(), w=parameter(3, 4))
    plain = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh())
    return twins(net, plain, {"0.weight": net.w.t()}, torch.randn(3, 3))


def kernel_with_its_channels_last():
    net = Net(lambda s, x: F.conv2d(x, s.w.permute(3, 2, 0, 1)).tanh().flatten(1),
              w=parameter(2, 2, 3, 2))  # fmt: skip
    plain = nn.Sequential(nn.Conv2d(3, 2, 2, bias=False), nn.Tanh(), nn.Flatten())
    return twins(net, plain, {"0.weight": net.w.permute(3, 2, 0, 1)}, torch.randn(2, 3, 4, 4))


def permuted_input():
    net = Net(lambda s, x: s.a(x.permute(0, 2, 1).flatten(1)).tanh(), a=nn.Linear(6, 2))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(6, 2), nn.Tanh())
    weight = net.a.weight.view(2, 3, 2).transpose(1, 2).reshape(2, 6)
    return twins(net, plain, {"1.weight": weight, "1.bias": net.a.bias}, torch.randn(3, 2, 3))


def permuted_output():
    net = Net(lambda s, x: s.a(x).view(-1, 2, 3).transpose(1, 2), a=nn.Linear(4, 6))
    weights = {"weight": net.a.weight, "bias": net.a.bias}
    return twins(net, nn.Linear(4, 6), weights, torch.randn(3, 4))


CASES = (transposed, cut_from_a_flat_parameter, copied_after_a_transpose,
         kernel_with_its_channels_last, permuted_input, permuted_output)  # fmt: skip


@pytest.mark.parametrize("build", CASES)
def test_a_view_changes_no_number_and_no_verdict(build):
    torch.manual_seed(0)
    viewed, plain, x = build()
    m, want = fl.measure(viewed, x), fl.measure(plain, x)
    for name, value in want.values.items():
        assert m[name] == pytest.approx(value, rel=1e-12), name
    for got, bound in zip(m.bounds, want.bounds, strict=True):
        assert (got.name, got.verdict) == (bound.name, bound.verdict), got.why
        if bound.verdict != "not applicable":
            assert got.lhs == pytest.approx(bound.lhs, rel=1e-9)
            assert got.rhs == pytest.approx(bound.rhs, rel=1e-9)
    assert m["eq12_tied_rank"].verdict == "theorem"
    assert [q.path for q in m.probe.parameters] == [q.path for q in want.probe.parameters]


def test_a_view_that_has_other_uses_is_a_computed_weight():
    torch.manual_seed(0)
    net = Net(lambda s, x: F.linear(F.linear(x, s.w).tanh(), s.w.t()), w=parameter(4, 3)).double()
    m = fl.measure(net, torch.randn(3, 3).double())
    assert [row["weight"] for row in m.rows] == ["w", None]
    assert m["eq12"].verdict == "observation"


def test_half_of_a_parameter_is_not_the_parameter():
    torch.manual_seed(0)
    net = Net(lambda s, x: F.linear(F.linear(x, s.w[:3]).tanh(), s.w[3:]), w=parameter(6, 3))
    m = fl.measure(net.double(), torch.randn(3, 3).double())
    assert [row["weight"] for row in m.rows] == [None, None]
    assert m["eq12"].verdict == "observation"


def test_something_beside_a_permuted_input_makes_an_observation():
    torch.manual_seed(0)
    net = Net(lambda s, x: s.a(x.transpose(1, 2).reshape(len(x), -1)) + x.sum((1, 2))[:, None],
              a=nn.Linear(6, 2))  # fmt: skip
    m = fl.measure(net.double(), torch.randn(3, 2, 3).double())
    assert m["eq11"].verdict == "observation"
    assert "also read beside" in m["eq11"].why


def test_vmap_inside_the_model_is_measured():
    """The sharpness is right; layers inside the transform are not seen as layers."""
    torch.manual_seed(0)
    a, out = nn.Linear(4, 3), nn.Linear(3, 2)
    inside = Net(lambda s, x: s.out(torch.vmap(lambda r: s.a(r).tanh())(x)), a=a, out=out).double()
    plain = Net(lambda s, x: s.out(s.a(x).tanh()), a=a, out=out)
    x = torch.randn(3, 4).double()
    m, want = fl.measure(inside, x), fl.measure(plain, x)
    for name in ("sharpness", "adaptive_sharpness", "mls", "log_volume", "input_invariant_mls"):
        assert m[name] == pytest.approx(want[name], rel=1e-12), name


def test_token_ids_that_are_transposed_are_read_by_their_embedding():
    torch.manual_seed(0)
    table, out = nn.Embedding(9, 4), nn.Linear(4, 2)
    turned = Net(lambda s, ids: s.out(s.e(ids.t()).mean(0)), e=table, out=out).double()
    plain = Net(lambda s, ids: s.out(s.e(ids).mean(1)), e=table, out=out)
    for ids in (torch.randint(0, 9, (3, 5)), torch.tensor([[1, 2], [2, 1]])):
        m, want = fl.measure(turned, ids), fl.measure(plain, ids)
        for name in ("sharpness", "mls", "nmls", "log_volume"):
            assert m[name] == pytest.approx(want[name], rel=1e-12), name
