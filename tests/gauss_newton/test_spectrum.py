"""The spectrum of the Gauss-Newton matrix against dense eigenvalues of the explicit matrix."""

import copy

import numpy as np
import pytest
import torch
from oracles import forward, full_jacobians, mapped, original, tensors
from torch import nn
from traps import UNEVEN, ZOO
from traps.everyday import mostly_slow

import flatlens as fl
from flatlens.gauss_newton.factors import Lookups, Products, Vectors, gram_of
from flatlens.losses import get_loss

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch about even kernels
CASES = {**ZOO, **UNEVEN}


def dense(model, x, output=None, loss="half_squared", y=None):
    """G = (1/n) sum_i J_i^T H_i J_i, one sample and one output at a time."""
    model = copy.deepcopy(original(model)).eval()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    n = len(tensors(x)[0])
    total, blocks = torch.zeros(1, 1).double(), {}
    if not trained:
        return total, blocks
    for i in range(n):
        f = forward(model, mapped(lambda t, i=i: t[i : i + 1].detach(), x), output).flatten()
        found = full_jacobians(f, [(p, p.shape) for p in trained.values()])
        pieces = {
            name: torch.zeros(len(f), p.numel()).double() if j is None else j.reshape(len(f), -1)
            for (name, p), j in zip(trained.items(), found, strict=True)
        }
        target = None if y is None else y[i : i + 1]
        H = get_loss(loss).hessian(f.detach()[None], target)[0].double()
        J = torch.cat(list(pieces.values()), 1)
        total = total + J.mT @ H @ J / n
        for module in {name.rpartition(".")[0] or name for name in trained}:
            own = [t for k, t in pieces.items() if (k.rpartition(".")[0] or k) == module]
            own = torch.cat(own, 1)
            blocks[module] = blocks.get(module, 0.0) + own.mT @ H @ own / n
    return total, blocks


def eigenvalues(G, count):
    values = torch.linalg.eigvalsh(G).flip(0).numpy()
    return np.concatenate([values, np.zeros(count)])[:count]


def agree(s, G):
    """Every value to 1e-8, and nothing above rounding is missing."""
    want = eigenvalues(G, max(len(s.values), len(G)))
    scale = max(want[0], 1e-30)
    np.testing.assert_allclose(s.values, want[: len(s.values)], rtol=1e-8, atol=1e-12 * scale)
    assert (want[len(s.values) :] < 1e-11 * scale).all()


@pytest.mark.parametrize("name", mostly_slow(CASES))
def test_values_of_every_trap(name):
    case = CASES[name]()
    G, _ = dense(case.unwrapped(), case.x, case.output)
    alone = 1 if name in UNEVEN else None  # a batch of them would be another network
    s = fl.spectrum(case.model, case.x, output=case.output, chunk=alone)
    agree(s, G)
    assert s.exact
    np.testing.assert_allclose(s.trace, float(G.trace()), rtol=1e-10)


@pytest.mark.parametrize("name", list(ZOO)[::25])
def test_trace_is_the_sharpness(name):
    case = ZOO[name]()
    m = fl.measure(case.model, case.x, output=case.output, quantities=["sharpness"])
    s = fl.spectrum(case.model, case.x, output=case.output)
    np.testing.assert_allclose(s.trace, m["sharpness"], rtol=1e-12)


@pytest.mark.parametrize("name", list(ZOO)[::14])
def test_cross_entropy(name):
    case = ZOO[name]()
    if fl.probe(case.model, case.x, output=case.output).N < 2:
        pytest.skip("cross-entropy needs two outputs")
    G, _ = dense(case.unwrapped(), case.x, case.output, "cross_entropy")
    s = fl.spectrum(case.model, case.x, output=case.output, loss="cross_entropy")
    agree(s, G)
    m = fl.measure(
        case.model, case.x, output=case.output, loss="cross_entropy", quantities=["sharpness"]
    )
    np.testing.assert_allclose(s.trace, m["gauss_newton_trace"], rtol=1e-10)


def convolutions():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, groups=1),
        nn.Tanh(), nn.Flatten(), nn.Linear(12, 3),
    ).double()  # fmt: skip
    return net, torch.randn(5, 2, 4, 4).double()


def test_blocks_of_layers():
    net, x = convolutions()
    s = fl.spectrum(net, x, per_layer=True)
    _, blocks = dense(net, x)
    assert s.layers.keys() == blocks.keys()
    for name, values in s.layers.items():
        want = eigenvalues(blocks[name], len(values))
        np.testing.assert_allclose(values, want, rtol=1e-8, atol=1e-12 * want[0])


