"""Packages by other people agree on the Hessian; their known failures do not happen here.

Others sum or average the loss their own way: nn.MSELoss(reduction="sum") is 2 n times the mean of
1/2 ||f - y||^2.
"""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from traps import Net

import flatlens as fl
from flatlens.perturb import hessian_trace, lambda_max, relative_flatness

pytestmark = pytest.mark.slow

RTOL = 1e-9
ALL = 10**6


def tanh_mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3))


def relu_mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def conv_net():
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 3, padding=1), nn.GELU(), nn.Flatten(),
        nn.Linear(15, 3),
    )  # fmt: skip


def batch_norm_net():
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Sigmoid(), nn.Linear(6, 3))
    with torch.no_grad():
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2)
    return net


CASES = [tanh_mlp, relu_mlp, conv_net, batch_norm_net]
cases = pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)


def made(make):
    torch.manual_seed(0)
    net = make().double().eval()
    x = torch.randn(6, 5).double()
    return net, x, torch.randn(6, 3).double()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@cases
def test_curvlinops_hessian(make):
    curvlinops = pytest.importorskip("curvlinops")
    net, x, y = made(make)
    data = [(x[:4], y[:4]), (x[4:], y[4:])]
    loss = nn.MSELoss(reduction="sum")
    operator = curvlinops.HessianLinearOperator(net, loss, list(net.parameters()), data)
    H = (operator @ torch.eye(operator.shape[1]).double()) / (2 * len(x))
    e = hessian_trace(net, x, y, directions=ALL)
    assert e.value == pytest.approx(float(H.trace()), rel=RTOL)
    top = float(torch.linalg.eigvalsh((H + H.mT) / 2)[-1])
    assert float(lambda_max(net, x, y, rtol=1e-6)) == pytest.approx(top, rel=1e-6)


@cases
def test_hessian_eigenthings_trace_and_top_eigenvalue(make):
    eigenthings = pytest.importorskip("hessian_eigenthings")
    net, x, y = made(make)

    def loss(model, batch):
        inputs, targets = batch
        return 0.5 * (model(inputs) - targets).square().sum(1).mean()

    operator = eigenthings.HessianOperator(net, [(x[:3], y[:3]), (x[3:], y[3:])], loss)
    diagonal = [operator.matvec(v)[i] for i, v in enumerate(torch.eye(operator.size).double())]
    e = hessian_trace(net, x, y, directions=ALL)
    assert e.value == pytest.approx(float(sum(diagonal)), rel=RTOL)
    theirs = eigenthings.lanczos(operator, k=1, max_iter=operator.size, tol=1e-10, seed=0)
    assert float(lambda_max(net, x, y, rtol=1e-6)) == pytest.approx(
        float(theirs.eigenvalues[0]), rel=1e-6
    )
    sketched = eigenthings.trace(operator, num_matvecs=30, seed=0)
    ours = hessian_trace(net, x, y, directions=30)
    assert abs(sketched.estimate - ours.value) < 5 * (sketched.stderr + ours.se)


JAX_HESSIAN = """
import sys
import jax, numpy as np
from jax.flatten_util import ravel_pytree

data = np.load(sys.argv[1])
with jax.enable_x64(True):
    inputs, targets = jax.numpy.asarray(data["x"]), jax.numpy.asarray(data["y"])
    flat, unravel = ravel_pytree([jax.numpy.asarray(data[f"p{i}"]) for i in range(len(data) - 2)])

    def mean_loss(theta):
        h, (*hidden, W, b) = inputs, unravel(theta)
        for V, c in zip(hidden[::2], hidden[1::2], strict=True):
            h = jax.numpy.tanh(h @ V.T + c)
        return 0.5 * ((h @ W.T + b - targets) ** 2).sum(1).mean()

    np.save(sys.argv[2], np.asarray(jax.hessian(mean_loss)(flat)))
"""


