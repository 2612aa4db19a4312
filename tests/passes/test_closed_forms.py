"""Networks whose every number can be worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import flatlens as fl


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def linear(W, b=None):
    layer = nn.Linear(W.shape[1], W.shape[0], bias=b is not None, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(W)
        if b is not None:
            layer.bias.copy_(b)
    return layer


def by_hand(value):
    return pytest.approx(value, rel=1e-12, abs=1e-14)


def rotation(angle):
    return matrix([math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)])


def test_one_linear_layer():
    """f = Wx + b: ‖∂f/∂W‖² = N ‖x‖², ‖∂f/∂b‖² = N, and the bias counts in the adaptive sum."""
    m = fl.measure(
        nn.Sequential(linear(matrix([3, 0], [0, 4]), matrix(1, 2))), matrix([1, 2], [2, 2])
    )
    assert m["sharpness"] == by_hand((2 * 5 + 2 * 8) / 2 + 2)
    assert m["sharpness_untied"] == by_hand(m["sharpness"])
    assert m["adaptive_sharpness"] == by_hand(((9 + 64) + (36 + 64)) / 2 + 5)
    assert (m["mls"], m["nmls"], m["nmls_through"]) == by_hand((4, 4, 4))
    assert (m["volume"], m["network_volume"]) == by_hand((12, 12))
    assert m["log_volume"] == by_hand(math.log(12))
    assert m["local_dimension"] == by_hand(25**2 / (9**2 + 16**2))
    assert m["normalized_mls"] == by_hand(16 * (5 + 8) / 2)
    assert m["input_invariant_mls"] == by_hand(((9 + 64) + (36 + 64)) / 2)
    assert m["matrix_normalized_sharpness"] == by_hand(4 * math.sqrt(13))
    assert m["weighted_nmls"] == by_hand(4 * ((1 / 5 + 1 / 8) / 2) ** -0.5)


def test_scalar_chain():
    """f = a b x: S = (bx)² + (ax)², each weight gives (abx)² to the adaptive sharpness."""
    p = fl.probe(nn.Sequential(linear(matrix([2])), linear(matrix([-3]))), matrix([5]))
    assert fl.sharpness(p) == by_hand((3 * 5) ** 2 + (2 * 5) ** 2)
    assert fl.adaptive_sharpness(p) == by_hand(2 * 30**2)
    assert fl.mls(p) == by_hand(6)
    assert fl.nmls(p) == by_hand(6 + 3)
    assert fl.input_invariant_mls(p) == by_hand(30**2)


def test_two_linear_layers():
    """f = VWx: ‖∂f/∂W‖² = ‖V‖_F² ‖x‖², ‖∂f/∂V‖² = N ‖Wx‖²."""
    V, W = matrix([1, 2, 0], [0, 1, -1]), matrix([1, 0], [2, 1], [0, 3])
    x = matrix([1, -1], [2, 0.5])
    p = fl.probe(nn.Sequential(linear(W), linear(V)), x)
    hidden = x @ W.T
    want = (7 * (x**2).sum() + 2 * (hidden**2).sum()) / 2
    assert fl.sharpness(p) == by_hand(float(want))
    assert fl.volume(p) == by_hand(abs(float(torch.linalg.det(V @ W))))
    assert fl.nmls(p) == by_hand(
        float(torch.linalg.matrix_norm(V @ W, 2) + torch.linalg.matrix_norm(V, 2))
    )
    assert [layer.norm for layer in p.layers] == by_hand(
        [float(torch.linalg.matrix_norm(w, 2)) for w in (W, V)]
    )


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_orthogonal(depth):
    """All singular values are 1 everywhere, and ‖∂f/∂W_l‖² = d ‖x‖² at every layer."""
    x = matrix([3, 4], [0, 1], [1, 1])
    m = fl.measure(nn.Sequential(*(linear(rotation(0.3 + k)) for k in range(depth))), x)
    assert m["mls"] == by_hand(1)
    assert (m["nmls"], m["network_volume"]) == by_hand((depth, depth))
    assert m["volume"] == by_hand(1)
    assert m["log_volume"] == by_hand(0)
    assert m["local_dimension"] == by_hand(2)
    assert m["sharpness"] == by_hand(depth * 2 * (25 + 1 + 2) / 3)
    assert m["normalized_mls"] == by_hand((25 + 1 + 2) / 3)
    assert m["input_invariant_mls"] == by_hand((25 + 1 + 2) / 3)
    assert m["matrix_normalized_sharpness"] == by_hand(depth * math.sqrt(2 * (25 + 1 + 2) / 3))
    assert m["weighted_nmls"] == by_hand(depth * ((1 / 25 + 1 + 1 / 2) / 3) ** -0.5)


def test_rank_one():
    """W = 5 u vᵀ: one singular value; the volume is 0, not the product of the positive ones."""
    u, v = matrix([0.6, 0.8]), matrix([0.8, 0, -0.6])
    p = fl.probe(nn.Sequential(linear(5 * u.T @ v)), matrix([1, 2, 3], [0, 1, 0]))
    assert p.input.singular == by_hand(np.array([[5, 0], [5, 0]]))
    assert p.input.rank.tolist() == [1, 1]
    assert fl.mls(p) == by_hand(5)
    assert fl.volume(p) == 0
    assert fl.log_volume(p) == -math.inf
    assert fl.log_volume(p, top=1) == by_hand(math.log(5))
    assert fl.local_dimension(p) == by_hand(1)


def test_relu_that_keeps_one_unit():
    net = nn.Sequential(
        linear(matrix([1, 1], [1, -2]), matrix(0, 0)), nn.ReLU(), linear(matrix([2, 7]))
    )
    p = fl.probe(net, matrix([1, 1]))  # hidden (2, 0): f = 2 (x_1 + x_2)
    assert p.output.tolist() == [[4]]
    assert fl.mls(p) == by_hand(math.sqrt(8))
    assert fl.sharpness(p) == by_hand(
        4 * 2 + 4 + 2**2
    )  # ∂W, ∂b of the live unit; ∂ of the last weight
    assert fl.nmls(p) == by_hand(math.sqrt(8) + math.sqrt(53))


def test_dead_network():
    net = nn.Sequential(
        linear(matrix([1, 0], [0, 1]), matrix(-9, -9)), nn.ReLU(), linear(matrix([1, 1]), matrix(3))
    )
    p = fl.probe(net, matrix([1, 2], [2, 1]))
    assert fl.mls(p) == fl.volume(p) == fl.local_dimension(p) == 0
    assert fl.log_volume(p) == -math.inf
    assert p.input.rank.tolist() == [0, 0]
    assert fl.sharpness(p) == by_hand(1)  # the last bias alone


def test_tokens_that_cancel():
    """Tokens (u, -u) and their mean: S = 0 although the output does change with the input."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear(matrix([3, 0], [0, 4]))

        def forward(self, x):
            return self.layer(x).mean(1)

    u = matrix([1, 2], [2, 2])
    m = fl.measure(Mean(), torch.stack([u, -u], 1))
    assert m["sharpness"] == by_hand(0)
    assert m["mls"] == by_hand(4 / math.sqrt(2))  # A = [W, W] / 2
    assert m["sharpness_untied"] == by_hand((5 + 8) / 2)  # Σ_t ‖I/2‖² ‖u‖² = ‖u‖²


