"""Measurements side by side."""

import math

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from torch import nn

import flatlens as fl

mpl.use("Agg")


def mlp(scale: float = 1.0, dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    with torch.no_grad():
        net[2].weight.mul_(scale)
    return net


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_values_ratios_and_table(x):
    a, b = fl.measure(mlp(), x), fl.measure(mlp(2.0), x)
    both = fl.compare({"sgd": a, "sam": b})
    assert both.warnings == []
    assert both.differing_verdicts == {}
    assert both.ratios["sam"]["mls"] == pytest.approx(2, rel=1e-12)
    assert both.ratios["sam"]["log_volume"] == pytest.approx(8, rel=1e-10)  # of the volumes
    table = both.to_pandas()
    assert list(table) == ["sgd", "sam", "sam_ratio"]
    assert table.loc["nmls", "sam"] == b["nmls"]
    assert "All verdicts on inequalities agree." in str(both)
    assert all(name in str(both) for name in a.values)
    assert "sharpness" in both._repr_html_()
    assert repr(both) == "Comparison(sgd, sam: 16 quantities)"


def test_standard_errors_of_ratios(x):
    a = fl.measure(mlp(), x, method="exact")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 40)).double()
    b = fl.measure(net, x, method="sketch", directions=4)
    both = fl.compare({"a": a, "b": b})
    se = b["sharpness_se"]
    assert both.ratio_errors["b"]["sharpness"] == pytest.approx(se / a["sharpness"], rel=1e-12)
    assert both.to_pandas().loc["sharpness", "b_se"] == se
    other = fl.compare({"b": b, "a": a})
    want = se / b["sharpness"] * a["sharpness"] / b["sharpness"]
    assert other.ratio_errors["a"]["sharpness"] == pytest.approx(want, rel=1e-12)


WARNINGS = {
    "samples": (lambda x: fl.measure(mlp(), x + 1), "The samples of b are not those of a."),
    "number of samples": (lambda x: fl.measure(mlp(), x[:3]), "The number of samples differs"),
    "outputs": (lambda x: fl.measure(mlp()[:2], x), "The number of outputs differs: a 3, b 5."),
    "loss": (
        lambda x: fl.measure(mlp(), x, loss="cross_entropy"),
        "The loss differs: a half_squared, b cross_entropy.",
    ),
    "dtype": (
        lambda x: fl.measure(mlp(dtype=torch.float32), x.float()),
        "The dtype differs: a float64, b float32.",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_cannot_be_compared_is_said(x, name):
    measured, words = WARNINGS[name]
    both = fl.compare({"a": fl.measure(mlp(), x), "b": measured(x)})
    (sentence,) = both.warnings
    assert words in sentence
    assert f"Warning: {sentence}" in str(both)


def test_verdicts_that_differ(x):
    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    both = fl.compare({"a": fl.measure(mlp(), x), "b": fl.measure(frozen, x)})
    assert both.differing_verdicts["eq12"] == {"a": "theorem", "b": "observation"}
    assert "eq8" not in both.differing_verdicts


def test_bars_of_ratios(x):
    both = fl.compare({"a": fl.measure(mlp(), x), "b": fl.measure(mlp(2.0), x)})
    _, ax = plt.subplots()
    assert both.plot(ax=ax) is ax
    names = [t.get_text() for t in ax.get_yticklabels()]
    want = [math.log10(both.ratios["b"][name]) for name in names]
    np.testing.assert_allclose([bar.get_width() for bar in ax.patches], want)
    plt.close("all")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda m: {"a": m}, "at least two"),
        (lambda m: {}, "at least two"),
        (lambda m: [m, m], "measurements is a value of type list"),
        (lambda m: m, "measurements is a value of type Measurement"),
        (lambda m: {"a": m, "b": 3}, r"measurements\['b'\] is a value of type int"),
        (lambda m: {"a": m, 2: m}, "a label of measurements is a value of type int"),
    ],
)
def test_wrong_arguments_are_refused(x, given, words):
    with pytest.raises(fl.FlatlensError, match=words):
        fl.compare(given(fl.measure(mlp(), x)))
