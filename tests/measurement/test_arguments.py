"""Arguments of public functions: what they take, and one sentence for what they do not."""

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.metrics import HEADLINE, METRICS

NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 12
P = fl.probe(NET, X)

WRONG = {  # of each argument of measure: values that it does not take
    "quantities": [3, None, [], [3], ["flatness"], "flatness", [["mls"]]],
    "method": [3, None, "exactly", ["exact"]],
    "weight_norm": [3, None, "nuclear"],
    "directions": ["8", 2.5, True, 0, [8]],
    "seed": ["0", 1.5, [0]],
    "rtol": ["0.1", 0, -1.0, float("nan"), float("inf"), [0.1], True],
    "budget": ["3", 0, -1.0, float("nan"), [3]],
    "chunk": ["2", 0, 1.5, [1]],
    "memory": ["2", 0, 1.5],
    "distributed": [1, "yes", None],
    "n": ["2", 0, 1.5, -1],
    "precision": [16, None, "bfloat16", torch.bfloat16, ["model"]],
    "loss": [3, None, "hinge", "cross_entropy:much", ["squared"]],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_measure_names_the_argument_that_is_wrong(name, value):
    words = {"quantities": "quantit", "loss": "loss|label smoothing"}.get(name, name)
    with pytest.raises(fl.FlatlensError, match=words) as refused:
        fl.measure(NET, X, **{name: value})
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (3, X, "the model is a int"),
        (None, X, "the model is a NoneType"),
        (lambda x: x, X, "the model is a function"),
        (NET, None, "x is None"),
        (NET, 3, "x is a int"),
    ],
)
def test_measure_refuses_what_is_no_model_and_no_samples(model, x, words):
    with pytest.raises(fl.FlatlensError, match=words):
        fl.measure(model, x)


TARGETS = {
    "NaN": (torch.tensor([[0.0, 1.0], [0.0, float("nan")], [0.0, 1.0], [0.0, 1.0]]), "sample 1"),
    "infinite": (np.array([[0.0, 1.0]] * 3 + [[np.inf, 0.0]]), "sample 3"),
    "complex": (torch.zeros(4, 2, dtype=torch.complex64), "y is complex"),
    "words": (["a", "b", "c", "d"], "y is not a tensor of targets"),
    "one NaN": (float("nan"), "not finite"),
    "one number": (3, "y is a single number"),
    "sparse": (torch.ones(4, 2).to_sparse(), "y is a sparse tensor"),
    "too few": ([0, 1], "y has 2 entries for 4 samples"),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("loss", ["half_squared", "cross_entropy"])
def test_targets_that_are_no_numbers_are_refused(name, loss):
    y, words = TARGETS[name]
    with pytest.raises(fl.FlatlensError, match=words):
        fl.measure(NET, X, y, loss=loss)


@pytest.mark.parametrize("loss", [lambda f: f, int, nn.Linear], ids=["one", "int", "Linear"])
def test_a_loss_that_fails_is_named(loss):
    with pytest.raises(fl.FlatlensError, match=r"the loss .* fails: "):
        fl.measure(NET, X, [0, 1, 0, 1], loss=loss)


def test_targets_of_batches_are_checked_too():
    y = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]]).double()
    with pytest.raises(fl.FlatlensError, match="not finite"):
        fl.measure(NET, [(X[:2], y)])


FUNCTIONS = [*(name for name in METRICS if name != "log_volume_top3"), "bounds"]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("value", [None, 3, X, NET], ids=["None", "3", "tensor", "model"])
def test_functions_of_a_probe_say_that_they_take_one(name, value):
    with pytest.raises(fl.FlatlensError, match=rf"{name} takes a Probe: give fl\.probe"):
        getattr(fl, name)(value)


@pytest.mark.parametrize("top", ["3", 1.5, 0, 99, True])
def test_log_volume_names_top(top):
    with pytest.raises(fl.FlatlensError, match="top="):
        fl.log_volume(P, top=top)


def test_bounds_names_exact():
    with pytest.raises(fl.FlatlensError, match="exact="):
        fl.bounds(P, exact="yes")


# -- what quantities takes -----------------------------------------------------


def half_norms(p):
    return p.input.x_norm / 2


def outputs(p):
    return p.N


def test_own_quantities():
    m = fl.measure(NET, X, quantities=["mls", half_norms, outputs])
    assert m["half_norms"] == m.half_norms == pytest.approx(X.norm(dim=1).mean() / 2)
    np.testing.assert_allclose(m.samples["half_norms"], X.norm(dim=1) / 2)
    assert m["outputs"] == 2
    assert "outputs" not in m.samples
    assert set(m.values) == {"mls", "half_norms", "outputs"}
    assert "half_norms" in str(m)
    assert m.to_dict()["outputs"] == 2
    alone = fl.measure(NET, X, quantities=half_norms)
    assert list(alone.values) == ["half_norms"]


def test_own_quantities_see_what_was_not_asked_for():
    def adaptive(p):
        return fl.adaptive_sharpness(p)

    m = fl.measure(NET, X, quantities=["mls", adaptive])
    assert m["adaptive"] == fl.adaptive_sharpness(P) > 0


def fails(p):
    raise ZeroDivisionError("division by zero")


def wrong_shape(p):
    return np.zeros((2, 2))


def words(p):
    return "much"


def mls(p):
    return 0.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (fails, "the quantity fails fails: division by zero"),
        (wrong_shape, r"wrong_shape returns shape \(2, 2\); return a number, or one number for"),
        (words, "words returns str"),
        (lambda p: 0.0, "has no name to report it by"),
        (mls, "mls, which is the name of a quantity of flatlens"),
    ],
)
def test_own_quantities_that_cannot_be(function, says):
    with pytest.raises(fl.FlatlensError, match=says):
        fl.measure(NET, X, quantities=["sharpness", function])


def test_the_headline():
    m = fl.measure(NET, X, quantities="headline")
    assert [*m.values, *(b.name for b in m.bounds)] == list(HEADLINE)
    whole = fl.measure(NET, X)
    asked, known = m["eq12"], whole["eq12"]
    assert (asked.lhs, asked.rhs) == pytest.approx((known.lhs, known.rhs), rel=1e-12)
    assert (asked.verdict, asked.why) == (known.verdict, known.why)
    # Sums of squares are taken in another order where nothing needs the gradients themselves.
    assert m.values == pytest.approx({name: whole[name] for name in m.values}, rel=1e-12)


def test_inequalities_by_name():
    m = fl.measure(NET, X, quantities=["sharpness", "eq44"])
    assert [b.name for b in m.bounds] == ["eq44"]
    assert m["eq44"] == fl.measure(NET, X)["eq44"]  # its adaptive sharpness is computed
    both = fl.measure(NET, X, quantities=["default", half_norms])
    assert len(both.bounds) == len(fl.bounds(P))
    assert fl.measure(NET, X, quantities=[fl.nmls]).values == {"nmls": fl.nmls(P)}


def test_n_draws_samples_with_the_seed(monkeypatch):
    def draw(x, y, n, seed):
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:n]
        return x[chosen], y[chosen]

    monkeypatch.setitem(
        sys.modules, "flatlens.measurement.sampling", types.SimpleNamespace(draw=draw)
    )
    y = torch.tensor([0, 1, 0, 1])
    m, again, other = (fl.measure(NET, X, y, n=2, seed=s) for s in (0, 0, 3))
    assert m.probe.n == 2
    assert m.to_dict() == again.to_dict()
    assert m["sharpness"] != other["sharpness"]
