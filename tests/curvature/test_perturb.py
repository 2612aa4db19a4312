"""What needs passes of its own, against full Hessians, and error bars that are honest."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from traps import ZOO, Case, Net
from traps.everyday import mostly_slow

import flatlens as fl
from flatlens import FlatlensError
from flatlens.algebra.scaling import minimise
from flatlens.curvature import hessians
from flatlens.losses import get_loss
from flatlens.perturb import (
    adaptive_sharpness_hessian,
    adaptive_sharpness_sampled,
    edge_of_stability,
    hessian_trace,
    input_sensitivity_ascent,
    lambda_max,
    normalized_sharpness,
    relative_flatness,
)

RTOL = 1e-9
ALL = 10**6  # more directions than parameters: H is taken column by column
REPEATS = 400


# -- oracles: full Hessians by torch, on all samples at once ---------------------------------------


def targets_of(case, seed=1):
    """Random targets beside the outputs of a case."""
    with torch.no_grad():
        f = case.run(copy.deepcopy(case.unwrapped()).eval())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(f), f[0].numel(), generator=generator, dtype=torch.float64).to(f)


def full_hessian(case, y, loss="half_squared"):
    """The Hessian of the mean loss by all trainable parameters, and where each has its rows."""
    model = copy.deepcopy(case.unwrapped()).eval()
    values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    sizes = [v.numel() for v in values.values()]

    def mean_loss(theta):
        parts = zip(values.items(), theta.split(sizes), strict=True)
        changed = {name: part.reshape(v.shape) for (name, v), part in parts}
        f = case.run(lambda *a, **k: functional_call(model, changed, a, k))
        return get_loss(loss)(f.reshape(len(f), -1), y).mean()

    theta = torch.cat([v.reshape(-1) for v in values.values()])
    fused = torch._weight_norm  # its second derivative is wrong
    torch._weight_norm = lambda v, g, dim: g * v / torch.norm_except_dim(v, 2, dim)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            H = torch.autograd.functional.hessian(mean_loss, theta)
    finally:
        torch._weight_norm = fused
    ends = np.cumsum([0, *sizes])
    rows = {name: slice(ends[i], ends[i + 1]) for i, name in enumerate(values)}
    return H, rows, theta


def blocks(matrix, rows):
    """The trace of each parameter's diagonal block."""
    return {name: float(matrix.diagonal()[part].sum()) for name, part in rows.items()}


def mlp(*widths, act=nn.Tanh, n=10, seed=0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = []
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), act()]
        return Case(nn.Sequential(*layers[:-1]).double(), torch.randn(n, widths[0]).double())


def tanh_net():
    """122 parameters: a full Hessian costs little, and a sketch of ten does not see all of it."""
    case = mlp(4, 8, 6, 4)
    return case, targets_of(case)


# -- Tr H ------------------------------------------------------------------------------------------

SECOND_DERIVATIVE_MISSING = {"embedding_bag"}  # torch has none
NOTHING_TRAINED = {"frozen_everything", "no_parameter_at_all"}
ORACLE_FAILS = {"embedding_with_sparse_gradients"}  # torch cannot view sparse gradients


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", mostly_slow(sorted(ZOO)))
def test_trace_of_each_parameters_block_is_that_of_the_full_hessian(name):
    case = ZOO[name]()
    y = targets_of(case)
    options = {"output": case.output, "directions": ALL, "chunk": 2}
    if name in NOTHING_TRAINED | SECOND_DERIVATIVE_MISSING:
        with pytest.raises(FlatlensError, match=r"no trainable parameters|no second derivative"):
            hessian_trace(case.model, case.x, y, **options)
        return
    e = hessian_trace(case.model, case.x, y, **options)
    assert e.se == 0
    assert e.value == pytest.approx(sum(e.per_layer.values()), rel=RTOL, abs=1e-12)
    if name not in ORACLE_FAILS:
        expected = blocks(*full_hessian(case, y)[:2])
        scale = max(map(abs, expected.values()))
        assert e.per_layer == pytest.approx(expected, rel=RTOL, abs=RTOL * scale)


@pytest.mark.parametrize(
    "loss",
    [
        *("squared", "mean_squared", "cross_entropy", "cross_entropy:0.1"),
        *("binary_cross_entropy", nn.CrossEntropyLoss()),
    ],
    ids=str,
)
def test_trace_for_every_loss(loss):
    case, _ = tanh_net()
    y = torch.arange(10) % 4
    expected = blocks(*full_hessian(case, y, loss)[:2])
    e = hessian_trace(case.model, case.x, y, loss=loss, directions=ALL)
    assert e.per_layer == pytest.approx(expected, rel=RTOL)
    if isinstance(loss, str):
        e = hessian_trace(case.model, case.x, y, loss=loss, directions=ALL, residual=True)
        assert e.residual == pytest.approx(e.value - gauss_newton_trace(case, y, loss), rel=1e-7)


def gauss_newton_trace(case, y, loss):
    """mean_i ||R_i^T df_i/dtheta||_F^2, sample by sample and output by output."""
    total, p = 0.0, list(case.model.parameters())
    for i in range(len(case.x)):
        f = case.model(case.x[i : i + 1])
        R = get_loss(loss).root(f, y[i : i + 1])[0]
        rows = [torch.autograd.grad(f[0, k], p, retain_graph=True) for k in range(f.shape[1])]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        total += float((R.mT @ J).square().sum())
    return total / len(case.x)


def test_relu_network_with_half_squared_loss_has_the_trace_of_eq_3_at_any_parameters():
    case = mlp(5, 9, 8, 3, act=nn.ReLU)
    y = targets_of(case)
    e = hessian_trace(case.model, case.x, y, directions=ALL, residual=True)
    assert e.value == pytest.approx(fl.sharpness(fl.probe(case.model, case.x)), rel=RTOL)
    assert abs(e.residual) < RTOL * e.value
    sketched = hessian_trace(case.model, case.x, y)
    assert abs(sketched.value - e.value) < 4 * sketched.se


