"""`minimal.py` is the whole idea in one file; here it is held equal to the package."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flatlens as fl

FILE = Path(__file__).parents[2] / "minimal.py"
RTOL = 1e-10
SHARED = ("sharpness", "mls", "nmls", "volume", "log_volume", "network_volume", "local_dimension")


@pytest.fixture(scope="module")
def minimal():
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def relu_net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))


def tanh_net_without_bias():
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False))


def in_place_relu_net():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 3))


def activation_before_the_first_layer():
    return nn.Sequential(nn.Tanh(), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def activation_after_the_last_layer():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.Sigmoid())


def flattened_input():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def more_outputs_than_inputs():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 10))


def one_output():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def bottleneck_of_rank_two():
    """Three outputs through two units: volume 0, log volume -inf."""
    return nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3))


CASES = [
    relu_net,
    tanh_net_without_bias,
    in_place_relu_net,
    activation_before_the_first_layer,
    activation_after_the_last_layer,
    flattened_input,
    more_outputs_than_inputs,
    one_output,
    bottleneck_of_rank_two,
]


def make(case, dtype=torch.float64):
    torch.manual_seed(0)
    return case().to(dtype), torch.randn(7, 6, dtype=dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_quantities_equal_the_package(case, minimal):
    net, x = make(case)
    ours, theirs = minimal.measure(net, x), fl.measure(net, x)
    for name in SHARED:
        assert ours[name] == pytest.approx(theirs[name], rel=RTOL), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_both_sides_of_eqs_11_and_12_equal_the_package(case, minimal):
    net, x = make(case)
    ours, probe = minimal.measure(net, x), fl.probe(net, x)
    ratios = [layer.norms.operator**2 / layer.x_norm**2 for layer in probe.layers]
    root_s = np.sqrt(fl.sharpness(probe))
    assert ours["eq11.lhs"] == pytest.approx(fl.mls(probe), rel=RTOL)
    assert ours["eq11.rhs"] == pytest.approx(np.sqrt(ratios[0].mean()) * root_s, rel=RTOL)
    assert ours["eq12.lhs"] == pytest.approx(fl.nmls(probe), rel=RTOL)
    assert ours["eq12.rhs"] == pytest.approx(np.sqrt(sum(ratios).mean()) * root_s, rel=RTOL)


def test_float32_agrees_too(minimal):
    net, x = make(relu_net, torch.float32)
    ours, theirs = minimal.measure(net, x), fl.measure(net, x)
    for name in SHARED:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_inequalities_hold(case, minimal):
    m = minimal.measure(*make(case))
    assert m["eq12.lhs"] <= m["eq12.rhs"]
    if case is not activation_before_the_first_layer:  # there x¹ is not the network's input
        assert m["eq11.lhs"] <= m["eq11.rhs"]


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
        nn.Sequential(*[nn.Linear(6, 6)] * 2),
        nn.Sequential(nn.ReLU()),
        nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)),
    ],
    ids=["layer_norm", "reused_layer", "no_layer", "frozen_layer"],
)
def test_refuses_what_it_does_not_know(net, minimal):
    with pytest.raises(ValueError, match=r"minimal\.py"):
        minimal.measure(net, torch.randn(2, 6))


def test_is_short_and_needs_torch_alone():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    assert names | {n.module for n in imports if isinstance(n, ast.ImportFrom)} == {"torch"}


@pytest.mark.slow
def test_runs_as_a_script():
    command = [sys.executable, "-W", "error", str(FILE)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in out.splitlines()][:3] == ["sharpness", "mls", "nmls"]


def test_doctest(minimal):
    import doctest

    result = doctest.testmod(minimal)
    assert result.attempted > 0
    assert result.failed == 0