@pytest.mark.parametrize("options", [{"chunk": 1}, {"chunk": 2}, {"memory": 9000}], ids=str)
def test_chunks_and_rounds_change_nothing(options):
    net, x = convolutions()
    s, other = fl.spectrum(net, x, per_layer=True), fl.spectrum(net, x, per_layer=True, **options)
    np.testing.assert_allclose(s.values, other.values, rtol=1e-9, atol=1e-13 * s.lambda_max)
    assert s.exact
    assert other.exact
    assert s.layers.keys() == other.layers.keys()


def test_too_little_memory_for_one_parameter_is_estimated():
    net, x = convolutions()
    s = fl.spectrum(net, x, memory=100)
    assert not s.exact
    assert "GiB" in s.notes[0]


def test_a_function_as_loss():
    net, x = convolutions()
    y = torch.randn(5, 3).double()

    def quartic(f, y):
        return (f - y).pow(4).sum(1)

    agree(fl.spectrum(net, x, y, loss=quartic), dense(net, x, None, quartic, y)[0])
    with pytest.raises(fl.FlatlensError, match="needs targets"):
        fl.spectrum(net, x, loss=quartic)


@pytest.mark.parametrize("options", [{}, {"max_size": 1, "rtol": 1e-9}], ids=["exact", "lanczos"])
@pytest.mark.parametrize("loss", ["half_squared", "cross_entropy"])
def test_vectors_are_eigenvectors(options, loss):
    net, x = convolutions()
    s = fl.spectrum(net, x, loss=loss, **options)
    G, _ = dense(net, x, None, loss)
    names = [name for name, p in net.named_parameters()]
    for value, vector in zip(s.values, s.vectors(4), strict=False):
        v = torch.cat([vector[name].flatten() for name in names])
        assert vector["0.weight"].shape == net[0].weight.shape
        assert float(v.norm()) == pytest.approx(1, rel=1e-8)
        torch.testing.assert_close(G @ v, value * v, rtol=0, atol=1e-7 * s.lambda_max)


def test_vectors_of_a_changed_model_are_refused():
    net, x = convolutions()
    s = fl.spectrum(net, x)
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] += 1e-3
    with pytest.raises(fl.FlatlensError, match="has changed"):
        s.vectors(1)
    with pytest.raises(fl.FlatlensError, match="values above zero"):
        s.vectors(1000)


def test_summaries_follow_from_the_values():
    net, x = convolutions()
    s = fl.spectrum(net, x)
    G, _ = dense(net, x)
    ridge = 0.3
    shrunk = torch.linalg.solve(G + ridge * torch.eye(len(G)).double(), G)
    assert s.effective_dimension(ridge) == pytest.approx(float(shrunk.trace()), rel=1e-9)
    ratio = float(G.trace() ** 2 / G.square().sum())
    assert s.participation_ratio == pytest.approx(ratio, rel=1e-9)
    assert s.condition == pytest.approx(s.values[0] / s.values[-1])
    assert s.effective_dimension_se(ridge) == s.participation_ratio_se == 0.0
    with pytest.raises(fl.FlatlensError, match="ridge"):
        s.effective_dimension(-1.0)


# -- beyond max_size


def test_lanczos_finds_the_top_values():
    net, x = convolutions()
    s = fl.spectrum(net, x)
    e = fl.spectrum(net, x, max_size=3, top=6, rtol=1e-9)
    assert not e.exact
    assert e.converged.all()
    np.testing.assert_allclose(e.values, s.values[:6], rtol=1e-8)
    assert e.trace == pytest.approx(s.trace, rel=1e-12)


def test_lanczos_says_what_has_not_converged():
    net, x = convolutions()
    e = fl.spectrum(net, x, max_size=3, top=6, rtol=1e-12, max_products=9)
    assert not e.converged.all()
    assert any("not converged" in note for note in e.notes)
    truth = np.append(fl.spectrum(net, x).values, 0.0)
    near = np.abs(truth[:, None] - e.values).min(0)
    assert (near <= e.residuals + 1e-9).all()  # an eigenvalue lies within each residual


@pytest.mark.slow
def test_error_bars_of_the_density_cover():
    torch.manual_seed(2)
    net, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double(), torch.randn(9, 5)
    s = fl.spectrum(net, x.double())
    want = [s.participation_ratio, s.effective_dimension(0.05)]
    scores = []
    for seed in range(10):
        e = fl.spectrum(net, x.double(), max_size=3, top=3, seed=seed, probes=10)
        got = [e.participation_ratio, e.effective_dimension(0.05)]
        errors = [e.participation_ratio_se, e.effective_dimension_se(0.05)]
        scores.append((np.array(got) - want) / errors)
    assert np.abs(scores).mean() < 1.6  # 0.85 for Student's t with 9 degrees of freedom
    assert np.abs(np.mean(scores, 0)).max() < 1.2