def test_reused_relu_layer_does_not_have_the_trace_of_eq_3():
    layer = nn.Linear(3, 3).double()
    case = Case(Net(lambda s, x: s.a(F.relu(s.a(x))), a=layer), torch.randn(4, 3).double())
    y = targets_of(case)
    e = hessian_trace(case.model, case.x, y, directions=ALL, residual=True)
    S = fl.sharpness(fl.probe(case.model, case.x))
    assert e.residual == pytest.approx(e.value - S, rel=RTOL)
    assert abs(e.residual) > 0.01 * S


def test_tokens_as_integers():
    net = Net(lambda s, t: s.head(torch.tanh(s.table(t)).mean(1)), table=nn.Embedding(5, 3))
    net.head = nn.Linear(3, 2)
    case = Case(net.double(), torch.tensor([[0, 1, 1], [4, 2, 0]]))
    y = torch.tensor([0, 1])
    e = hessian_trace(case.model, case.x, y, loss="cross_entropy", directions=ALL)
    expected = blocks(*full_hessian(case, y, "cross_entropy")[:2])
    assert e.per_layer == pytest.approx(expected, rel=RTOL)
    with pytest.raises(FlatlensError, match="holds integers"):
        input_sensitivity_ascent(case.model, case.x)


def test_frozen_parameters_are_no_part_of_it():
    case = ZOO["frozen_weight"]()
    e = hessian_trace(case.model, case.x, targets_of(case), directions=ALL)
    frozen = {name for name, p in case.model.named_parameters() if not p.requires_grad}
    assert frozen
    assert not frozen & set(e.per_layer)


def test_chunks_and_batches_do_not_change_it():
    case, y = tanh_net()
    whole = hessian_trace(case.model, case.x, y)
    batches = [(case.x[:3], y[:3]), (case.x[3:], y[3:])]
    for e in (
        hessian_trace(case.model, case.x, y, chunk=3),
        hessian_trace(case.model, batches),
        hessian_trace(case.model, [case.x[:7], case.x[7:]], y),
    ):
        assert e.value == pytest.approx(whole.value, rel=RTOL)
        assert e.se == pytest.approx(whole.se, rel=1e-6)


def test_batches_that_can_be_read_once_only():
    case, y = tanh_net()
    batches = ((case.x[s], y[s]) for s in (slice(0, 6), slice(6, 10)))
    e = hessian_trace(case.model, batches, residual=True)
    whole = hessian_trace(case.model, case.x, y, residual=True)
    assert e.residual == pytest.approx(whole.residual, rel=RTOL)


def test_two_directions_are_plain_random_signs():
    case, y = tanh_net()
    e = hessian_trace(case.model, case.x, y, directions=2)
    assert (e.passes, e.dof) == (2, 1)
    exact = hessian_trace(case.model, case.x, y, directions=ALL)
    assert abs(e.value - exact.value) < 12.7 * e.se


def test_products_one_by_one_are_those_of_a_block(monkeypatch):
    case, y = tanh_net()
    together = hessian_trace(case.model, case.x, y)
    monkeypatch.setattr(hessians, "BATCHED", 0)
    assert hessian_trace(case.model, case.x, y).value == pytest.approx(together.value, rel=RTOL)


def test_memory_for_few_vectors_only_is_enough(monkeypatch):
    case, y = tanh_net()
    exact = hessian_trace(case.model, case.x, y, directions=ALL)
    monkeypatch.setattr("flatlens.algebra.traces.VECTORS", 4 * 122 * 8 * 3)
    few = hessian_trace(case.model, case.x, y, directions=ALL)
    assert few.value == pytest.approx(exact.value, rel=RTOL)
    e = hessian_trace(case.model, case.x, y, directions=40)
    assert e.dof == 40 - 2 * 3 - 1
    assert abs(e.value - exact.value) < 4 * e.se
    assert float(lambda_max(case.model, case.x, y, max_iter=400, rtol=1e-5)) == pytest.approx(
        float(torch.linalg.eigvalsh(full_hessian(case, y)[0])[-1]), rel=1e-8
    )


