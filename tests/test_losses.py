"""Each loss is what torch says it is, and R R^T is its Hessian."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
        (lambda f, y: f, [0] * 7, "gives \\(7, 5\\) for 7 samples"),
        (lambda f, y: 1.0, [0] * 7, "gives float for 7 samples"),
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
        ("cross_entropy:much", "'much' in 'cross_entropy:much'"),
        ("cross_entropy:1.5", "label_smoothing=1.5"),
        ("squared:0.1", "takes no label smoothing"),
    ],
)
def test_unknown_losses_are_refused_in_one_sentence(spec, says):
    with pytest.raises(FlatlensError, match=says):
        get_loss(spec)