def test_the_density_counts_eigenvalues():
    net, x = convolutions()
    s, e = fl.spectrum(net, x), fl.spectrum(net, x, max_size=3, top=10, probes=20)
    count, error = e.density.count_above(1e-6 * s.lambda_max)
    assert abs(count - s.rank) < 4 * error + 1


# -- factors


def test_factors_of_different_forms_meet():
    torch.manual_seed(0)
    u, J = torch.randn(3, 1, 4, 2).double(), torch.randn(3, 1, 2, 5, 2).double()
    order = torch.randperm(20)
    products = Products(u, J, order)
    both = [products, Vectors(products.vectors())]
    K = gram_of(both)
    torch.testing.assert_close(K[:6, :6], K[6:, 6:])
    torch.testing.assert_close(K[:6, :6], products.gram())


def test_lookups_add_up_where_an_index_repeats():
    torch.manual_seed(0)
    values, indices = torch.randn(3, 2, 4, 5).double(), torch.tensor([[0, 1, 1, 7]] * 3)
    factor = Lookups(values, indices, 9)
    F = factor.vectors()
    torch.testing.assert_close(factor.gram(), F @ F.mT)


@pytest.mark.parametrize("positions", [1, 2, 40])
def test_both_routes_of_a_weight(positions):
    torch.manual_seed(0)
    factor = Products(
        torch.randn(4, 2, 3, positions).double(),
        torch.randn(4, 2, 2, 5, positions).double(),
        torch.arange(30),
    )
    F = factor.vectors()
    torch.testing.assert_close(factor.gram(), F @ F.mT)


# -- others


@pytest.mark.slow
def test_curvlinops_and_hessian_eigenthings_agree():
    curvlinops = pytest.importorskip("curvlinops")
    eigenthings = pytest.importorskip("hessian_eigenthings")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    x, y = torch.randn(7, 6).double(), torch.randint(4, (7,))
    s = fl.spectrum(net, x, loss="cross_entropy")
    G = curvlinops.GGNLinearOperator(net, nn.CrossEntropyLoss(), list(net.parameters()), [(x, y)])
    dense_matrix = G @ torch.eye(G.shape[1], dtype=torch.float64)
    np.testing.assert_allclose(s.values[:5], eigenvalues(dense_matrix, 5), rtol=1e-8)
    theirs = eigenthings.GGNOperator(
        net, [(x, y)], lambda model, batch: model(batch[0]),
        lambda f, batch: nn.functional.cross_entropy(f, batch[1]),
    )  # fmt: skip
    # Its Lanczos repeats the largest value (ghosts), so that one value is compared.
    top = eigenthings.lanczos(theirs, k=1, max_iter=theirs.size, tol=1e-10, seed=0).eigenvalues
    assert s.lambda_max == pytest.approx(float(top[0]), rel=1e-8)


# -- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top"),
        ({"max_size": 0}, "max_size"),
        ({"probes": 1}, "probes"),
        ({"rtol": -1.0}, "rtol"),
        ({"loss": "nothing"}, "unknown"),
        ({"y": torch.zeros(3)}, "3 entries for 5"),
        ({"max_size": 3, "per_layer": True}, "per_layer"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(options, message):
    net, x = convolutions()
    with pytest.raises(fl.FlatlensError, match=message):
        fl.spectrum(net, x, **options)


def test_a_network_without_trainable_parameters_has_no_spectrum():
    net = nn.Linear(2, 2).double().requires_grad_(False)
    s = fl.spectrum(net, torch.ones(2, 2).double())
    assert (len(s.values), s.trace, s.lambda_max, s.rank) == (0, 0.0, 0.0, 0)


def test_the_model_is_left_as_it_was():
    net, x = convolutions()
    net.train()
    before = copy.deepcopy(net.state_dict())
    fl.spectrum(net, x).vectors(1)
    fl.spectrum(net, x, max_size=2)
    assert net.training
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_float32_agrees_with_float64():
    net, x = convolutions()
    s, narrow = fl.spectrum(net, x), fl.spectrum(copy.deepcopy(net).float(), x.float())
    np.testing.assert_allclose(narrow.values[:10], s.values[:10], rtol=1e-4)


def test_it_is_drawn_and_printed():
    net, x = convolutions()
    for s in (fl.spectrum(net, x, per_layer=True), fl.spectrum(net, x, max_size=3)):
        assert s.plot().get_xlabel() == "rank"
        assert "lambda_max" in str(s)
        assert s.to_dict()["lambda_max"] == s.lambda_max
