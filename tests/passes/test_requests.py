"""Cost follows the request: a quantity is the same number whatever else is asked for."""

import functools

import pytest
from traps import ZOO

import flatlens as fl
from flatlens.inequalities import table
from flatlens.metrics import METRICS

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch about even kernels
NAMED = [name for name in table.NAMES if name not in METRICS]
SOME_CASES = (
    *("plain_mlp", "conv_grouped", "residual_identity_linear", "input_read_twice"),
    *("embedding_table", "computed_weight", "transposed_conv2d_overlapping", "wide_head"),
)


@functools.cache
def default(name):
    case = ZOO[name]()
    return fl.measure(case.model, case.x, output=case.output, method="exact")


def same_as_default(name, quantities):
    """Measure a subset of the quantities and compare every number with the whole measurement."""
    case, whole = ZOO[name](), default(name)
    m = fl.measure(case.model, case.x, output=case.output, quantities=quantities, method="exact")
    for quantity, value in m.values.items():
        assert value == pytest.approx(whole[quantity], rel=1e-12, abs=1e-290, nan_ok=True), quantity
    for got in m.bounds:
        want = whole.bound(got.name)
        assert (got.verdict, got.why, got.holds) == (want.verdict, want.why, want.holds), got.name
        for side in ("lhs", "rhs"):
            expected = getattr(want, side)
            tolerance = {"rel": 1e-12, "abs": 1e-12 if want.log_lhs is not None else 1e-290}
            assert getattr(got, side) == pytest.approx(expected, nan_ok=True, **tolerance), got.name
    return m
