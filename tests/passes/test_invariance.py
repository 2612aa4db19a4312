"""What must not change a number, and beside it what must (a check that cannot fail checks nothing).

Each test names the quantities that stay; the negative control names some that go.
"""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import flatlens as fl

RTOL = 1e-10
ITERATED = {"matrix_normalized_sharpness": 1e-6}  # a convolution's ||C||_2 comes from an iteration
QUANTITIES = (
    "sharpness",
    "sharpness_untied",
    "mls",
    "nmls",
    "nmls_through",
    "volume",
    "log_volume",
    "network_volume",
    "local_dimension",
    "normalized_mls",
    "input_invariant_mls",
    "adaptive_sharpness",
    "matrix_normalized_sharpness",
    "weighted_nmls",
)


def mlp(activation=nn.ReLU):
    return nn.Sequential(
        nn.Linear(6, 8), activation(), nn.Linear(8, 7), activation(), nn.Linear(7, 3)
    )


def conv_net(activation=nn.ReLU):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), activation(), nn.Conv2d(4, 3, 3), activation(),
        nn.Flatten(), nn.Linear(48, 3),
    )  # fmt: skip


SHAPES = {mlp: (6,), conv_net: (2, 6, 6)}
nets = pytest.mark.parametrize("make", [mlp, conv_net], ids=lambda make: make.__name__)


def case(make, n=6, **options):
    torch.manual_seed(0)
    net = make(**options).double().eval()
    return net, torch.randn(n, *SHAPES[make], dtype=torch.float64)


def orthogonal(size):
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]


def assert_same(m, reference, names=QUANTITIES):
    for name in names:
        assert m[name] == pytest.approx(reference[name], rel=ITERATED.get(name, RTOL)), name


def assert_different(m, reference, names):
    for name in names:
        assert m[name] != pytest.approx(reference[name], rel=1e-4), name


# ---------------------------------------------------------------- samples


@nets
def test_order_of_the_samples(make):
    net, x = case(make)
    order = torch.randperm(len(x))
    m, shuffled = fl.measure(net, x), fl.measure(net, x[order])
    assert_same(shuffled, m)
    for name, values in m.samples.items():
        expected = np.asarray(values)[order.numpy()]
        np.testing.assert_allclose(shuffled.samples[name], expected, rtol=RTOL, err_msg=name)


@nets
@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 100])
def test_chunk_size(make, chunk):
    net, x = case(make)
    m, chunked = fl.measure(net, x), fl.measure(net, x, chunk=chunk)
    assert_same(chunked, m)
    for name, values in m.samples.items():
        np.testing.assert_allclose(chunked.samples[name], values, rtol=RTOL, err_msg=name)


@nets
def test_every_sample_twice(make):
    net, x = case(make)
    assert_same(fl.measure(net, torch.cat([x, x])), fl.measure(net, x))


@nets
def test_control_one_sample_twice(make):
    net, x = case(make)
    m = fl.measure(net, torch.cat([x, x[:1]]))
    assert_different(m, fl.measure(net, x), ("sharpness", "mls", "volume", "local_dimension"))


# ---------------------------------------------------------------- outputs


class Rotated(nn.Module):
    """Q f(x) with a fixed matrix Q that is no parameter."""

    def __init__(self, net: nn.Module, q: torch.Tensor) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("q", q)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) @ self.q.mT


@nets
def test_rotation_of_the_outputs(make):
    """f -> Q f: every derivative is multiplied by Q from the left, no norm or spectrum changes."""
    net, x = case(make)
    assert_same(fl.measure(Rotated(net, orthogonal(3)), x), fl.measure(net, x))


@nets
def test_control_stretching_the_outputs(make):
    net, x = case(make)
    stretch = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert_different(fl.measure(Rotated(net, stretch), x), fl.measure(net, x), QUANTITIES)


@nets
def test_rotation_inside_the_last_layer(make):
    """W -> Q W, b -> Q b: the same; even Eq. 41, as sum_k W_kj^2 x_j^2 sees only column norms."""
    net, x = case(make)
    rotated, q = copy.deepcopy(net), orthogonal(3)
    rotated[-1].weight.data = q @ net[-1].weight.data
    rotated[-1].bias.data = q @ net[-1].bias.data
    assert_same(fl.measure(rotated, x), fl.measure(net, x))


# ---------------------------------------------------------------- inputs


def test_rotation_of_the_inputs():
    """x -> Q x, W_1 -> W_1 Q^T is the same function of the same data in other coordinates."""
    net, x = case(mlp)
    rotated, q = copy.deepcopy(net), orthogonal(6)
    rotated[0].weight.data = net[0].weight.data @ q.mT
    m, reference = fl.measure(rotated, x @ q.mT), fl.measure(net, x)
    elementwise = {"input_invariant_mls", "adaptive_sharpness"}  # these see the coordinates
    assert_same(m, reference, [name for name in QUANTITIES if name not in elementwise])
    assert_different(m, reference, elementwise)


