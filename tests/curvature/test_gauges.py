"""Training gauges against their definitions, one sample or one mini-batch at a time."""

import numpy as np
import pytest
import torch
from oracles import forward
from torch import nn
from traps import ZOO

import flatlens as fl
from flatlens.measurement.quantities import COSTS, EDGE, OWN_PASSES
from flatlens.perturb import batch_sharpness, fisher_trace, gradient_noise_scale, lambda_max

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return net, torch.randn(10, 4).double(), torch.arange(10) % 3


def sample_gradients(net, x, y, loss):
    parameters = [p for p in net.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        grads = torch.autograd.grad(loss(net(x[i : i + 1]), y[i : i + 1]), parameters)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def test_fisher_trace_of_each_sample():
    net, x, y = network()
    g = sample_gradients(net, x, y, nn.functional.cross_entropy)
    e = fisher_trace(net, x, y, loss="cross_entropy")
    np.testing.assert_allclose(e.samples, g.square().sum(1).numpy(), rtol=1e-12)
    assert e.value == pytest.approx(float(g.square().sum(1).mean()), rel=1e-12)
    assert e.se == pytest.approx(float(g.square().sum(1).std() / 10**0.5), rel=1e-10)


@pytest.mark.parametrize("name", list(ZOO)[::30])
def test_fisher_trace_of_traps(name):
    case = ZOO[name]()
    p = fl.probe(case.model, case.x, output=case.output)
    y = torch.zeros(p.n, p.N).double()
    e = fisher_trace(case.model, case.x, y, output=case.output)
    model, squares = case.unwrapped().eval(), []
    trained = [q for q in model.parameters() if q.requires_grad]
    for i in range(p.n):
        out = forward(model, case.sample(i), case.output)
        grads = torch.autograd.grad(0.5 * out.square().sum(), trained, allow_unused=True)
        squares.append(sum(float(g.to_dense().square().sum()) for g in grads if g is not None))
    np.testing.assert_allclose(e.samples, squares, rtol=1e-9)


def test_noise_scale_from_its_definition():
    net, x, y = network()
    g = sample_gradients(net, x, y, nn.functional.cross_entropy)
    covariance = torch.cov(g.mT)
    want = float(covariance.trace() / g.mean(0).square().sum())
    got = gradient_noise_scale(net, x, y, loss="cross_entropy").value
    assert got == pytest.approx(want, rel=1e-9)
    with pytest.raises(fl.FlatlensError, match="two samples"):
        gradient_noise_scale(net, x[:1], y[:1], loss="cross_entropy")


def rayleigh(net, x, y):
    parameters = list(net.parameters())
    loss = nn.functional.cross_entropy(net(x), y)
    g = torch.autograd.grad(loss, parameters, create_graph=True)
    v = [t.detach() for t in g]
    Hv = torch.autograd.grad(g, parameters, v)
    size = sum((t**2).sum() for t in v)
    return float(sum((a * b).sum() for a, b in zip(v, Hv, strict=True)) / size)


def test_batch_sharpness_of_all_samples_is_the_rayleigh_quotient():
    net, x, y = network()
    e = batch_sharpness(net, x, y, loss="cross_entropy", batch_size=50)
    assert e.value == pytest.approx(rayleigh(net, x, y), rel=1e-9)
    assert e.value <= lambda_max(net, x, y, loss="cross_entropy").value * (1 + 1e-3)
    assert e.se == 0


def test_batch_sharpness_of_single_samples_averages_over_them():
    net, x, y = network()
    each = [rayleigh(net, x[i : i + 1], y[i : i + 1]) for i in range(10)]
    e = batch_sharpness(net, x, y, loss="cross_entropy", batch_size=1, batches=40)
    assert all(min(abs(v - w) for w in each) < 1e-9 for v in e.samples)
    assert abs(e.value - np.mean(each)) < 5 * e.se
    split = [(x[:3], y[:3]), (x[3:], y[3:])]
    same = batch_sharpness(net, split, loss="cross_entropy", batch_size=1, batches=40)
    np.testing.assert_allclose(same.samples, e.samples, rtol=1e-9)


def test_targets_are_needed():
    net, x, _ = network()
    for gauge in (fisher_trace, gradient_noise_scale, batch_sharpness):
        with pytest.raises(fl.FlatlensError, match="needs targets"):
            gauge(net, x)


def test_gauges_are_quantities_with_a_cost():
    net, x, y = network()
    names = ["sharpness", "fisher_trace", "gradient_noise_scale", "batch_sharpness"]
    m = fl.measure(net, x, y, loss="cross_entropy", quantities=names)
    assert m["fisher_trace"] == fisher_trace(net, x, y, loss="cross_entropy").value
    assert m["batch_sharpness_se"] >= 0
    assert COSTS.keys() >= {*OWN_PASSES, EDGE, "nmls"}
    with pytest.raises(fl.FlatlensError, match="learning rate"):
        fl.measure(net, x, y, quantities=[EDGE])


def test_tracker_takes_the_learning_rate_of_the_optimizer():
    net, x, y = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    tracker = fl.Tracker(net, x, y, when=fl.every(1), quantities=["sharpness", EDGE])
    with pytest.raises(fl.FlatlensError, match="needs the learning rate"):
        tracker(0)
    tracker = fl.Tracker(net, x, y, when=fl.every(1), quantities=["sharpness", EDGE])
    tracker.attach(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    before, after = tracker.records
    assert before[EDGE] == pytest.approx(0.5 * before["lambda_max"] / 2)
    assert after[EDGE] == pytest.approx(0.25 * after["lambda_max"] / 2)
    assert after["lambda_max"] == lambda_max(net, x, y).value  # whatever was measured before