def test_half_precision_is_measured_on_a_float32_copy():
    case, y = tanh_net()
    half = copy.deepcopy(case.model).bfloat16()
    e = hessian_trace(half, case.x.bfloat16(), y, directions=ALL)
    ours = hessian_trace(copy.deepcopy(half).float(), case.x.bfloat16().float(), y, directions=ALL)
    assert e == ours
    assert half[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("model", ["linear", "constant"])
def test_a_loss_without_curvature_has_trace_zero(model):
    net = nn.Linear(3, 2).double()
    if model == "constant":
        net = Net(lambda s, x: x[:, :2], a=net)
    flat = lambda f, y: f.sum(1)  # noqa: E731
    x = torch.ones(4, 3).double()
    e = hessian_trace(net, x, torch.zeros(4), loss=flat, directions=4)
    assert e.value == 0
    assert float(lambda_max(net, x, torch.zeros(4), loss=flat)) == 0


# -- estimates: honest, unbiased, as accurate as asked for -----------------------------------------


def assert_honest(estimates, exact):
    """Student intervals hold the exact value as often as a binomial test at 1 % allows."""
    stats = pytest.importorskip("scipy.stats")
    hits = sum(abs(e.value - exact) <= stats.t.ppf(0.975, e.dof) * e.se for e in estimates)
    assert stats.binomtest(hits, len(estimates), 0.95).pvalue > 0.01, hits
    values = np.array([e.value for e in estimates])
    assert abs(values.mean() - exact) < 3.3 * values.std(ddof=1) / len(values) ** 0.5
    spread = np.sqrt(np.mean([e.se**2 for e in estimates]))
    assert spread == pytest.approx(values.std(ddof=1), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("directions", [15, 60])
def test_trace_intervals_cover_and_the_estimate_is_unbiased(directions):
    case, y = tanh_net()
    H, rows, _ = full_hessian(case, y)
    found = [
        hessian_trace(case.model, case.x, y, directions=directions, seed=seed)
        for seed in range(REPEATS)
    ]
    assert_honest(found, float(H.trace()))
    split = {name: np.mean([e.per_layer[name] for e in found]) for name in rows}
    errors = {name: np.std([e.per_layer[name] for e in found]) / 20 for name in rows}
    for name, exact in blocks(H, rows).items():
        assert abs(split[name] - exact) < 4 * errors[name]
        assert found[0].per_layer_se[name] > 0


@pytest.mark.slow
def test_adaptive_intervals_cover_and_the_estimate_is_unbiased():
    case, y = tanh_net()
    H, _, theta = full_hessian(case, y)
    found = [
        adaptive_sharpness_hessian(case.model, case.x, y, directions=30, seed=seed)
        for seed in range(REPEATS)
    ]
    assert_honest(found, float((H.diagonal() * theta**2).sum()))


@pytest.mark.slow
def test_sampled_intervals_cover_the_value_of_many_more():
    case, y = tanh_net()
    found = [
        adaptive_sharpness_sampled(case.model, case.x, y, perturbations=20, seed=seed)
        for seed in range(REPEATS)
    ]
    more = adaptive_sharpness_sampled(case.model, case.x, y, perturbations=10_000, seed=999)
    assert_honest(found, more.value)


@pytest.mark.slow
def test_the_sketch_beats_plain_hutchinson_at_equal_cost():
    case, y = tanh_net()
    H = full_hessian(case, y)[0]
    sketched = [hessian_trace(case.model, case.x, y, directions=90, seed=s) for s in range(40)]
    signs = 2.0 * torch.randint(0, 2, (40, 90, len(H)), dtype=torch.float64) - 1
    plain = torch.einsum("sdi,ij,sdj->sd", signs, H, signs).mean(1)
    error = np.std([e.value for e in sketched])
    assert error < 0.6 * float(plain.std())


@pytest.mark.parametrize("rtol", [0.1, 0.02, 1e-6])
@pytest.mark.parametrize("estimate", [hessian_trace, adaptive_sharpness_hessian])
def test_rtol_is_met(estimate, rtol):
    case, y = tanh_net()
    e = estimate(case.model, case.x, y, directions=12, rtol=rtol)
    assert e.converged
    assert e.se <= rtol * abs(e.value)
    if rtol == 1e-6:  # all columns cost less than so many random directions
        assert e.se == 0
        assert e.passes <= 12 + 122


def test_rtol_is_not_met_by_two_terms_that_agree_by_chance():
    case, y = tanh_net()
    for seed in range(20):
        e = hessian_trace(case.model, case.x, y, directions=4, rtol=0.5, seed=seed)
        assert e.dof >= 7 or e.se == 0


def test_rtol_of_the_sampled_value_is_met():
    case, y = tanh_net()
    e = adaptive_sharpness_sampled(case.model, case.x, y, perturbations=10, rtol=0.05)
    assert e.converged
    assert e.se <= 0.05 * e.value
    assert e.dof > 9


@pytest.mark.parametrize(
    ("estimate", "options"),
    [
        (hessian_trace, {"directions": 12}),
        (adaptive_sharpness_hessian, {"directions": 12}),
        (adaptive_sharpness_sampled, {"perturbations": 5}),
    ],
)
def test_a_limit_that_stops_the_work_is_reported(estimate, options):
    case, y = tanh_net()
    e = estimate(case.model, case.x, y, rtol=1e-6, limit=20, **options)
    assert not e.converged
    assert "rtol=1e-06 was not met with 20" in e.note
    with pytest.raises(FlatlensError, match="was not met"):
        float(e)


def test_the_same_seed_gives_the_same_number():
    case, y = tanh_net()
    a, b, c = (hessian_trace(case.model, case.x, y, seed=s).value for s in (3, 3, 4))
    assert a == b != c


# -- adaptive sharpness ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain_mlp", "module_called_twice", "transformer_encoder_layer"])
def test_adaptive_sharpness_of_the_hessian_is_eq_40(name):
    case = ZOO[name]()
    y = targets_of(case)
    H, rows, theta = full_hessian(case, y)
    e = adaptive_sharpness_hessian(
        case.model, case.x, y, output=case.output, directions=ALL, residual=True
    )
    expected = blocks(torch.diag(H.diagonal() * theta**2), rows)
    scale = max(map(abs, expected.values()))
    assert e.per_layer == pytest.approx(expected, rel=RTOL, abs=RTOL * scale)
    eq41 = fl.adaptive_sharpness(fl.probe(case.model, case.x, output=case.output))
    assert e.residual == pytest.approx(e.value - eq41, rel=1e-7)


def test_eqs_40_and_41_differ_on_a_gelu_network_with_sigmoid_outputs():
    case = mlp(4, 8, 3, act=nn.GELU)
    model = nn.Sequential(*case.model, nn.Sigmoid())
    y = torch.zeros(10, 3).double()
    e = adaptive_sharpness_hessian(model, case.x, y, directions=ALL, residual=True)
    assert abs(e.residual) > 0.1 * abs(e.value)


@pytest.mark.slow
def test_sampled_sharpness_tends_to_eq_40_as_rho_falls():
    case, y = tanh_net()
    limit = adaptive_sharpness_hessian(case.model, case.x, y, directions=ALL).value
    options = {"perturbations": 2000, "seed": 1}
    errors = []
    for rho in (0.5, 0.01):
        e = adaptive_sharpness_sampled(case.model, case.x, y, rho=rho, **options)
        errors.append((e.value - limit) / e.se)
    assert abs(errors[1]) < 3 < abs(errors[0])


def test_perturbations_see_the_kinks_of_relu_that_the_hessian_does_not():
    net = Net(lambda s, x: F.relu(s.w * x - 0.95), w=nn.Parameter(torch.ones(1).double()))
    x, y, loss = torch.ones(3, 1).double(), torch.zeros(3), lambda f, y: f.sum(1)
    assert adaptive_sharpness_hessian(net, x, y, loss=loss, directions=2).value == 0
    across = adaptive_sharpness_sampled(net, x, y, loss=loss, rho=0.1)
    assert across.value > 5 * across.se
    within = adaptive_sharpness_sampled(net, x, y, loss=loss, rho=0.001)
    assert abs(within.value) < 1e-6


def test_antithetic_pairs_have_less_noise_than_twice_as_many_single_ones():
    case, y = tanh_net()
    options = {"rho": 0.01, "seed": 2}
    pairs = adaptive_sharpness_sampled(case.model, case.x, y, perturbations=100, **options)
    single = adaptive_sharpness_sampled(
        case.model, case.x, y, perturbations=200, antithetic=False, **options
    )
    assert pairs.passes == single.passes == 201
    assert pairs.se < 0.1 * single.se


def test_scalings_of_eq_38_of_eq_46_as_printed_and_of_the_authors_code():
    case, y = tanh_net()
    options = {"rho": 0.1, "perturbations": 5}
    eq38 = adaptive_sharpness_sampled(case.model, case.x, y, **options)
    printed = adaptive_sharpness_sampled(case.model, case.x, y, scaling="paper", **options)
    code = adaptive_sharpness_sampled(
        case.model, case.x, y, scaling="code", loss="squared", **options
    )
    assert printed.value == pytest.approx(eq38.value * 0.1**2 / 2, rel=RTOL)
    assert code.value == pytest.approx(eq38.value, rel=RTOL)


# -- Eq. 47 ----------------------------------------------------------------------------------------


def test_ascent_on_a_linear_map_comes_close_to_its_norm_from_below():
    net = nn.Linear(6, 4).double()
    norm = float(torch.linalg.matrix_norm(net.weight.detach(), 2))
    e = input_sensitivity_ascent(net, torch.randn(5, 6).double(), steps=300)
    assert (e.samples <= norm * (1 + 1e-12)).all()
    assert e.value == pytest.approx(norm, rel=0.02)


def test_the_papers_thirty_steps_are_low_on_the_average_and_no_bound_for_a_sample():
    case = mlp(30, 40, 10, n=16)
    exact = fl.probe(case.model, case.x).input.singular[:, 0]
    e = input_sensitivity_ascent(case.model, case.x)
    assert e.value == pytest.approx(e.samples.mean())
    assert 0.8 < e.value / exact.mean() < 0.98
    assert (e.samples > exact).any()  # a finite step is not a derivative


def test_samples_climb_alone_and_the_history_counts_passes():
    case, _ = tanh_net()
    e = input_sensitivity_ascent(case.model, case.x, steps=5)
    assert [passes for passes, _ in e.history] == [2, 4, 6, 8, 10, 12]
    assert e.passes == 12
    assert np.isnan(e.se)  # nothing tells how far the ascent is from its end
    np.testing.assert_array_equal(e.history[-1][1], e.samples)
    chunked = input_sensitivity_ascent(case.model, case.x, steps=5, chunk=4)
    np.testing.assert_allclose(chunked.samples, e.samples, rtol=1e-12)


def test_start_and_optimiser_are_arguments():
    case, _ = tanh_net()
    options = {"optimizer": torch.optim.SGD, "lr": 0.5, "start": 1e-3, "steps": 200}
    e = input_sensitivity_ascent(case.model, case.x, **options)
    exact = fl.probe(case.model, case.x).input.singular[:, 0]
    assert not np.allclose(e.samples, input_sensitivity_ascent(case.model, case.x).samples)
    assert e.history[0][1].mean() < exact.mean()


def test_several_inputs_are_perturbed_together():
    net = Net(lambda s, a, b: s.a(a) + s.b(b), a=nn.Linear(3, 2), b=nn.Linear(2, 2)).double()
    x = (torch.randn(4, 3).double(), torch.randn(4, 2).double())
    W = torch.cat([net.a.weight, net.b.weight], 1).detach()
    e = input_sensitivity_ascent(net, x, steps=300)
    assert e.value == pytest.approx(float(torch.linalg.matrix_norm(W, 2)), rel=0.02)


@pytest.mark.parametrize("name", ["hessian_trace", "lambda_max", "normalized_sharpness"])
def test_samples_that_change_one_another_are_fed_alone_if_asked(name):
    net = Net(lambda s, x: s.fc(x - x.mean(0)), fc=nn.Linear(3, 2)).double()
    x, y = torch.randn(4, 3).double(), torch.zeros(4, 2).double()
    with pytest.raises(FlatlensError, match="chunk=1 measures each alone"):
        fl.measure(net, x, y, quantities=[name])
    assert np.isfinite(fl.measure(net, x, y, quantities=[name], chunk=1)[name])


# -- relative flatness -----------------------------------------------------------------------------


def petzka(case, y, weight, loss="half_squared"):
    """sum_ss' <w_s, w_s'> Tr H_ss' from the full Hessian."""
    H, rows, theta = full_hessian(case, y, loss)
    W = theta[rows[weight]].reshape(dict(case.unwrapped().named_parameters())[weight].shape)
    block = H[rows[weight], rows[weight]].reshape(*W.shape, *W.shape)
    return float(torch.einsum("st,sjtj->", W @ W.mT, block))


@pytest.mark.parametrize("loss", ["half_squared", "mean_squared", "cross_entropy:0.1"])
def test_relative_flatness_of_the_last_layer_is_exact(loss):
    case, _ = tanh_net()
    y = torch.arange(10) % 4
    e = relative_flatness(case.model, case.x, y, loss=loss, chunk=4)
    assert e.value == pytest.approx(petzka(case, y, "4.weight", loss), rel=RTOL)
    assert (e.se, e.passes) == (0, 0)
    assert e.value == pytest.approx(e.samples.mean(), rel=RTOL)
    assert e.per_layer == {"4": e.value}
    if loss == "half_squared":
        W, phi = case.model[4].weight.detach(), case.model[:4](case.x).detach()
        oracle = W.square().sum() * phi.square().sum(1).mean()
        assert e.value == pytest.approx(float(oracle), rel=RTOL)


def test_relative_flatness_for_a_loss_that_is_not_convex():
    case, y = tanh_net()

    def loss(f, y):
        return (f - y).sin().sum(1)

    e = relative_flatness(case.model, case.x, y, loss=loss)
    assert e.passes == 0
    assert e.value == pytest.approx(petzka(case, y, "4.weight", loss), rel=RTOL)


def test_relative_flatness_takes_no_other_layer_for_a_frozen_last_one():
    case, y = tanh_net()
    case.model[-1].weight.requires_grad_(False)
    with pytest.raises(fl.FlatlensError, match=r"last linear layer is not a trainable .* \(0, 2\)"):
        relative_flatness(case.model, case.x, y)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["0", "2.weight"])
def test_relative_flatness_of_an_inner_layer(layer):
    case, y = tanh_net()
    weight = layer if layer.endswith("weight") else f"{layer}.weight"
    expected = petzka(case, y, weight)
    e = relative_flatness(case.model, case.x, y, layer=layer, directions=ALL)
    assert e.value == pytest.approx(expected, rel=RTOL)
    found = [
        relative_flatness(case.model, case.x, y, layer=layer, directions=15, seed=s)
        for s in range(100)
    ]
    assert all(f.se > 0 for f in found)
    assert np.mean([abs(f.value - expected) < 3 * f.se for f in found]) > 0.9


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("module_called_twice", True),
        ("attention_self_fused", True),
        ("inplace_relu", True),
        ("narrow_head_then_sigmoid", False),
        ("narrow_head_used_twice", False),
        ("tied_linear_linear", False),
        ("tokens_that_cancel", False),
        ("narrow_head_on_tokens", False),
    ],
)
def test_relative_flatness_takes_the_closed_form_only_where_it_holds(name, closed):
    case = ZOO[name]()
    y = targets_of(case)
    e = relative_flatness(case.model, case.x, y, output=case.output, directions=ALL)
    assert (e.passes == 0) == closed
    (layer,) = e.per_layer
    names = dict(case.unwrapped().named_parameters())
    used = next(n for n in (layer, f"{layer}.weight", f"{layer}_weight") if n in names)
    assert e.value == pytest.approx(petzka(case, y, used), rel=RTOL)