def test_units_of_the_inputs():
    """x -> c x, W_1 -> W_1 / c: sharpness and MLS depend on the units, normalised ones do not."""
    net, x = case(mlp)
    scaled = copy.deepcopy(net)
    scaled[0].weight.data /= 10
    m, reference = fl.measure(scaled, 10 * x), fl.measure(net, x)
    assert_same(m, reference, ["normalized_mls", "input_invariant_mls", "adaptive_sharpness"])
    assert_same(m, reference, ["matrix_normalized_sharpness", "weighted_nmls", "local_dimension"])
    assert m["mls"] == pytest.approx(reference["mls"] / 10, rel=RTOL)
    assert m["log_volume"] == pytest.approx(reference["log_volume"] - 3 * math.log(10), rel=RTOL)
    assert_different(m, reference, ["sharpness", "nmls"])


# ---------------------------------------------------------------- hidden units


def permute_hidden(net, *, both_sides):
    """Renames the units between the first two layers, or (control) on one side only."""
    net = copy.deepcopy(net)
    first, second = net[0], net[2]
    order = torch.arange(len(first.weight)).roll(1)
    first.weight.data, first.bias.data = first.weight.data[order], first.bias.data[order]
    if both_sides:
        second.weight.data = second.weight.data[:, order]
    return net


@nets
def test_names_of_the_hidden_units(make):
    net, x = case(make)
    assert_same(fl.measure(permute_hidden(net, both_sides=True), x), fl.measure(net, x))


@nets
def test_control_permuting_one_side_only(make):
    net, x = case(make)
    m = fl.measure(permute_hidden(net, both_sides=False), x)
    names = ("sharpness", "mls", "nmls", "volume", "local_dimension")
    assert_different(m, fl.measure(net, x), names)


def rescale(net, alpha):
    """alpha times the first layer, 1/alpha times the second: with ReLU the same function."""
    net = copy.deepcopy(net)
    net[0].weight.data *= alpha
    net[0].bias.data *= alpha
    net[2].weight.data /= alpha
    return net


# What sees the function only, or weights each derivative by the weights it belongs to.
FUNCTION = ("mls", "volume", "log_volume", "local_dimension")
INVARIANT = ("normalized_mls", "input_invariant_mls", "adaptive_sharpness")


@nets
@pytest.mark.parametrize("alpha", [0.1, 3.0])
def test_rescaling_two_relu_layers_changes_sharpness_but_not_the_function(make, alpha):
    """The reparametrisation of Dinh et al. (2017), section 3.4 of the paper."""
    net, x = case(make)
    m, reference = fl.measure(rescale(net, alpha), x), fl.measure(net, x)
    assert_same(m, reference, FUNCTION + INVARIANT)
    assert_same(m, reference, ["matrix_normalized_sharpness", "weighted_nmls"])
    assert_different(m, reference, ["sharpness", "sharpness_untied", "nmls", "network_volume"])


@nets
def test_rescaling_moves_each_layer_as_derived(make):
    """f keeps its values, so J_1 -> J_1 / a and x^2 -> a x^2, A^2 -> A^2 / a; layer 3 stays."""
    net, x = case(make)
    a = 3.0
    before, after = fl.probe(net, x).layers, fl.probe(rescale(net, a), x).layers
    factors = [1 / a**2, a**2, 1.0]
    for old, new, factor in zip(before, after, factors, strict=True):
        np.testing.assert_allclose(new.grad_weight, factor * old.grad_weight, rtol=RTOL)
    np.testing.assert_allclose(after[1].singular, before[1].singular / a, rtol=RTOL)
    np.testing.assert_allclose(after[1].x_norm, before[1].x_norm * a, rtol=RTOL)


@nets
def test_control_rescaling_two_tanh_layers_changes_the_function(make):
    net, x = case(make, activation=nn.Tanh)
    assert_different(fl.measure(rescale(net, 3.0), x), fl.measure(net, x), FUNCTION)


@pytest.mark.slow
def test_measurements_side_by_side_share_no_memory():
    """Small buffers are left to the next measurement: to one of them."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5)).double() for _ in range(6)]
    x = torch.randn(40, 9, dtype=torch.float64)
    alone = [fl.measure(net, x, chunk=7).values for net in nets]
    with ThreadPoolExecutor(len(nets)) as pool:
        for _ in range(5):
            together = list(pool.map(lambda net: fl.measure(net, x, chunk=7).values, nets))
            assert together == alone
