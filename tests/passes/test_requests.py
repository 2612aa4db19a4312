"""Cost follows the request: a quantity is the same number whatever else is asked for."""

import functools
import random

import pytest
import torch
from torch import nn
from traps import ZOO

import flatlens as fl
from flatlens.algebra import operator_norms
from flatlens.inequalities import table
from flatlens.metrics import METRICS
from flatlens.passes import layer_columns, needs, positions, sketch, spectral_columns

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch about even kernels
INEQUALITIES = [name for name in table.NAMES if name not in METRICS]
NAMES = [*METRICS, *INEQUALITIES]
SOME_CASES = sorted(ZOO)[::12]


@functools.cache
def default(name):
    case = ZOO[name]()
    return fl.measure(case.model, case.x, output=case.output, method="exact")


def same_as_default(name, quantities):
    """Measure some quantities and compare every number with the whole measurement."""
    case, whole = ZOO[name](), default(name)
    m = fl.measure(case.model, case.x, output=case.output, quantities=quantities, method="exact")
    for quantity, value in m.values.items():
        assert value == pytest.approx(whole[quantity], rel=1e-12, abs=1e-290, nan_ok=True), quantity
    for got in m.bounds:
        want = whole.bound(got.name)
        assert (got.verdict, got.why, got.holds) == (want.verdict, want.why, want.holds), got.name
        room = {"rel": 1e-12, "abs": 1e-290 if want.log_lhs is None else 1e-12, "nan_ok": True}
        assert (got.lhs, got.rhs) == pytest.approx((want.lhs, want.rhs), **room), got.name
    return m


# -- the same numbers --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_subsets_give_the_numbers_of_the_whole(name):
    chooser = random.Random(name)
    same_as_default(name, ["sharpness", "mls"])
    same_as_default(name, "headline")
    same_as_default(name, chooser.sample(NAMES, 2))
    same_as_default(name, chooser.choice(NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("quantity", NAMES)
def test_each_single_quantity(quantity):
    for name in SOME_CASES:
        m = same_as_default(name, [quantity])
        assert quantity in m
        if quantity in METRICS:
            assert list(m.values) == [quantity]


def many_outputs():
    torch.manual_seed(0)

    class Skip(nn.Linear):
        def forward(self, x):
            return x + super().forward(x).tanh()

    net = nn.Sequential(nn.Linear(9, 20), Skip(20, 20), nn.Linear(20, 90), nn.Tanh()).double()
    return net, torch.randn(3, 9, dtype=torch.float64)


@pytest.mark.parametrize("quantity", ["headline", *NAMES])
def test_a_sketch_of_one_quantity(quantity):
    net, x = many_outputs()
    options = {"method": "sketch", "directions": 3}
    whole = fl.measure(net, x, **options)
    assert whole.probe.sketch is not None
    m = fl.measure(net, x, quantities=quantity, **options)
    for name, value in m.values.items():
        assert value == pytest.approx(whole[name], rel=1e-12), name
    for got in m.bounds:
        want = whole.bound(got.name)
        assert got.verdict == want.verdict
        assert (got.lhs, got.rhs) == pytest.approx((want.lhs, want.rhs), rel=1e-12, nan_ok=True)


# -- no more work than was asked for -----------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of what a pass may leave out."""
    counts = {}

    def count(owner, name):
        function = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    operator_norms._remembered.clear()
    for owner, name in (
        (spectral_columns, "singular_values"),
        (spectral_columns, "largest_singular_value"),
        (spectral_columns, "spectral_norm"),
        (layer_columns, "weight_gradient"),
        (operator_norms, "matrix_norm"),
        (positions.Positions, "patch_rank"),
        (positions.Positions, "energies"),
        (sketch, "SpectrumFinder"),
        (sketch, "_one_direction"),
    ):
        count(owner, name)
    return counts


def small_network():
    torch.manual_seed(0)
    layers = [nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)]
    return nn.Sequential(*layers).double(), torch.randn(3, 7, dtype=torch.float64)


@pytest.mark.parametrize(
    ("quantities", "work"),
    [
        ("sharpness", {}),
        ("mls", {"largest_singular_value": 1}),
        (["sharpness", "mls"], {"largest_singular_value": 1}),
        (["sharpness", "volume"], {"singular_values": 1}),
        ("nmls", {"largest_singular_value": 3}),
        ("headline", {"singular_values": 1, "largest_singular_value": 2, "matrix_norm": 3}),
        ("sharpness_untied", {"energies": 3}),
        ("adaptive_sharpness", {"weight_gradient": 3}),
        ("eq12_tied_rank", {"largest_singular_value": 3, "matrix_norm": 3, "patch_rank": 3}),
    ],
    ids=str,
)
def test_what_a_pass_does(calls, quantities, work):
    fl.measure(*small_network(), quantities=quantities)
    assert calls == work


@pytest.mark.parametrize(
    ("quantities", "work"),
    [
        ("sharpness", {"_one_direction": 3}),
        ("mls", {"_one_direction": 1, "SpectrumFinder": 1, "largest_singular_value": 1}),
    ],
)
def test_what_a_sketch_does(calls, quantities, work):
    fl.measure(*many_outputs(), quantities=quantities, method="sketch", directions=3)
    assert calls == work


def test_no_product_goes_where_nothing_is_asked():
    case = ZOO["plain_mlp"]()
    p = fl.measure(case.model, case.x, quantities="mls").probe
    assert all(torch.tensor(q.grad).isnan().all() for q in p.parameters)
    assert p.layers == []


# -- what was not asked for ---------------------------------------------------------------------


def test_what_was_not_asked_for_is_named():
    m = fl.measure(*small_network(), quantities=["sharpness", "mls"])
    assert set(m.to_dict()) == {"sharpness", "mls"}
    with pytest.raises(KeyError, match="no quantity 'nmls': it was not asked for, add it to quant"):
        m["nmls"]
    with pytest.raises(fl.FlatlensError, match="no inequality 'eq12': it was not asked for"):
        m.bound("eq12")
    with pytest.raises(fl.FlatlensError, match="sensitivities of layers were not asked for; add n"):
        fl.nmls(m.probe)
    reason = "gradient norms of layers and the norms of weights were not asked for"
    assert fl.bounds(m.probe)["eq48_bc"].why == reason


def test_layers_of_the_headline_say_what_is_missing(tmp_path):
    m = fl.measure(*small_network(), quantities="headline")
    assert m.layers["mls"].notna().all()
    assert m.layers["adaptive_sharpness"].isna().all()
    assert set(m.layers["eq5_verdict"]) == {"not applicable"}
    assert "were not asked for" in m.layers["eq5_why"][0]
    again = fl.Measurement.load(m.save(tmp_path / "m.json"))
    assert again.probe.asked == m.probe.asked
    assert "nmls" in str(again.table())


def test_quantities_of_a_loss_follow_the_request():
    net, x = small_network()
    m = fl.measure(net, x, loss="cross_entropy", quantities=["sharpness"])
    whole = fl.measure(net, x, loss="cross_entropy")
    assert set(m.values) == {"sharpness", "gauss_newton_trace"}
    assert m["gauss_newton_trace"] == pytest.approx(whole["gauss_newton_trace"], rel=1e-12)


def test_every_declared_need_is_known():
    for quantity in METRICS.values():
        assert quantity.needs <= needs.EVERYTHING
    for row in table.TABLE:
        assert row.sides
        assert row.needs <= needs.EVERYTHING