class Turned(nn.Module):
    """A linear layer that keeps its weight as [d_in, d_out]."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight.detach().T.clone()), linear.bias

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize("out", [2, 3])  # where the weight is square its shape tells nothing
@pytest.mark.parametrize("tail", [nn.Identity, nn.Sigmoid])
@pytest.mark.parametrize("layer", ["2", "0"])
def test_relative_flatness_of_a_turned_weight_is_that_of_the_linear_layer(out, tail, layer):
    case = mlp(4, 3, out)
    case.model.append(tail())
    y = targets_of(case)
    expected = petzka(case, y, f"{layer}.weight")
    turned = nn.Sequential(Turned(case.model[0]), nn.Tanh(), Turned(case.model[2]), tail())
    for model in (case.model, turned):
        e = relative_flatness(model, case.x, y, layer=layer, directions=ALL)
        assert e.value == pytest.approx(expected, rel=RTOL)
        assert (e.passes == 0) == (tail is nn.Identity and layer == "2")
        e = relative_flatness(model, case.x, y, layer=layer, directions=4)  # not all of H
        assert e.value == pytest.approx(expected, abs=5 * e.se + RTOL * expected)


def test_relative_flatness_refuses_what_has_no_such_layer():
    case, y = tanh_net()
    with pytest.raises(FlatlensError, match=r"no layer 'head'.*there are 0, 2, 4"):
        relative_flatness(case.model, case.x, y, layer="head")
    conv = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten()).double()
    with pytest.raises(FlatlensError, match="needs a linear layer"):
        relative_flatness(conv, torch.randn(3, 1, 4).double(), torch.zeros(3, 6))


# -- Eq. 36 ----------------------------------------------------------------------------------------


def curvature(case, weight):
    """mean_i ||df_i/dW||^2, entry by entry: one backward pass per sample and output."""
    model = copy.deepcopy(case.unwrapped()).eval()
    W = dict(model.named_parameters())[weight]
    total, n = torch.zeros_like(W), len(case.run(model))
    for i in range(n):
        f = Case(model, case.sample(i), case.output).run(model).flatten()
        for v in f:
            total += torch.autograd.grad(v, W, retain_graph=True)[0] ** 2
    return (total / n).detach(), W.detach()


CURVED = {
    "plain_mlp": lambda W: [W],
    "inplace_relu": lambda W: [W],
    "frozen_weight": lambda W: [W],
    "layernorm_on_tokens": lambda W: [W],
    "tokens_time_major_folded": lambda W: [W],
    "tokens_time_first_as_many_as_samples": lambda W: [W],
    "module_called_twice": lambda W: [W],
    "tied_linear_linear": lambda W: [W],
    "weight_used_in_a_linear_and_elsewhere": lambda W: [W],
    "attention_self_batch_first": lambda W: [W],
    "conv2d_plain": lambda W: [W.flatten(1)],
    "conv_called_twice": lambda W: [W.flatten(1)],
    "conv_grouped": lambda W: [w.flatten(1) for w in W.chunk(2)],
    "conv_circular": lambda W: [W.flatten(1)],
    "images_folded_into_the_batch_for_a_conv": lambda W: [W.flatten(1)],
    "transposed_conv2d_overlapping": lambda W: [W.flatten(1).mT],
}


@pytest.mark.parametrize("name", CURVED)
def test_normalized_sharpness_of_each_layer(name):
    case = ZOO[name]()
    e = normalized_sharpness(case.model, case.x, output=case.output, lam=0.7, chunk=2)
    trained = {n: p for n, p in case.unwrapped().named_parameters() if p.requires_grad}
    assert e.value == pytest.approx(sum(e.per_layer.values()))
    for layer, value in e.per_layer.items():
        weight = next(n for n in (layer, f"{layer}.weight", f"{layer}_weight") if n in trained)
        groups = (lambda W: [W]) if trained[weight].dim() == 2 else CURVED[name]
        H, W = curvature(case, weight)
        pairs = zip(groups(H), groups(W), strict=True)
        expected = sum(minimise(h.numpy(), w.numpy(), 0.7).value for h, w in pairs)
        assert value == pytest.approx(expected, rel=1e-8)
        alone = normalized_sharpness(
            case.model, case.x, output=case.output, lam=0.7, layer=layer, chunk=3
        )
        assert alone.value == pytest.approx(value, rel=1e-8)


def test_normalized_sharpness_of_the_first_layer_is_the_right_hand_side_of_eq_37():
    case, _ = tanh_net()
    row = fl.bounds(fl.probe(case.model, case.x))["eq37"]
    e = normalized_sharpness(case.model, case.x, layer="0")
    assert e.value == pytest.approx(row.rhs, rel=1e-9)


def test_normalized_sharpness_does_not_change_when_neurons_are_rescaled():
    case = mlp(4, 8, 3, act=nn.ReLU)
    before = normalized_sharpness(case.model, case.x)
    scale = torch.linspace(0.2, 5, 8).double()
    with torch.no_grad():
        case.model[0].weight *= scale[:, None]
        case.model[0].bias *= scale
        case.model[2].weight /= scale
    after = normalized_sharpness(case.model, case.x)
    assert after.per_layer == pytest.approx(before.per_layer, rel=1e-9)


# -- second derivatives that torch has wrong -------------------------------------------------------


def differences(case, y, h=1e-5):
    """The Hessian of the mean loss by differences of gradients, column by column."""
    model = case.model
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()

    def gradient(at):
        nn.utils.vector_to_parameters(at, model.parameters())
        mean = (model(case.x).flatten(1) - y).square().sum(1).mean() / 2
        grads = torch.autograd.grad(mean, list(model.parameters()))
        return torch.cat([g.flatten() for g in grads])

    steps = h * torch.eye(len(theta)).to(theta)
    H = torch.stack([(gradient(theta + e) - gradient(theta - e)) / (2 * h) for e in steps])
    nn.utils.vector_to_parameters(theta, model.parameters())
    return H, theta


class Spelt(nn.Linear):
    """A weight-normed layer that calls the operation by another name."""

    def __init__(self, operation):
        super().__init__(6, 3)
        self.operation, self.g = operation, nn.Parameter(torch.rand(3, 1) + 0.5)

    def forward(self, x):
        return F.linear(x, self.operation(self.weight, self.g), self.bias)


def conv(norm, dim):
    return nn.Sequential(nn.Unflatten(1, (2, 3)), norm(nn.Conv1d(2, 3, 3), dim=dim), nn.Flatten())


WEIGHT_NORMS = {
    "parametrised": lambda: parametrizations.weight_norm(nn.Linear(6, 3)),
    "by a hook": lambda: nn.utils.weight_norm(nn.Linear(6, 3)),
    "columns": lambda: parametrizations.weight_norm(nn.Linear(6, 3), dim=1),
    "whole": lambda: parametrizations.weight_norm(nn.Linear(6, 3), dim=None),
    "conv": lambda: conv(parametrizations.weight_norm, 0),
    "conv, inputs": lambda: conv(parametrizations.weight_norm, 1),
    "conv by a hook": lambda: conv(nn.utils.weight_norm, 0),
    "aten": lambda: Spelt(torch.ops.aten._weight_norm),
    "aten default": lambda: Spelt(torch.ops.aten._weight_norm.default),
    "named": lambda: Spelt(lambda v, g: torch._weight_norm(v=v, g=g)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
@pytest.mark.parametrize("name", WEIGHT_NORMS)
def test_a_weight_normed_network_has_the_hessian_of_differences(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(WEIGHT_NORMS[name](), nn.Tanh(), nn.Linear(3, 2)).double()
        case, y = Case(net, torch.randn(8, 6).double()), torch.randn(8, 2).double()
    H, theta = differences(case, y)
    for options in ({}, {"chunk": 3}, {"rtol": 1e-9}):
        e = hessian_trace(net, case.x, y, **options)
        assert e.value == pytest.approx(float(H.trace()), rel=1e-6)
    e = adaptive_sharpness_hessian(net, case.x, y)
    assert e.value == pytest.approx(float(theta @ (H.diagonal() * theta)), rel=1e-6)
    e = lambda_max(net, case.x, y, rtol=1e-7)
    assert float(e) == pytest.approx(float(torch.linalg.eigvalsh((H + H.T) / 2)[-1]), rel=1e-6)
    e = adaptive_sharpness_sampled(net, case.x, y, rho=1e-3, rtol=0.05, limit=10**4)
    assert e.value == pytest.approx(float(theta @ (H.diagonal() * theta)), abs=5 * e.se)


class Scaled(torch.autograd.Function):
    """a x, with both derivatives right, and that by a taken for a constant."""

    @staticmethod
    def forward(ctx, a, x):
        ctx.save_for_backward(a, x)
        return a * x

    @staticmethod
    def backward(ctx, g):
        a, x = ctx.saved_tensors
        return (g * x.detach()).sum(0), g * a


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "estimate",
    [
        *(lambda *a, k=k: hessian_trace(*a, directions=k) for k in (ALL, 60, 4, 2)),
        lambda *a: adaptive_sharpness_hessian(*a),
        lambda *a: relative_flatness(*a, layer="a"),
        lambda *a: lambda_max(*a),
        lambda *a: lambda_max(*a, max_iter=1),
    ],
)
def test_a_wrong_second_derivative_is_refused(estimate, dtype):
    def run(s, x):
        return s.b(Scaled.apply(s.a.weight[:, 0], torch.tanh(s.a(x))))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(run, a=nn.Linear(4, 8), b=nn.Linear(8, 2)).to(dtype)
        x, y = torch.randn(5, 4).to(dtype), torch.randn(5, 2).to(dtype)
    with pytest.raises(FlatlensError, match=r"not symmetric .*second derivative .* is wrong"):
        estimate(net, x, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1, 30, 100, 1000])
def test_a_hessian_that_is_rounding_alone_is_not_taken_for_a_wrong_one(scale, dtype):
    """Cross-entropy far below what its precision resolves: no sample is near a boundary."""
    case = mlp(10, 30, 3, n=400)
    net = case.model.to(dtype)
    with torch.no_grad():
        top = net(case.x.to(dtype)).topk(2, 1).values
        x = case.x[(top[:, 0] - top[:, 1]).argsort(descending=True)[:20]].to(dtype)
        y = net(x).argmax(1)
        net[2].weight *= scale
    for estimate in (hessian_trace, adaptive_sharpness_hessian, lambda_max):
        e = estimate(net, x, y, loss="cross_entropy")
        assert scale == 1 or abs(e.value) < 1e-4


# -- the top eigenvalue ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["plain_mlp", "module_called_twice", "conv2d_plain", "transformer_encoder_layer"]
)
def test_lambda_max_is_the_top_eigenvalue_and_its_certificate_holds(name):
    case = ZOO[name]()
    y = targets_of(case)
    exact = torch.linalg.eigvalsh(full_hessian(case, y)[0])
    e = lambda_max(case.model, case.x, y, output=case.output, rtol=1e-4)
    assert e.converged
    assert e.certificate <= 1e-4 * e.value
    assert abs(e.value - float(exact[-1])) <= e.certificate
    eos = edge_of_stability(0.3, case.model, case.x, y, output=case.output, rtol=1e-4)
    assert float(eos) == pytest.approx(0.15 * float(e), rel=1e-12)
    assert eos.certificate == pytest.approx(0.15 * e.certificate, rel=1e-12)


def test_lambda_max_is_the_largest_also_where_another_is_larger_in_size():
    x, y = torch.ones(1, 1).double(), torch.zeros(1)
    net = Net(lambda s, x: x * s.a[0] + x * s.a[1], a=nn.Parameter(torch.ones(2).double()))
    net.run = lambda s, x: x * (s.a[0] ** 2 - 5 * s.a[1] ** 2)  # eigenvalues 2 and -10
    e = lambda_max(net, x, y, loss=lambda f, y: f.sum(1))
    assert float(e) == pytest.approx(2.0, rel=1e-9)


def test_an_unconverged_eigenvalue_is_no_result():
    case, y = tanh_net()
    exact = float(torch.linalg.eigvalsh(full_hessian(case, y)[0])[-1])
    for e in (
        lambda_max(case.model, case.x, y, max_iter=2, rtol=1e-6),
        edge_of_stability(2.0, case.model, case.x, y, max_iter=2, rtol=1e-6),
    ):
        assert not e.converged
        assert e.certificate > 1e-6 * e.value
        assert "not converged" in e.note
        assert e.value < exact
        with pytest.raises(FlatlensError, match="not converged"):
            float(e)


# -- nothing is left behind ------------------------------------------------------------------------


def everything(model, x, y):
    hessian_trace(model, x, y, residual=True)
    adaptive_sharpness_hessian(model, x, y)
    adaptive_sharpness_sampled(model, x, y, perturbations=2)
    input_sensitivity_ascent(model, x, steps=2)
    relative_flatness(model, x, y)
    relative_flatness(model, x, y, layer="0")
    normalized_sharpness(model, x)
    lambda_max(model, x, y)


def training_net():
    """Batch norm and dropout in training mode, gradients from the last step, a frozen bias."""
    net = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 3)
    ).double()
    net[4].bias.requires_grad_(False)
    x = torch.randn(8, 4).double()
    net(x).square().sum().backward()
    return net, x, torch.randn(8, 3).double()


def test_the_model_is_left_as_found():
    net, x, y = training_net()
    state = copy.deepcopy(net.state_dict())
    grads = [None if p.grad is None else (p.grad, p.grad.clone()) for p in net.parameters()]
    rng, inputs = torch.get_rng_state(), x.clone()
    everything(net, x, y)
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.equal(inputs, x)
    assert all(m.training for m in net.modules())
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    for p, before in zip(net.parameters(), grads, strict=True):
        assert (p.grad is None) == (before is None)
        if before is not None:
            assert p.grad is before[0]
            assert torch.equal(*before)
    assert [p.requires_grad for p in net.parameters()] == [True] * 5 + [False]
    assert torch.backends.mha.get_fastpath_enabled()


def test_dropout_and_batch_norm_are_measured_as_in_evaluation():
    net, x, y = training_net()
    e = hessian_trace(net, x, y, directions=ALL)
    assert e.per_layer == pytest.approx(
        blocks(*full_hessian(Case(net, x), y)[:2]), rel=RTOL, abs=1e-12
    )


def test_the_model_is_left_as_found_after_an_error():
    net, x, y = training_net()

    def broken(f, y):
        raise RuntimeError("no")

    rng = torch.get_rng_state()
    with pytest.raises(FlatlensError, match="the loss broken fails: no"):
        hessian_trace(net, x, y, loss=broken)
    assert all(m.training for m in net.modules())
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.backends.mha.get_fastpath_enabled()


def test_it_works_under_no_grad_and_inference_mode():
    case, y = tanh_net()
    plain = hessian_trace(case.model, case.x, y).value
    with torch.no_grad():
        assert hessian_trace(case.model, case.x, y).value == plain
    with torch.inference_mode():
        assert hessian_trace(case.model, case.x.clone(), y.clone()).value == plain


# -- the paper's reason for the squared loss -------------------------------------------------------


def trained(smoothing, steps):
    """A small network at (or on its way to) the optimum of cross-entropy on eight points."""
    case = mlp(2, 16, 3, n=8, seed=3)
    y = torch.arange(8) % 3
    loss = get_loss("cross_entropy", label_smoothing=smoothing)
    climb = torch.optim.LBFGS(
        case.model.parameters(), max_iter=steps, tolerance_grad=1e-10, tolerance_change=0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        climb.zero_grad()
        value = loss(case.model(case.x), y).mean()
        value.backward()
        return value

    climb.step(closure)
    e = hessian_trace(case.model, case.x, y, loss=loss, directions=ALL, residual=True)
    return e.value - e.residual, float(closure().detach())


def test_the_gauss_newton_trace_vanishes_with_the_loss_unless_labels_are_smoothed():
    hard = [trained(0.0, steps) for steps in (10, 40, 200)]
    soft = [trained(0.1, steps) for steps in (200, 2000)]
    traces = [trace for trace, _ in hard]
    assert traces[0] > traces[1] > traces[2]
    assert traces[2] < 1e-3 * soft[1][0]
    assert soft[1][0] == pytest.approx(soft[0][0], rel=0.5)
    p = torch.tensor([0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3])
    assert soft[1][1] == pytest.approx(float(-(p * p.log()).sum()), rel=1e-4)  # the optimum


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m, x, y: hessian_trace(m, x), "needs targets"),
        (lambda m, x, y: hessian_trace(m, x, y[:3]), "3 entries for 10 samples"),
        (lambda m, x, y: hessian_trace(m, x[:0], y[:0]), "no samples"),
        (lambda m, x, y: hessian_trace(m, x, y, chunk=0), "chunk=0"),
        (lambda m, x, y: hessian_trace(m, x, y, directions=1), "directions=1"),
        (lambda m, x, y: hessian_trace(m, x, y, rtol=0.0), "rtol=0.0"),
        (lambda m, x, y: hessian_trace(m, x, y, loss="hinge"), "'hinge' is unknown"),
        (lambda m, x, y: hessian_trace(m, x / 0, y), "input of sample 0 is not finite"),
        (lambda m, x, y: hessian_trace(m, x[:, :2], y), "the model fails on 1 sample"),
        (lambda m, x, y: hessian_trace(m, x, y, output=lambda f: f.mean()), "first dimension"),
        (
            lambda m, x, y: hessian_trace(m, x, y, output=lambda f: f - f.mean(0)),
            "samples must not depend on one another",
        ),
        (
            lambda m, x, y: hessian_trace(m, x, y, loss=lambda f, y: f.sum(1), residual=True),
            "losses with a name only",
        ),
        (lambda m, x, y: adaptive_sharpness_sampled(m, x, y, scaling="eq39"), "scaling='eq39'"),
        (lambda m, x, y: adaptive_sharpness_sampled(m, x, y, rho=0.0), "rho above 0"),
        (lambda m, x, y: input_sensitivity_ascent(m, x, start=0.0), "start above 0"),
        (lambda m, x, y: lambda_max(m, x, y, max_iter=0), "one iteration or more"),
        (lambda m, x, y: normalized_sharpness(m, x, lam=0.0), "lam=0.0"),
        (lambda m, x, y: normalized_sharpness(m, x, layer="9"), "there are 0, 2, 4"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, says):
    case, y = tanh_net()
    with pytest.raises(FlatlensError, match=says):
        call(case.model, case.x, y)


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (1, 3, 1, 1)])  # torch refuses the second itself
@pytest.mark.parametrize("batched", [False, True])
def test_batch_statistics_of_a_single_sample_are_refused_as_by_measure(shape, batched):
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    x, y = torch.randn(shape).double(), torch.randn(1, 2).double()
    net = nn.Sequential(norm, nn.Flatten(), nn.Linear(x.numel(), 2)).double()
    with pytest.raises(FlatlensError) as measured:
        fl.measure(net, x)
    assert "0 normalises with the statistics of the batch" in str(measured.value)
    calls = [hessian_trace, adaptive_sharpness_hessian, lambda_max, relative_flatness]
    calls += [adaptive_sharpness_sampled]
    for call in calls:
        with pytest.raises(FlatlensError) as refused:
            call(net, [(x, y)]) if batched else call(net, x, y)
        assert str(refused.value) == str(measured.value)
    for call in (normalized_sharpness, input_sensitivity_ascent):
        with pytest.raises(FlatlensError) as refused:
            call(net, x)
        assert str(refused.value) == str(measured.value)


def test_a_weight_standardised_by_batch_norm_is_no_batch_statistic():
    def run(s, x):
        w = F.batch_norm(s.a.weight.unsqueeze(0), None, None, training=True).squeeze(0)
        return s.b(torch.tanh(F.linear(x, w)))

    net = Net(run, a=nn.Conv1d(4, 3, 4), b=nn.Linear(3, 2)).double()
    net.a.weight = nn.Parameter(torch.randn(3, 4).double())
    case = Case(net, torch.randn(1, 4).double())
    y = torch.randn(1, 2).double()
    e = hessian_trace(net, case.x, y, directions=ALL)
    assert e.value == pytest.approx(float(full_hessian(case, y)[0].trace()), rel=RTOL)


@pytest.mark.parametrize("rho", [1e-2, 1e-3, 1e-4, 1e-5])
def test_the_rounding_of_the_loss_is_in_the_error_bar(rho):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    coarse = adaptive_sharpness_sampled(net, x, y, rho=rho, perturbations=50)
    exact = adaptive_sharpness_hessian(net.double(), x.double(), y.double())
    assert abs(coarse.value - exact.value) < 5 * coarse.se


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_scales_that_are_no_scale_are_refused(bad):
    net, x, y = nn.Linear(2, 2), torch.ones(3, 2), torch.zeros(3, 2)
    with pytest.raises(FlatlensError, match=r"finite rho|not a number"):
        adaptive_sharpness_sampled(net, x, y, rho=bad)
    with pytest.raises(FlatlensError, match=r"finite number|not a number"):
        normalized_sharpness(net, x, lam=bad)
