"""Samples that take different layers or use different weights, against the oracle one by one."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import Truth, oracle
from torch import nn
from traps import Net

import flatlens as fl
from flatlens.algebra.student import plain_rtol
from flatlens.compat import make_torchvision_importable
from flatlens.inequalities.first_layers import find_first_layers
from flatlens.passes.slots import Slots
from flatlens.per_sample import norm_per_sample, used_by
from flatlens.probes import LayerProbe, Probe

RTOL = 1e-10
COLUMNS = ("x_norm", "patch_min", "grad_weight", "grad_bias", "untied", "untied_bias", "adaptive")


# -- networks ------------------------------------------------------------------


def per_sample(run: Callable) -> Callable:
    """A forward that runs each sample by itself."""
    return lambda net, x: torch.cat([run(net, row[None]) for row in x])


def if_else():
    """Each sample takes one of two layers of equal shape, whose sizes differ by 20."""
    net = Net(per_sample(lambda net, x: (net.a if x[0, 0] > 0 else net.b)(x)),
              a=nn.Linear(4, 3), b=nn.Linear(4, 3, bias=False))  # fmt: skip
    with torch.no_grad():
        net.b.weight *= 20
    return net, (6, 4)


class MixtureOfExperts(nn.Module):
    """Each row of the input goes to the one expert that the gate chooses."""

    def __init__(self, outputs=2):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))
        self.out = nn.Linear(5, outputs)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = x.new_zeros(*x.shape[:-1], 5)
        for k, expert in enumerate(self.experts):
            taken = (chosen == k).nonzero(as_tuple=True)
            y = y.index_put(taken, weight[taken][:, None] * expert(x[taken]))
        return self.out(y.tanh())


def mixture_of_experts():
    return MixtureOfExperts(), (7, 4)


def tokens_to_experts():
    """The tokens of one sample go to several experts, another number for each sample."""
    experts = MixtureOfExperts()
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), experts, nn.Flatten()), (5, 3, 4)


def one_token_or_more():
    """A sample whose expert gets fewer entries than there are outputs."""
    mean = Net(lambda net, x: x.mean(1))
    return nn.Sequential(MixtureOfExperts(6), mean), (6, 5, 4)


def kernel_per_sample():
    """The kernel is scaled by a gate that the sample sets; one grouped convolution for all."""

    def run(net, x):
        b, c, h, w = x.shape
        kernel = net.gate(x.mean((2, 3))).sigmoid().view(b, 1, 1, 1, 1) * net.kernel
        images, kernels = x.reshape(1, b * c, h, w), kernel.reshape(b * 4, c, 3, 3)
        return F.conv2d(images, kernels, padding=1, groups=b).reshape(b, 4, -1).mean(2)

    return Net(run, kernel=nn.Parameter(torch.randn(4, 2, 3, 3)), gate=nn.Linear(2, 1)), (
        4,
        2,
        5,
        5,
    )


def hypernetwork():
    def run(net, x):
        return net.out(F.linear(x, net.hyper(x.square()).view(5, 4)).tanh())

    return Net(per_sample(run), hyper=nn.Linear(4, 20), out=nn.Linear(5, 3)), (5, 4)


def adaptive_depth():
    """A block of its own for each step; a sample takes as many steps as it asks for."""

    def run(net, x):
        steps = int(x[0, 0].abs() * 3) % 4
        for block in net.blocks[:steps]:
            x = x + block(x).tanh()
        return net.out(x)

    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    return Net(per_sample(run), blocks=blocks, out=nn.Linear(4, 2)), (6, 4)


def adaptive_repeats():
    """One block, passed as often as a sample asks for."""

    def run(net, x):
        for _ in range(1 + int(x[0, 0].abs() * 3) % 3):
            x = net.block(x).tanh()
        return net.out(x)

    return Net(per_sample(run), block=nn.Linear(4, 4), out=nn.Linear(4, 2)), (6, 4)


def some_samples_pass_no_layer():
    """Early exit: f = x for one sample, and 0.01 x through a layer for another."""
    net = Net(per_sample(lambda net, x: net.a(x) if x[0, 0] > 0 else 1.0 * x),
              a=nn.Linear(3, 3, bias=False))  # fmt: skip
    with torch.no_grad():
        net.a.weight.copy_(0.01 * torch.eye(3))
    return net, (6, 3)


def routed_kernels():
    """Convolutions with kernels of different sizes, then a common layer."""

    def run(net, x):
        return net.out((net.a if x.sum() > 0 else net.b)(x).tanh().mean((2, 3)))

    return Net(per_sample(run), a=nn.Conv2d(2, 3, 3, padding=1), b=nn.Conv2d(2, 3, 5, padding=2),
               out=nn.Linear(3, 2)), (5, 2, 6, 6)  # fmt: skip


def image_sizes():
    """One convolution on images whose size the sample sets."""

    def run(net, x):
        side = 4 if x.sum() > 0 else 6
        return net.out(net.a(x[..., :side, :side]).tanh().mean((2, 3)))

    return Net(per_sample(run), a=nn.Conv2d(2, 3, 3, padding=1), out=nn.Linear(3, 2)), (5, 2, 6, 6)


def conditional_convolution():
    make_torchvision_importable()
    layers = pytest.importorskip("timm.layers")
    net = Net(lambda net, x: net.conv(x, net.route(x.mean((2, 3))).sigmoid()).mean((2, 3)),
              conv=layers.CondConv2d(2, 3, 3, padding=1, num_experts=3),
              route=nn.Linear(2, 3))  # fmt: skip
    return net, (4, 2, 5, 5)


CASES = {
    build.__name__: build
    for build in (
        if_else,
        mixture_of_experts,
        tokens_to_experts,
        one_token_or_more,
        kernel_per_sample,
        hypernetwork,
        adaptive_depth,
        adaptive_repeats,
        some_samples_pass_no_layer,
        routed_kernels,
        image_sizes,
        conditional_convolution,
    )
}
every_case = pytest.mark.parametrize("name", CASES)


@functools.cache
def case(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model, shape = CASES[name]()
    return model.double(), torch.randn(shape, dtype=torch.float64)


@functools.cache
def truths(name: str) -> list[Truth]:
    model, x = case(name)
    return [oracle(model, x[i : i + 1]) for i in range(len(x))]


@functools.cache
def measured(name: str, order: str = "as given") -> fl.Measurement:
    model, x = case(name)
    return fl.measure(model, x if order == "as given" else x.flip(0))


# -- numbers -------------------------------------------------------------------


def slots_of_sample(p: Probe, i: int, t: Truth) -> list[LayerProbe]:
    """The slot of each call of sample i, in the order of its calls."""
    left = [q for q in p.layers if used_by(q)[i]]
    names = {want.name for want in t.layers}
    slots = []
    for want in t.layers:
        named = [q for q in left if q.name == want.name]
        slots.append(named[0] if named else next(q for q in left if q.name not in names))
        left.remove(slots[-1])
    assert not left, [q.name for q in left]
    return slots


def agree(p: Probe, each: list[Truth]) -> None:
    """Every number of a probe against the oracle of each sample by itself."""
    for i, t in enumerate(each):
        np.testing.assert_allclose(p.input.singular[i], t.input.singular[0], RTOL, 1e-14)
        for got, want in zip(p.parameters, t.parameters, strict=True):
            np.testing.assert_allclose(got.grad[i], want.grad[0], RTOL, 1e-20)
            np.testing.assert_allclose(got.adaptive[i], want.adaptive[0], RTOL, 1e-20)
        for got, want in zip(slots_of_sample(p, i, t), t.layers, strict=True):
            r = want.singular.shape[1]
            for spectrum in ("singular", "singular_through"):
                found = getattr(got, spectrum)[i]
                np.testing.assert_allclose(found[:r], getattr(want, spectrum)[0], RTOL, 1e-13)
                assert not found[r:].any()
            for column in COLUMNS:
                actual, desired = getattr(got, column)[i], getattr(want, column)[0]
                np.testing.assert_allclose(actual, desired, RTOL, 1e-20, err_msg=column)
            for norm in ("operator", "kernel", "frobenius"):
                actual = norm_per_sample(got, norm)[i]
                np.testing.assert_allclose(actual, getattr(want, norm), 1e-7)
            assert got.positions >= want.positions


@every_case
def test_every_number_is_that_of_the_sample_alone(name):
    agree(measured(name).probe, truths(name))


@every_case
def test_means_are_means_of_the_samples(name):
    m, each = measured(name), [t.per_sample() for t in truths(name)]
    for metric, values in m.samples.items():
        if metric in each[0]:
            want = [float(np.ravel(t[metric])[0]) for t in each]
            np.testing.assert_allclose(values, want, 1e-8, 1e-14, err_msg=metric)


@every_case
def test_absent_samples_add_nothing(name):
    for q in measured(name).probe.layers:
        absent = ~used_by(q)
        for column in ("singular", "singular_through", "grad_weight", "untied", "adaptive"):
            assert not getattr(q, column)[absent].any()
        assert np.isinf(q.x_norm[absent]).all()


@pytest.mark.slow
@every_case
def test_the_order_of_samples_changes_nothing(name):
    one, two = measured(name), measured(name, "reversed")
    for metric, value in one.values.items():
        assert two[metric] == pytest.approx(value, rel=1e-12), metric
    for got, want in zip(two.bounds, one.bounds, strict=True):
        assert (got.name, got.verdict, got.holds) == (want.name, want.verdict, want.holds)
        np.testing.assert_allclose([got.lhs, got.rhs], [want.lhs, want.rhs], 1e-9)
    assert sorted(q.name for q in two.probe.layers) == sorted(q.name for q in one.probe.layers)
    columns = ["name", "samples", "norm", "mls", "sharpness", "x_norm", "positions"]
    rows = [sorted(tuple(row[c] for c in columns) for row in m.rows) for m in (one, two)]
    for got, want in zip(*rows, strict=True):
        assert got[:2] == want[:2]
        np.testing.assert_allclose(got[2:], want[2:], 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", ["if_else", "mixture_of_experts", "kernel_per_sample"])
def test_chunks_of_samples_change_nothing(name, chunk):
    model, x = case(name)
    p = fl.probe(model, x, chunk=chunk)
    agree(p, truths(name))
    assert [q.name for q in p.layers] == [q.name for q in measured(name).probe.layers]


@pytest.mark.slow
@every_case
def test_shards_of_the_samples_are_merged_by_slot(name):
    model, x = case(name)
    merged = fl.probe(model, x[:2]).merge(fl.probe(model, x[2:3]), fl.probe(model, x[3:]))
    agree(merged, truths(name))
    for got, want in zip(fl.bounds(merged), measured(name).bounds, strict=True):
        assert (got.name, got.verdict, got.holds) == (want.name, want.verdict, want.holds)
        np.testing.assert_allclose([got.lhs, got.rhs], [want.lhs, want.rhs], 1e-9)


@every_case
def test_theorems_hold(name):
    failed = [b.name for b in measured(name).bounds if b.verdict == "theorem" and not b.holds]
    assert not failed
    for row in measured(name).rows:
        assert row["eq5_verdict"] != "theorem" or row["eq5_slack"] >= 1 - 1e-9


# -- what the table says -------------------------------------------------------


def test_experts_are_leaves_that_are_used_once():
    m = measured("if_else")
    rows = {row["name"]: row for row in m.rows}
    assert {name: row["samples"] for name, row in rows.items()} == {"a": 4, "b": 2}
    for name in ("eq6", "eq9", "eq11", "eq48_ab", "eq12", "eq10", "eq35", "eq44", "log_volume"):
        assert m.bounds[name].verdict == "theorem", m.bounds[name].why
    assert m["eq37"].verdict == "not applicable"
    assert "differs from sample to sample" in m["eq37"].why


def test_an_expert_without_a_token_is_not_used_by_the_sample():
    """The network calls each expert, also on no row at all; to autograd its weights look used."""
    torch.manual_seed(0)
    net, shape = MixtureOfExperts().double(), (7, 4)
    p = fl.probe(net, torch.randn(*shape).double())
    paths = {q.name: q.path for q in p.parameters if "experts" in q.name}
    assert set(paths.values()) == {"layer", "rule"}  # weights, biases
    assert p.unmeasured == []
    assert "not measured" not in fl.bounds(p)["eq12"].why


def test_a_block_that_one_sample_passes_twice_is_used_twice():
    m = measured("adaptive_repeats")
    assert {row["name"] for row in m.rows} == {"block", "block#2", "block#3", "out"}
    assert m["eq12"].verdict == "observation"
    assert "block.weight is used 3 times" in m["eq12"].why


def test_a_computed_weight_has_a_norm_for_each_sample():
    m = measured("kernel_per_sample")
    layer = next(q for q in m.probe.layers if q.kind == "conv2d")
    assert len(set(layer.norm_i.round(12))) == len(layer.norm_i)
    assert layer.norm == layer.norm_i.max()
    assert m["eq12"].verdict == "observation"
    assert m["eq12_untied"].verdict == "theorem"


def test_a_sample_without_a_first_layer_makes_an_observation():
    m = measured("some_samples_pass_no_layer")
    first = find_first_layers(m.probe)
    assert 0 < first.without < m.probe.n
    for name in ("eq6", "eq11", "eq48_ab", "log_volume"):
        assert m.bounds[name].verdict == "observation"
        assert "no measured layer that reads the network's input" in m.bounds[name].why
    assert not m["eq11"].holds


def test_equal_routes_have_no_columns_per_sample():
    p = fl.probe(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), torch.randn(5, 3), chunk=2)
    assert p.layers[0].norm_i is None
    assert p.layers[0].entries is None
    assert used_by(p.layers[0]).all()


def test_sharpness_alone_is_the_same():
    model, x = case("mixture_of_experts")
    short = fl.measure(model, x, quantities="sharpness")["sharpness"]
    assert short == pytest.approx(measured("mixture_of_experts")["sharpness"], rel=1e-12)


def test_outputs_of_another_size_are_refused():
    model = Net(lambda net, x: net.a(x) if x[0, 0] > 0 else net.b(x),
                a=nn.Linear(2, 3), b=nn.Linear(2, 4))  # fmt: skip
    x = torch.tensor([[1.0, 2.0], [-1.0, 2.0]])
    with pytest.raises(fl.FlatlensError, match="outputs"):
        fl.probe(model, x, chunk=1)


def plain_error(value: float, error: float, directions: int = 4) -> float:
    """The plain standard error behind the one that is reported, which is on the log scale."""
    return value * plain_rtol(error / value, directions) if error > 0 else 0.0


@pytest.mark.slow
def test_a_sketch_of_routed_samples_is_that_of_each_sample():
    torch.manual_seed(0)
    model, x = MixtureOfExperts(40).double(), torch.randn(6, 4, dtype=torch.float64)
    options = {"method": "sketch", "directions": 4}
    m, each = fl.measure(model, x, **options), [fl.measure(model, r[None], **options) for r in x]
    for name in ("sharpness", "sharpness_untied", "adaptive_sharpness", "nmls"):
        assert m[name] == pytest.approx(np.mean([one[name] for one in each]), rel=1e-10)
    plain = [plain_error(one["sharpness"], one["sharpness_se"]) for one in each]
    error = np.sqrt(np.sum(np.square(plain))) / len(x)
    assert plain_error(m["sharpness"], m["sharpness_se"]) == pytest.approx(error, rel=1e-8)
    for row in m.rows:
        its = [r for one in each for r in one.rows if r["name"] == row["name"]]
        assert len(its) == row["samples"]
        assert row["sharpness"] == pytest.approx(np.mean([r["sharpness"] for r in its]), rel=1e-10)
        plain = [plain_error(r["sharpness"], r["sharpness_se"]) for r in its]
        error = np.sqrt(np.sum(np.square(plain))) / len(its)
        assert plain_error(row["sharpness"], row["sharpness_se"]) == pytest.approx(error, rel=1e-8)


# -- theorems of random routed networks ----------------------------------------


class RoutedTwice(nn.Module):
    """Two layers; each sample takes one of three experts, then one of two."""

    def __init__(self, bias: bool):
        super().__init__()
        scale = lambda: 10 ** (3 * torch.rand(()) - 1.5)  # noqa: E731
        self.first = nn.ModuleList(nn.Linear(3, 4, bias=bias) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(4, 2, bias=bias) for _ in range(2))
        with torch.no_grad():
            for layer in (*self.first, *self.second):
                layer.weight *= scale()

    def forward(self, x):
        rows = []
        for row in x:
            z = self.first[int(row[0].abs() * 7) % 3](row[None]).tanh()
            rows.append(self.second[int(row[1].abs() * 7) % 2](z))
        return torch.cat(rows)


@pytest.mark.slow
def test_theorems_hold_for_random_routed_networks():
    torch.manual_seed(0)
    theorems = 0
    for k in range(200):
        model = RoutedTwice(bool(k % 2)).double()
        x = torch.randn(4, 3, dtype=torch.float64) * 10 ** (2 * torch.rand(4, 1) - 1).double()
        for b in fl.measure(model, x).bounds:
            theorems += b.verdict == "theorem"
            assert b.verdict != "theorem" or b.holds, (k, b)
    assert theorems >= 200 * 15


# -- the tests can fail --------------------------------------------------------


@pytest.mark.parametrize("name", ["if_else", "mixture_of_experts", "kernel_per_sample"])
def test_booking_all_samples_under_the_first_ones_layer_is_caught(name, monkeypatch):
    assign = Slots.assign

    def by_place(self, layers, start, samples):
        self._owned = {**self._owned, **{id(q.parameter): "any" for q in layers}}
        return assign(self, layers, start, samples)

    monkeypatch.setattr(Slots, "_source", lambda self, facts: "any layer")
    monkeypatch.setattr(Slots, "assign", by_place)
    model, x = case(name)
    p = fl.probe(model, x)
    with pytest.raises((AssertionError, StopIteration, ValueError)):
        agree(p, truths(name))