def test_residual():
    """f = x + Wx: the skip counts in A and not in B."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear(matrix([2, 0], [0, 1]))

        def forward(self, x):
            return x + self.layer(x)

    p = fl.probe(Residual(), matrix([1, 1]))
    (layer,) = p.layers
    assert layer.singular[0] == by_hand(np.array([3, 2]))
    assert layer.singular_through[0] == by_hand(np.array([2, 1]))
    assert layer.gap_norm[0] == by_hand(1)
    assert layer.bypass[0] == by_hand(math.sqrt(2 / 13))
    assert (fl.nmls(p), fl.nmls_through(p)) == by_hand((3, 2))


def test_circular_conv_norm_is_the_largest_fourier_coefficient():
    conv = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular", bias=False, dtype=torch.float64)
    kernel = [1.0, -3.0, 2.0]
    with torch.no_grad():
        conv.weight.copy_(matrix(kernel)[None])
    p = fl.probe(nn.Sequential(conv, nn.Flatten()), torch.ones(1, 1, 8, dtype=torch.float64))
    want = np.abs(np.fft.fft([*kernel, 0, 0, 0, 0, 0])).max()
    assert want <= p.layers[0].norm * (1 + 1e-14)
    assert p.layers[0].norm <= want * (1 + 1e-6)
    assert p.layers[0].norms.kernel == by_hand(math.sqrt(14))


def test_conv_of_ones():
    """f = Σ_p w·u_p at T = 3 positions: ∂f/∂w = Σ_p u_p, ∂f/∂b = T."""

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 2, dtype=torch.float64)

        def forward(self, x):
            return self.conv(x).sum(2)

    net = Summed()
    with torch.no_grad():
        net.conv.weight.copy_(matrix([[2, 3]]))
    p = fl.probe(net, matrix([[1, 2, 3, 4]]))
    assert p.layers[0].grad_weight[0] == by_hand(6**2 + 9**2)
    assert p.layers[0].grad_bias[0] == by_hand(9)
    assert p.layers[0].untied[0] == by_hand((1 + 4) + (4 + 9) + (9 + 16))
    assert p.layers[0].untied_bias[0] == by_hand(3)
    assert p.layers[0].patch_min[0] == by_hand(5)
    assert fl.mls(p) == by_hand(math.sqrt(4 + 25 + 25 + 9))


def test_transposed_conv_without_overlap():
    """stride = kernel: no sums, so the operator norm is the kernel's."""
    conv = nn.ConvTranspose1d(2, 1, 2, stride=2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        conv.weight.copy_(matrix([3, 0], [0, 4])[:, None])
    p = fl.probe(nn.Sequential(conv, nn.Flatten()), matrix([[1, 2], [3, 4]]))
    (layer,) = p.layers
    assert 4 * (1 - 1e-14) <= layer.norm <= 4 * (1 + 1e-6)
    assert (layer.norms.kernel, layer.norms.frobenius) == by_hand((4, 5))
    assert (layer.positions, layer.in_features, layer.out_features) == (2, 2, 2)
    assert layer.untied[0] == by_hand(2 * (1 + 9) + 2 * (4 + 16))
    assert layer.grad_weight[0] == by_hand(2 * (1 + 4 + 9 + 16))
