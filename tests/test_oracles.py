"""The oracle against closed forms and against loops that share nothing with it."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle_products import product_matrices
from oracles import kernel_matrices, oracle, sample_calls, sharing_format
from torch import nn
from traps import ZOO
from traps.everyday import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch about even kernels


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def linear(W, b=None):
    layer = nn.Linear(W.shape[1], W.shape[0], bias=b is not None, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(W)
        if b is not None:
            layer.bias.copy_(b)
    return layer


def test_one_linear_layer_by_hand():
    truth = oracle(
        nn.Sequential(linear(matrix([3, 0], [0, 4]), matrix(1, 2))), matrix([1, 2], [2, 2])
    )
    # ‖∂f/∂W‖² = N ‖x‖², ‖∂f/∂b‖² = N; adaptive: Σ_kj W_kj² x_j² + Σ b².
    assert truth.output.tolist() == [[4, 10], [7, 10]]
    assert truth.metrics() == pytest.approx(
        {
            "sharpness": (10 + 16) / 2 + 2,
            "sharpness_untied": (10 + 16) / 2 + 2,
            "adaptive_sharpness": ((9 + 16 * 4) + (9 * 4 + 16 * 4)) / 2 + 5,
            "mls": 4,
            "nmls": 4,
            "nmls_through": 4,
            "volume": 12,
            "network_volume": 12,
            "log_volume": math.log(12),
            "local_dimension": 25**2 / (81 + 256),
            "normalized_mls": (5 + 8) / 2 * 16,
            "input_invariant_mls": ((9 + 64) + (36 + 64)) / 2,
            "matrix_normalized_sharpness": 4 * math.sqrt(13),
            "weighted_nmls": ((1 / 5 + 1 / 8) / 2) ** -0.5 * 4,
        },
        rel=1e-13,
    )


def test_residual_bypass_by_hand():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear(matrix([2, 0], [0, 1]))

        def forward(self, x):
            return x + self.layer(x)

    (layer,) = oracle(Residual(), matrix([1, 1])).layers
    assert layer.singular[0] == pytest.approx([3, 2])
    assert layer.singular_through[0] == pytest.approx([2, 1])
    assert layer.gap_norm[0] == pytest.approx(1)
    assert layer.bypass[0] == pytest.approx(math.sqrt(2 / 13))


def test_conv_by_index_loops():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, dtype=torch.float64)
    x = torch.randn(1, 2, 4, 5, dtype=torch.float64)
    (layer,) = oracle(nn.Sequential(conv), x).layers
    padded, patch_norms = F.pad(x, (1, 1, 1, 1)), []
    for row in range(0, 4, 2):
        for column in range(0, 5, 2):
            for group in range(2):
                patch_norms.append(
                    float((padded[0, group, row : row + 3, column : column + 3] ** 2).sum())
                )
    # f = z, so ‖J_pg‖² = 2 outputs per group and position.
    assert layer.patch_min[0] == pytest.approx(min(patch_norms))
    assert layer.untied[0] == pytest.approx(2 * sum(patch_norms))
    assert (layer.positions, layer.in_features, layer.out_features) == (6, 9, 2)  # of one group
    assert layer.untied_bias[0] == pytest.approx(4 * 6)


def test_transposed_conv_by_index_loops():
    torch.manual_seed(0)
    conv = nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1, dtype=torch.float64)
    x = torch.randn(1, 2, 4, dtype=torch.float64)
    (layer,) = oracle(nn.Sequential(conv), x).layers
    length, untied = conv(x).shape[2], 0.0
    for p in range(4):
        landed = sum(0 <= 2 * p - 1 + k < length for k in range(3))  # taps that are not cropped
        untied += 3 * landed * float((x[0, :, p] ** 2).sum())
    assert layer.untied[0] == pytest.approx(untied)
    assert (layer.positions, layer.in_features, layer.out_features) == (4, 2, 9)


def test_zero_jacobian_has_rank_and_dimension_zero():
    net = nn.Sequential(
        linear(matrix([1, 0], [0, 1]), matrix(-9, -9)), nn.ReLU(), linear(matrix([1, 1]))
    )
    truth = oracle(net, matrix([1, 2]))
    assert truth.input.rank.tolist() == [0]
    assert truth.metrics()["local_dimension"] == 0
    assert truth.metrics()["log_volume"] == -math.inf


@pytest.mark.parametrize("name", mostly_slow(ZOO))
def test_sharpness_is_a_plain_loop_over_parameters(name):
    case = ZOO[name]()
    truth, total = oracle(case.model, case.x, case.output), 0.0
    trainable = [p for p in case.model.parameters() if p.requires_grad]
    out = case.run(case.model.eval())
    for value in out.flatten() if trainable else []:
        grads = torch.autograd.grad(value, trainable, retain_graph=True, allow_unused=True)
        total += sum(float((g**2).sum()) for g in grads if g is not None)
    assert truth.metrics()["sharpness"] == pytest.approx(total / len(out), rel=1e-12)
    np.testing.assert_allclose(
        truth.output, out.detach().reshape(len(out), -1), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(
    "name", sorted(set(ZOO) - {"double_backward_inside_the_forward"})
)  # W acts beyond z
def test_patches_rebuild_the_weights_gradient_and_the_derivative_through(name):
    case = ZOO[name]()
    _, calls = sample_calls(
        case.unwrapped().eval().requires_grad_(True), case.sample(0), case.output
    )
    for call in calls:
        u, J = sharing_format(call, call.values["dz"])
        if call.geometry.get("product"):
            dW = torch.einsum("kgto,gti->kgoi", J, u)
            rows = torch.stack([product_matrices(call, row) for row in call.values["dweight"]])
            np.testing.assert_allclose(dW, rows, rtol=1e-10, atol=1e-12)
            continue
        turned = "transpose" in call.kind or call.geometry.get("turned")
        form = "kgto,gti->kgio" if turned else "kgto,gti->kgoi"
        dW = torch.einsum(form, J, u)  # Σ_p J_p u_pᵀ
        np.testing.assert_allclose(
            dW.flatten(), call.values["dweight"].flatten(), rtol=1e-10, atol=1e-12
        )
        if call.kind == "linear":
            B = torch.einsum("kgto,goi->kgti", J, kernel_matrices(call))  # J_p W
            np.testing.assert_allclose(
                B.flatten(), call.values["dB"].flatten(), rtol=1e-10, atol=1e-12
            )
