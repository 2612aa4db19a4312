"""Packages by other people, built another way, agree with the sharpness of Eq. 3.

The Gauss-Newton matrix of sum_i ||f(x_i) - y_i||^2 is G = 2 sum_i J_i^T J_i with J_i the
Jacobian of f(x_i) in the parameters, whatever y is. So the trace of G is 2 n S, and the part of
its diagonal that belongs to sample i and parameter p sums to 2 ||grad_p f(x_i)||_F^2. Both
packages are given the loss with reduction="sum"; with "mean" they would divide by n N.
"""

import numpy as np
import pytest
import torch
from torch import nn

import flatlens as fl

pytestmark = pytest.mark.slow

RTOL = 1e-10


@pytest.fixture
def curvlinops():
    return pytest.importorskip("curvlinops")


@pytest.fixture
def backpack():
    pytest.importorskip("backpack.extensions")
    return pytest.importorskip("backpack")


class TokenMixer(nn.Module):
    """LayerNorm, a residual and a linear layer on five tokens: what a Sequential cannot say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.unflatten(1, (5, 4))
        tokens = tokens + torch.tanh(self.linear(self.norm(tokens)))
        return self.head(tokens.mean(1))


def relu_mlp():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    return net, (6,)


def tanh_mlp_without_bias():
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 4, bias=False)), (5,)


def conv_net():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 3, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip
    return net, (2, 8, 8)


def grouped_dilated_conv_net():
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2, padding=2), nn.ReLU(),
        nn.Conv2d(6, 4, 3, dilation=2), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip
    return net, (4, 4, 4)


def conv1d_net():
    net = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))
    return net, (3, 8)


def transposed_conv_net():
    net = nn.Sequential(
        nn.ConvTranspose2d(2, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(75, 3)
    )
    return net, (2, 2, 2)


def batch_norm_net():
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    )
    with torch.no_grad():  # running statistics and an affine map that are not trivial
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2)
        net[1].weight.normal_()
        net[1].bias.normal_()
    return net, (2, 4, 4)


def layer_norm_net():
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    return net, (6,)


def token_mixer():
    return TokenMixer(), (20,)


SEQUENTIAL = [
    relu_mlp,
    tanh_mlp_without_bias,
    conv_net,
    grouped_dilated_conv_net,
    conv1d_net,
    transposed_conv_net,
    batch_norm_net,
]
CASES = [*SEQUENTIAL, layer_norm_net, token_mixer]


def ggn_diagonal(backpack, case, extension):
    """The network of `case` after BackPACK's backward pass: its parameters carry the diagonal."""
    net, x, y = make(case)
    net = backpack.extend(net)
    x.requires_grad_()  # else torch warns that BackPACK's module hooks see no input gradient
    loss = backpack.extend(nn.MSELoss(reduction="sum"))(net(x), y)
    with backpack.backpack(extension):
        loss.backward()
    return net


def make(case):
    torch.manual_seed(0)
    net, shape = case()
    x = torch.randn(5, *shape, dtype=torch.float64)
    net = net.double().eval()
    return net, x, torch.randn_like(net(x))


# torch itself scripts a few functions at the first `jvp`, and so does a dependency of curvlinops
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_curvlinops_ggn_trace_is_2_n_sharpness(case, curvlinops):
    net, x, y = make(case)
    loss = nn.MSELoss(reduction="sum")
    # the smaller second batch shows that nothing depends on how the data are split
    data = [(x[:3], y[:3]), (x[3:], y[3:])]
    ggn = curvlinops.GGNLinearOperator(net, loss, list(net.parameters()), data)
    trace = (ggn @ torch.eye(ggn.shape[1], dtype=torch.float64)).trace().item()
    assert fl.measure(net, x)["sharpness"] == pytest.approx(trace / (2 * len(x)), rel=RTOL)


@pytest.mark.parametrize("case", SEQUENTIAL, ids=lambda case: case.__name__)
def test_backpack_ggn_diagonal_per_sample(case, backpack):
    net, x, _ = make(case)
    extended = ggn_diagonal(backpack, case, backpack.extensions.BatchDiagGGNExact())
    theirs = {
        name: p.diag_ggn_exact_batch.flatten(1).sum(1).numpy() / 2
        for name, p in extended.named_parameters()
    }
    probe = fl.probe(net, x)
    assert [p.name for p in probe.parameters] == list(theirs)
    for p in probe.parameters:
        np.testing.assert_allclose(p.grad, theirs[p.name], rtol=RTOL)


@pytest.mark.parametrize("case", SEQUENTIAL, ids=lambda case: case.__name__)
def test_backpack_ggn_diagonal_gives_adaptive_sharpness(case, backpack):
    net, x, _ = make(case)
    extended = ggn_diagonal(backpack, case, backpack.extensions.DiagGGNExact())
    # Eq. 41 weights the diagonal by theta_j^2
    total = sum((p.diag_ggn_exact * p.detach() ** 2).sum().item() for p in extended.parameters())
    ours = fl.measure(net, x)["adaptive_sharpness"]
    assert ours == pytest.approx(total / (2 * len(x)), rel=RTOL)


@pytest.mark.filterwarnings("ignore")  # of hooks, by Opacus and torch
def test_opacus_ghost_norms_of_a_vision_transformer():
    pytest.importorskip("opacus")
    from opacus.grad_sample import grad_sample_module_fast_gradient_clipping as ghost_clipping

    from flatlens.training.networks import vit

    torch.manual_seed(0)
    net = vit(image=8, patch=4, dim=6, depth=2, heads=2, classes=3).double()
    for bare in (net.cls_token, net.positions):  # Opacus knows parameters of modules only
        bare.requires_grad_(False)
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    found = np.sum([q.grad for q in fl.probe(net, x).parameters], axis=0)
    ghost = ghost_clipping.GradSampleModuleFastGradientClipping(
        net, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )
    squared = torch.zeros(3, dtype=torch.float64)
    for v in range(3):
        ghost.zero_grad()
        ghost(x)[:, v].sum().backward()
        squared += ghost.get_norm_sample().square()
    np.testing.assert_allclose(found, squared.numpy(), rtol=RTOL)
