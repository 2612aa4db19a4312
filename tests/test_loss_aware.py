"""Loss-aware quantities: those of R^T f, R R^T the Hessian of the loss by the outputs.

The oracle takes that Hessian from autograd, its symmetric root from `eigh`, and full Jacobians of
(root f) sample by sample.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle_bounds import oracle_bounds
from oracles import oracle
from random_networks import FAMILIES, random_network
from torch import nn
from traps import ZOO, Case

import flatlens as fl

RTOL = 1e-8  # a root of a Hessian with zero eigenvalues has half the digits


def log_cosh(f, y):
    return (f - y).cosh().log().sum(1)


def half(f, y):
    return 0.5 * (f - F.one_hot(y, f.shape[1]).to(f)).square().sum(1)


def binary(f, y, smoothing=0.0):
    target = F.one_hot(y, f.shape[1]).to(f) * (1 - smoothing) + smoothing / 2
    return F.binary_cross_entropy_with_logits(f, target, reduction="none").sum(1)


LOSSES = {  # what flatlens is given, and what torch says that it is
    "cross_entropy": ("cross_entropy", F.cross_entropy),
    "cross_entropy, smoothed": (
        "cross_entropy:0.2",
        lambda f, y: F.cross_entropy(f, y, label_smoothing=0.2),
    ),
    "binary_cross_entropy": ("binary_cross_entropy", binary),
    "binary_cross_entropy, smoothed": (
        "binary_cross_entropy:0.1",
        lambda f, y: binary(f, y, 0.1),
    ),
    "mean_squared": ("mean_squared", lambda f, y: F.mse_loss(f, F.one_hot(y, f.shape[1]).to(f))),
    "squared": ("squared", lambda f, y: 2 * half(f, y)),
    "log_cosh": (log_cosh, log_cosh),
    "module": (nn.CrossEntropyLoss(), F.cross_entropy),
}
NETWORKS = [
    "plain_mlp",
    "residual",
    "module_called_twice",
    "conv2d_plain",
    "frozen_weight",
    "free_scale_and_shift",
    "attention_self_batch_first",
    "layernorm_on_tokens",
    "softmax_head",
    "narrow_head",
    "narrow_head_then_sigmoid",
    "narrow_head_frozen",
    "narrow_head_on_tokens",
]


def outputs(case: Case) -> torch.Tensor:
    with torch.no_grad():
        f = case.run(case.model.eval())
    return f.reshape(len(f), -1)


def some_targets(f: torch.Tensor, values: bool) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    if values:
        return f + torch.randn(f.shape, generator=g, dtype=f.dtype)
    return torch.randint(0, f.shape[1], (len(f),), generator=g)


def root(H: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(H)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.mT


def weighed(loss, y: torch.Tensor):
    """output= of the oracle for one sample: the symmetric root times f."""

    def output(f):
        f = f.reshape(1, -1)
        H = torch.autograd.functional.hessian(lambda v: loss(v, y).sum(), f.detach())
        return f @ root(H.reshape(f.shape[1], -1))

    return output


def truth(case: Case, loss, y: torch.Tensor) -> dict[str, float]:
    found = [
        oracle(case.model, case.sample(i), weighed(loss, y[i : i + 1])).metrics()
        for i in range(len(y))
    ]
    names = {"gauss_newton_trace": "sharpness", "loss_mls": "mls", "loss_nmls": "nmls"}
    return {name: float(np.mean([f[metric] for f in found])) for name, metric in names.items()}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", NETWORKS)
def test_against_full_jacobians(name, loss):
    case, (given, plain) = ZOO[name](), LOSSES[loss]
    y = some_targets(outputs(case), loss == "log_cosh")
    m = fl.measure(case.model, case.x, y, output=case.output, loss=given, method="exact")
    for quantity, want in truth(case, plain, y).items():
        assert m[quantity] == pytest.approx(want, rel=RTOL), quantity
    f = outputs(case)
    each = [float(plain(f[i : i + 1], y[i : i + 1]).sum()) for i in range(len(f))]
    assert m["loss"] == pytest.approx(np.mean(each), rel=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_papers_quantities_stay_the_papers(name):
    case = ZOO[name]()
    y = some_targets(outputs(case), False)
    plain = fl.measure(case.model, case.x, output=case.output)
    m = fl.measure(case.model, case.x, y, output=case.output, loss="cross_entropy")
    for quantity, value in plain.values.items():
        np.testing.assert_array_equal(m[quantity], value, quantity)
    assert plain.loss_aware is None
    assert "gauss_newton_trace" not in plain.values


def test_half_squared_is_the_papers_own():
    case = ZOO["plain_mlp"]()
    y = some_targets(outputs(case), False)
    m = fl.measure(case.model, case.x, y, loss=half)
    assert m["gauss_newton_trace"] == pytest.approx(m["sharpness"], rel=1e-10)
    assert m["loss_mls"] == pytest.approx(m["mls"], rel=1e-10)
    assert m["loss_nmls"] == pytest.approx(m["nmls"], rel=1e-10)


def test_chunks_take_their_own_targets():
    """The Hessian of log cosh depends on y: a sample must meet its own."""
    case = ZOO["plain_mlp"]()
    y = some_targets(outputs(case), True)
    whole = fl.measure(case.model, case.x, y, loss=log_cosh)
    parts = fl.measure(case.model, case.x, y, loss=log_cosh, chunk=1)
    batches = [(case.x[:1], y[:1]), (case.x[1:], y[1:])]
    streamed = fl.measure(case.model, batches, loss=log_cosh)
    for quantity in ("gauss_newton_trace", "loss_mls", "loss_nmls", "loss"):
        assert parts[quantity] == pytest.approx(whole[quantity], rel=1e-10)
        assert streamed[quantity] == pytest.approx(whole[quantity], rel=1e-10)
    turned = fl.measure(case.model, case.x, y.flip(0), loss=log_cosh)
    assert turned["gauss_newton_trace"] != pytest.approx(whole["gauss_newton_trace"], rel=1e-3)


def test_losses_without_targets_in_their_hessian_need_none():
    case = ZOO["plain_mlp"]()
    y = some_targets(outputs(case), False)
    with_y, without = (fl.measure(case.model, case.x, t, loss="cross_entropy") for t in (y, None))
    assert without["gauss_newton_trace"] == with_y["gauss_newton_trace"]


# -- inequalities --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", range(len(FAMILIES)), ids=lambda k: FAMILIES[k].__name__)
def test_theorems_hold_for_every_loss(family):
    """Some three hundred random networks; losses take turns."""
    specs = ("cross_entropy", "binary_cross_entropy", "mean_squared", half)
    for k in range(25):
        case = random_network(family + k * len(FAMILIES))
        f = outputs(case)
        loss = specs[k % 4] if f.shape[1] > 1 else "binary_cross_entropy"
        y = some_targets(f, f.shape[1] == 1).clamp(0, f.shape[1])
        m = fl.measure(case.model, case.x, y, output=case.output, loss=loss)
        theorems = [row for row in m.loss_aware.bounds if row.verdict == "theorem"]
        assert theorems
        for row in theorems:
            assert row.holds, (family + k * len(FAMILIES), row)


@pytest.mark.parametrize(
    "name", ["plain_mlp", "residual", "conv2d_plain", "module_called_twice", "narrow_head"]
)
def test_both_sides_against_the_oracle(name):
    case = ZOO[name]()
    m = fl.measure(case.model, case.x, output=case.output, loss="cross_entropy")

    def output(f):
        p = f.detach().reshape(-1).softmax(0)
        return f.reshape(1, -1) @ root(torch.diag(p) - torch.outer(p, p))

    wanted = oracle_bounds(case.model, case.x, output)
    seen = 0
    for row in m.loss_aware.bounds:
        # diag(p) - p p^T has rank N - 1: volumes are 0, or rounding to the oracle
        if row.verdict == "not applicable" or row.name in ("eq8", "eq9", "eq10", "log_volume"):
            continue
        want, seen = wanted[row.name], seen + 1
        tolerance = 1e-5 if row.name == "eq37" else 1e-6
        for got, side in ((row.lhs, want.lhs), (row.rhs, want.rhs)):
            if not np.isnan(side):  # the oracle does not know it
                assert got == pytest.approx(side, rel=tolerance), row.name
        assert (row.verdict == "theorem") == bool(want.theorem), row.name
    assert seen >= 9


def test_softmax_leaves_one_direction_out():
    """Adding a constant to all logits changes nothing: R^T A has rank N - 1 at most."""
    case = ZOO["plain_mlp"]()
    m = fl.measure(case.model, case.x, loss="cross_entropy")
    assert m.probe.input.rank.max() == m.probe.N
    assert m.loss_aware.probe.input.rank.max() == m.probe.N - 1
    assert m.loss_aware["volume"] == 0


# -- a sketch of it ------------------------------------------------------------


def test_sketched_loss_aware_quantities_agree_with_the_exact_ones():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40)).double()
        x = torch.randn(5, 40).double()
    y = torch.arange(5)
    exact = fl.measure(model, x, y, loss="cross_entropy", method="exact")
    m = fl.measure(model, x, y, loss="cross_entropy", method="sketch", directions=20)
    assert m.loss_aware.probe.sketch is not None
    error = m["gauss_newton_trace_se"]
    assert 0 < error < 0.2 * m["gauss_newton_trace"]
    assert abs(m["gauss_newton_trace"] - exact["gauss_newton_trace"]) < 5 * error
    assert m["loss_mls"] == pytest.approx(exact["loss_mls"], rel=1e-3)
    assert m["loss_nmls"] == pytest.approx(exact["loss_nmls"], rel=1e-3)
    assert all(row.holds for row in m.loss_aware.bounds if row.verdict == "theorem")


# -- the paper's reason for squared loss ---------------------------------------


def trained(smoothing: float, steps: int) -> tuple[float, float]:
    """The Gauss-Newton trace and the loss above its least value, after full-batch training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 3)).double()
        x = torch.randn(6, 3).double()
    y = torch.arange(6) % 3
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=0,
        tolerance_change=0,
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=smoothing)
        loss.backward()
        return loss

    optimizer.step(closure)
    target = F.one_hot(y, 3).double() * (1 - smoothing) + smoothing / 3
    least = -torch.special.xlogy(target, target).sum(1).mean()
    m = fl.measure(model, x, y, loss=f"cross_entropy:{smoothing}")
    return m["gauss_newton_trace"], m["loss"] - float(least)


@pytest.mark.slow
def test_smoothed_cross_entropy_does_not_become_flat_at_its_optimum():
    """p = the smoothed targets there, so that diag(p) - p p^T stays; without smoothing it goes."""
    smoothed, above = trained(0.1, 2000)
    assert above < 1e-8  # the optimum itself
    assert smoothed > 0.1
    early, late = trained(0.0, 20), trained(0.0, 400)
    assert late[0] < 1e-4 < 1e-3 * smoothed
    assert late[0] < early[0]
    assert late[1] < 1e-4
