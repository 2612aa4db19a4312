"""Each loss is what torch says it is, and R R^T is its Hessian."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

import flatlens as fl
from flatlens import FlatlensError
from flatlens.losses import get_loss, targets

N, n = 5, 7
NAMED = [
    "half_squared",
    "squared",
    "mean_squared",
    "cross_entropy",
    "cross_entropy:0.1",
    "binary_cross_entropy",
    "binary_cross_entropy:0.2",
]


@pytest.fixture
def f():
    return 2 * torch.randn(n, N, generator=torch.Generator().manual_seed(0)).double()


@pytest.fixture
def y():
    return torch.randint(0, N, (n,), generator=torch.Generator().manual_seed(1))


def log_cosh(f, y):
    return (f - y.reshape(len(f), -1)).cosh().log().sum(1)


def huber_mean(f, y):
    return F.huber_loss(f, F.one_hot(y, N).to(f), reduction="mean", delta=10.0)


def hessians(loss, f, y):
    """The oracle: one Hessian after another by torch."""
    one = [
        torch.autograd.functional.hessian(lambda v, i=i: loss(v[None], y[i : i + 1]).sum(), f[i])
        for i in range(len(f))
    ]
    return torch.stack(one)


@pytest.mark.parametrize(
    "spec",
    [*NAMED, huber_mean, nn.CrossEntropyLoss(label_smoothing=0.3)],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_root_times_its_transpose_is_the_hessian(spec, f, y):
    loss = get_loss(spec)
    R = loss.root(f, y)
    torch.testing.assert_close(R @ R.mT, hessians(loss, f, y), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss.hessian(f, y), R @ R.mT, rtol=1e-10, atol=1e-12)
    products, v = loss.root_products(f, y), torch.randn_like(R[:, 0])
    assert products.width == R.shape[2]
    torch.testing.assert_close(products.times(v), (R @ v[..., None])[..., 0], rtol=1e-10, atol=0)
    back = (R.mT @ f[..., None])[..., 0]
    torch.testing.assert_close(products.transposed_times(f), back, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("spec", "theirs"),
    [
        ("half_squared", lambda f, y: 0.5 * N * F.mse_loss(f, F.one_hot(y, N).to(f))),
        ("squared", lambda f, y: N * F.mse_loss(f, F.one_hot(y, N).to(f))),
        ("mean_squared", lambda f, y: F.mse_loss(f, F.one_hot(y, N).to(f))),
        ("cross_entropy", F.cross_entropy),
        ("cross_entropy:0.1", lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1)),
        (
            "binary_cross_entropy",
            lambda f, y: N * F.binary_cross_entropy_with_logits(f, F.one_hot(y, N).to(f)),
        ),
    ],
)
def test_named_losses_are_those_of_torch(spec, theirs, f, y):
    torch.testing.assert_close(get_loss(spec)(f, y).mean(), theirs(f, y))


def test_probabilities_are_targets_of_cross_entropy_too(f):
    p = torch.rand(n, N, generator=torch.Generator().manual_seed(2)).double().softmax(1)
    ours = get_loss("cross_entropy", label_smoothing=0.2)(f, p)
    theirs = F.cross_entropy(f, p, label_smoothing=0.2, reduction="none")
    torch.testing.assert_close(ours, theirs)


def test_one_logit_with_a_yes_or_no_takes_binary_cross_entropy(f):
    yes = torch.tensor([0, 1, 1, 0, 1, 0, 1])
    ours = get_loss("binary_cross_entropy")(f[:, :1], yes)
    theirs = F.binary_cross_entropy_with_logits(f[:, 0], yes.double(), reduction="none")
    torch.testing.assert_close(ours, theirs)


def test_root_of_cross_entropy_keeps_its_digits_where_the_loss_is_tiny():
    f = torch.tensor([[60.0, 0.0, 1.0]]).double()  # p = 1 - 3e-26: 1 - p is 0 in float64
    R = get_loss("cross_entropy").root(f)
    rest = torch.exp(f[0, 1:] - 60).sum()
    torch.testing.assert_close((R @ R.mT)[0, 0, 0], rest, rtol=1e-10, atol=0)
    products, one = get_loss("cross_entropy").root_products(f), torch.eye(3).double()
    by_products = torch.cat([products.times(e[None]) for e in one]).T
    torch.testing.assert_close(by_products, R[0], rtol=1e-10, atol=0)
    transposed = torch.cat([products.transposed_times(e[None]) for e in one]).T
    torch.testing.assert_close(transposed, R[0].T, rtol=1e-10, atol=0)


def test_no_matrix_of_all_pairs_of_outputs_is_formed_in_a_sketch():
    """With 40,000 classes such a matrix has 6.4 GB."""
    torch.manual_seed(0)
    net, x = nn.Linear(3, 40_000), torch.randn(2, 3)  # the narrow head would take 3 products
    largest = [0]

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest[0] = max(largest[0], result.untyped_storage().nbytes())
            return result

    options = {"method": "sketch", "directions": 8, "quantities": ["sharpness"]}
    with Largest():
        m = fl.measure(net, x, torch.tensor([0, 1]), loss="cross_entropy", **options)
    assert largest[0] < 1000 * 40_000 * 4
    p = net(x).detach().softmax(1)
    exact = ((1 - p.square().sum(1)) * (1 + x.square().sum(1))).mean()  # Tr(diag p - p p^T)
    assert abs(m["gauss_newton_trace"] - float(exact)) < 5 * m["gauss_newton_trace_se"]


def test_one_number_for_the_batch_and_one_for_each_sample_mean_the_same(f, y):
    each = get_loss(lambda f, y: F.cross_entropy(f, y, reduction="none"))
    for whole in (F.cross_entropy, nn.CrossEntropyLoss(reduction="sum")):
        torch.testing.assert_close(get_loss(whole)(f, y), each(f, y))


def test_a_root_may_depend_on_the_targets(f):
    loss = get_loss(log_cosh)
    y = torch.randn(n, N, generator=torch.Generator().manual_seed(3)).double()
    R = loss.root(f, y)
    expected = torch.diag_embed((f - y).cosh() ** -2)
    torch.testing.assert_close(R @ R.mT, expected, rtol=1e-10, atol=1e-12)


def test_a_loss_that_is_not_convex_is_refused_as_such(f, y):
    loss = get_loss(lambda f, y: f.sin().sum(1))
    with pytest.raises(FlatlensError, match="not convex in the outputs"):
        loss.root(f, y)
    torch.testing.assert_close(loss.hessian(f, y), torch.diag_embed(-f.sin()))


class SquaredOnce(torch.autograd.Function):
    """The squared error with a backward pass that autograd does not differentiate."""

    @staticmethod
    def forward(ctx, f, y):
        ctx.save_for_backward(f - y)
        return (f - y).square().sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (error,) = ctx.saved_tensors
        return 2 * g[:, None] * error, None


TWICE = {
    "a backward pass of one's own": (SquaredOnce.apply, r"SquaredOnce|apply.*is wrong"),
    "no formula": (lambda f, y: F.multi_margin_loss(f, y[:, 0].long() % 3), "no second derivative"),
    "not finite": (lambda f, y: (f - f.detach()).norm(dim=1), "not finite"),
    "detached": (lambda f, y: (f.detach() - y).square().sum(1), "has no derivative"),
    "counted": (lambda f, y: (f.argmax(1) == 0).long(), "returns values of torch.int64"),
}


@pytest.mark.parametrize("measured", ["sharpness", "hessian_trace"])
@pytest.mark.parametrize("kind", TWICE)
def test_a_loss_without_a_right_second_derivative_is_refused(kind, measured):
    loss, says = TWICE[kind]
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3).double(), torch.randn(3, 4).double(), torch.rand(3, 3).double()
    with pytest.raises(FlatlensError, match=says):
        fl.measure(net, x, y, loss=loss, quantities=[measured])


def test_losses_with_kinks_or_a_constant_slope_are_measured():
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3).double(), torch.randn(3, 4).double(), torch.rand(3, 3).double()
    for loss in (nn.L1Loss(), nn.HuberLoss(delta=1e-4), lambda f, y: f.relu().sum(1)):
        assert fl.perturb.hessian_trace(net, x, y, loss=loss).value == 0


def test_a_zero_hessian_has_a_zero_root(f, y):
    assert not get_loss(lambda f, y: f.square().sum(1) * 0).root(f, y).any()


@pytest.mark.parametrize("y", [[1, 0, 2], torch.tensor([1, 0, 2], dtype=torch.int32)])
def test_classes_become_one_hot(y):
    like = torch.zeros(3, 3, dtype=torch.float64)
    torch.testing.assert_close(targets(y, 3, like), torch.eye(3).double()[[1, 0, 2]])


def test_integers_are_values_where_there_is_one_output():
    like = torch.zeros(2, 1)
    torch.testing.assert_close(targets(torch.tensor([7, -2]), 1, like), torch.tensor([[7.0], [-2]]))


@pytest.mark.parametrize(
    ("spec", "y", "says"),
    [
        ("half_squared", [0, 1, 2], "3 entries for 7 samples"),
        ("half_squared", [0, 1, 2, 3, 4, 5, 0], "class 5, but the network has the outputs 0 to 4"),
        ("half_squared", [0, -1, 2, 3, 4, 0, 0], "the class -1"),
        ("half_squared", torch.zeros(7, 4), "shape \\(7, 4\\) for 7 samples of 5 outputs"),
        ("cross_entropy", torch.zeros(7, 5), "probabilities that sum to 1"),
        ("binary_cross_entropy", torch.full((7, 5), 2.0), "values from 0 to 1"),
        (lambda f, y: f, [0] * 7, "returns \\(7, 5\\) for 7 samples"),
        (lambda f, y: 1.0, [0] * 7, "returns float for 7 samples"),
        (F.cross_entropy, [0, 1], "one entry for each of the 7 samples"),
    ],
)
def test_wrong_targets_are_refused_in_one_sentence(spec, y, says, f):
    with pytest.raises(FlatlensError, match=says):
        get_loss(spec)(f, y)


def test_cross_entropy_of_one_output_points_to_the_binary_one():
    with pytest.raises(FlatlensError, match="binary_cross_entropy"):
        get_loss("cross_entropy")(torch.zeros(2, 1), [0, 1])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("hinge", "choose from half_squared"),
        ("cross_entropy:much", "'much' in loss='cross_entropy:much'"),
        ("cross_entropy:1.5", "label_smoothing=1.5"),
        ("squared:0.1", "takes no label smoothing"),
    ],
)
def test_unknown_losses_are_refused_in_one_sentence(spec, says):
    with pytest.raises(FlatlensError, match=says):
        get_loss(spec)


# -- in a measurement ----------------------------------------------------------


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, N)).double()


@pytest.fixture
def x():
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(4)).double()


def test_accuracy_is_of_classes_alone(network, x, y):
    one_hot = F.one_hot(y, N)
    right = 100 * (network(x).argmax(1) == y).double().mean()
    for classes in (y, y.int(), y.tolist(), y[:, None], one_hot, one_hot.double(), one_hot.bool()):
        assert fl.measure(network, x, classes)["accuracy"] == pytest.approx(float(right))
    values = torch.randn(n, N, generator=torch.Generator().manual_seed(5)).double()
    two = one_hot + F.one_hot((y + 1) % N, N)
    for other in (values, values.softmax(1), two, 2 * one_hot, 0 * one_hot):
        m = fl.measure(network, x, other)
        assert "loss" in m.values
        assert "accuracy" not in m.values


def test_a_function_may_take_targets_of_any_shape(network, x):
    m = fl.measure(network, x, torch.ones(n, 2), loss=lambda f, y: (f.sum(1) - y.sum(1)).square())
    assert m["loss"] == pytest.approx((network(x).sum(1) - 2).square().mean().item())
    assert "accuracy" not in m.values


@pytest.mark.parametrize("options", [{}, {"method": "sketch", "directions": 2}])
def test_of_the_papers_loss_the_loss_aware_names_are_the_papers(network, x, options):
    m = fl.measure(network, x, **options)
    assert m["gauss_newton_trace"] == m["sharpness"]
    assert (m["loss_mls"], m["loss_nmls"]) == (m["mls"], m["nmls"])
    if options:
        assert m["gauss_newton_trace_se"] == m["sharpness_se"]
    with pytest.raises(KeyError, match="no quantity 'mls'"):
        fl.measure(network, x, quantities=["sharpness"])["loss_mls"]
    other = fl.measure(network, x, loss="squared")
    assert other["gauss_newton_trace"] == pytest.approx(2 * other["sharpness"])


def test_a_function_without_targets_is_refused_in_one_sentence(network, x):
    for inputs in (x, [x[:2], x[2:]]):
        with pytest.raises(FlatlensError, match="a function as loss needs targets; give y"):
            fl.measure(network, inputs, loss=log_cosh)
    assert "loss" in fl.measure(network, [(x, torch.zeros(n, N))], loss=log_cosh).values


def test_an_estimate_that_is_exact_has_an_error_of_zero(network, x, y):
    names = ["hessian_trace", "adaptive_sharpness_sampled", "relative_flatness", "lambda_max"]
    m = fl.measure(network, x, y, quantities=names)
    assert m["hessian_trace_se"] == m["relative_flatness_se"] == 0.0
    assert m["adaptive_sharpness_sampled_se"] > 0
    assert "lambda_max_se" not in m.values  # that one has a certificate, no error


WEIGHTS = torch.tensor([1.0, 2.0, 30.0, 4.0, 5.0])  # float32, f is float64


@pytest.mark.parametrize(
    "spec",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS),
        nn.CrossEntropyLoss(ignore_index=2),
        lambda f, y: F.cross_entropy(f, y) ** 2,
        lambda f, y: (f - f.mean(0)).square().sum(),
    ],
    ids=["weights", "ignored", "square", "coupled"],
)
def test_one_number_that_is_no_mean_or_sum_over_samples_is_refused(spec, f):
    y = torch.tensor([0, 0, 2, 2, 1, 3, 4])
    for rows in ([slice(0, 7)], [slice(i, i + 1) for i in range(7)], [slice(0, 2), slice(2, 4)]):
        loss = get_loss(spec)
        with pytest.raises(FlatlensError, match=r'neither the mean .*reduction="none"'):
            [loss(f[i], y[i]) for i in rows]


def test_weights_and_ignored_targets_without_a_reduction_are_averaged_over_all_samples(f, y):
    own = {"ignore_index": int(y[0]), "reduction": "none"}
    loss = get_loss(nn.CrossEntropyLoss(weight=WEIGHTS, **own))
    theirs = F.cross_entropy(f, y, weight=WEIGHTS.double(), **own)
    torch.testing.assert_close(loss(f, y), theirs)
    assert loss(f, y)[0] == 0
    R = loss.root(f, y)
    torch.testing.assert_close(R @ R.mT, hessians(loss, f, y), rtol=1e-10, atol=1e-12)
    summed = get_loss(nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=int(y[0]), reduction="sum"))
    torch.testing.assert_close(summed(f, y), theirs)


def test_a_weighted_loss_is_measured_as_torch_has_it_or_not_at_all():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y, weight = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor([1.0, 2, 30])
    mean, each = (nn.CrossEntropyLoss(weight=weight, reduction=r) for r in ("mean", "none"))
    for chunk in (None, 1):
        for quantity in (fl.perturb.hessian_trace, fl.perturb.adaptive_sharpness_sampled):
            with pytest.raises(FlatlensError, match="neither the mean nor the sum"):
                quantity(net, x, y, loss=mean, chunk=chunk)
    with pytest.raises(FlatlensError, match="neither the mean nor the sum"):
        fl.measure(net, x, y, loss=mean)

    def torchs(*parameters):
        named = dict(zip(dict(net.named_parameters()), parameters, strict=True))
        return each(torch.func.functional_call(net, named, (x,)), y).mean()

    H = torch.autograd.functional.hessian(torchs, tuple(net.parameters()))
    parts = [H[i][i].reshape(p.numel(), -1).trace() for i, p in enumerate(net.parameters())]
    found = fl.perturb.hessian_trace(net, x, y, loss=each, directions=10**3)
    assert found.value == pytest.approx(float(sum(parts)), rel=1e-4)
    m = fl.measure(net, x, y, loss=each)
    assert m["loss"] == pytest.approx(each(net(x), y).mean().item(), rel=1e-5)


@pytest.mark.parametrize("rows", [1, 7])
def test_one_number_is_checked_with_one_sample_of_an_earlier_call(rows, f, y):
    calls = []

    def mean(f, y):
        calls.append(len(f))
        return F.cross_entropy(f, y)

    loss = get_loss(mean)
    loss(f[:rows], y[:rows])
    once = len(calls)
    assert calls == [1] if rows == 1 else [7, *[1] * 7]
    loss(f[-rows:], y[-rows:])
    assert sorted(calls[once:]) == sorted([*calls[:once], 1, rows + 1])


def test_one_loss_a_sample_may_come_as_a_column(f):
    y = torch.randn(n, 1).double()
    loss = get_loss(nn.MSELoss(reduction="none"))
    torch.testing.assert_close(loss(f[:, :1], y), (f[:, 0] - y[:, 0]).square())