def test_jax_on_a_tanh_mlp(tmp_path):
    """JAX runs in a process of its own: its threads make every later fork of this one unsafe."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    net, x, y = made(tanh_mlp)
    weights = {f"p{i}": p.detach().numpy() for i, p in enumerate(net.parameters())}
    np.savez(tmp_path / "in.npz", x=x.numpy(), y=y.numpy(), **weights)
    arguments = [str(tmp_path / "in.npz"), str(tmp_path / "hessian.npy")]
    subprocess.run([sys.executable, "-c", JAX_HESSIAN, *arguments], check=True, timeout=300)
    H = np.load(tmp_path / "hessian.npy")
    assert hessian_trace(net, x, y, directions=ALL).value == pytest.approx(H.trace(), rel=RTOL)
    top = np.linalg.eigvalsh(H)[-1]
    assert float(lambda_max(net, x, y, rtol=1e-6)) == pytest.approx(top, rel=1e-6)


# -- known failures of others ----------------------------------------------------------------------


def vision_transformer():
    """Patches, a class token, two encoder layers, and one attention by the fused function."""

    def run(s, x):
        tokens = s.patch(x).flatten(2).mT
        tokens = torch.cat([s.cls.expand(len(x), 1, 8), tokens], 1) + s.place
        tokens = s.encoder(tokens)
        q, k, v = s.qkv(tokens).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        tokens = tokens + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return s.head(s.norm(tokens)[:, 0])

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, activation="gelu", batch_first=True)
    return Net(
        run,
        patch=nn.Conv2d(1, 8, 4, 4),
        cls=nn.Parameter(torch.randn(1, 1, 8)),
        place=nn.Parameter(torch.randn(1, 5, 8)),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        qkv=nn.Linear(8, 24),
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 3),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives_of_a_transformer_with_the_default_attention_kernels(dtype):
    torch.manual_seed(0)
    net, x = vision_transformer().to(dtype), torch.randn(3, 1, 8, 8).to(dtype)
    y = torch.tensor([0, 2, 1])
    parameters = list(net.parameters())
    net.eval()
    gradient = torch.autograd.grad(F.cross_entropy(net(x), y), parameters, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):  # what users of others see
        torch.autograd.grad(gradient, parameters, [torch.ones_like(p) for p in parameters])
    e = hessian_trace(net, x, y, loss="cross_entropy", directions=40)
    assert e.se > 0
    assert set(e.per_layer) == {name for name, _ in net.named_parameters()}
    # an independent value: the gradient's change along each of a few weights, by differences
    weight, step = net.head.weight, 1e-3 if dtype == torch.float32 else 1e-5
    exact = 0.0
    for index in np.ndindex(*weight.shape):
        slopes = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[index] += sign * step
            slopes.append(torch.autograd.grad(F.cross_entropy(net(x), y), weight)[0][index])
            with torch.no_grad():
                weight[index] -= sign * step
        exact += float(slopes[0] - slopes[1]) / (2 * step)
    head = Net(lambda s, x: s.net(x), net=net.requires_grad_(False))
    weight.requires_grad_()
    e = hessian_trace(head, x, y, loss="cross_entropy", directions=ALL)
    assert list(e.per_layer) == ["net.head.weight"]
    assert e.value == pytest.approx(exact, rel=1e-2 if dtype == torch.float32 else 1e-6)


def test_a_trace_that_comes_out_negative_by_chance_says_how_far_it_may_be_off():
    """H of a ReLU network has a positive trace and, far from its data, large eigenvalues of both
    signs: means of a few products are often negative."""
    torch.manual_seed(0)
    net, x = relu_mlp().double(), torch.randn(6, 5).double()
    y = 100 * torch.randn(6, 3).double()
    S = fl.sharpness(fl.probe(net, x))
    found = [hessian_trace(net, x, y, directions=6, seed=seed) for seed in range(200)]
    negative = [e for e in found if e.value < 0]
    assert len(negative) > 20
    t = 12.706  # Student, 1 degree of freedom, 97.5 %
    assert {e.dof for e in found} == {1}
    assert np.mean([e.value + t * e.se > S for e in negative]) > 0.9
    exact = hessian_trace(net, x, y, directions=6, rtol=0.01)
    assert exact.value == pytest.approx(S, rel=0.03)


def test_repeated_calls_start_from_the_same_state():
    """No running mean, cached graph or perturbed weight is carried from one call to the next."""
    net, x, y = made(tanh_mlp)
    first = hessian_trace(net, x, y)
    lambda_max(net, x, y, max_iter=1)
    relative_flatness(net, x, y, layer="0")
    assert hessian_trace(net, x, y) == first
    with torch.no_grad():
        net[0].weight.mul_(2)
    assert hessian_trace(net, x, y).value != first.value
