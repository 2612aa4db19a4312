"""A measurement by name, as text, as HTML, as a file and as a figure."""

import copy
import dataclasses
import json
import math
import pickle

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from torch import nn
from traps import ZOO

import flatlens as fl
from flatlens.metrics import METRICS

mpl.use("Agg")


@pytest.fixture(scope="module")
def m() -> fl.Measurement:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return fl.measure(net, torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2]))


@pytest.fixture(scope="module")
def conv() -> fl.Measurement:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    return fl.measure(net, torch.randn(5, 1, 6), loss="cross_entropy", method="exact")


# -- by name -------------------------------------------------------------------


def test_names_values_and_inequalities(m):
    assert m.keys() == list(m)
    assert len(m) == len(set(m.keys())) == len(dict(m))
    assert {"sharpness", "nmls", "eq12", "log_volume"} <= set(m)
    assert "nmls" in m
    assert "gauss_newton_trace" in m  # the sharpness, for the paper's loss
    assert "flatness" not in m
    assert 3 not in m


@pytest.mark.parametrize("name", METRICS)
def test_every_quantity_is_an_attribute(m, name):
    assert getattr(m, name) == m[name]
    assert name in dir(m)


def test_an_unknown_attribute_says_what_there_is(m):
    with pytest.raises(
        AttributeError, match="no attribute 'flatness'; it has the quantities sharp"
    ):
        _ = m.flatness
    with pytest.raises(AttributeError, match=r'use m.bound\("eq12"\)'):
        _ = m.eq12
    assert m.bound("eq12") is m["eq12"]
    assert m.bound("log_volume").equation == "theory 3"  # m["log_volume"] is the quantity
    for wrong in ("eq99", 3, None):
        with pytest.raises(fl.FlatlensError, match="there is no inequality"):
            m.bound(wrong)


def test_copies_keep_everything(m):
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert other.to_dict() == m.to_dict()


# -- as text -------------------------------------------------------------------

SHOWN = ["plain_mlp", "lenet", "residual", "attention_self_fused", "zero_sample"]


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("method", ["exact", "sketch"])
def test_print_fits_one_screen(name, method):
    case = ZOO[name]()
    options = {"output": case.output, "method": method, "directions": 2}
    m = fl.measure(case.model, case.x, loss="cross_entropy", **options)
    lines = str(m).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert len(repr(m)) < 300
    assert "\n" not in repr(m)


def test_print_says_the_strongest_theorem_in_words(m):
    text, b = str(m), m["eq12_bias"]
    assert "6 samples, 4 inputs, 3 outputs, 2 layers, float64." in text
    assert "maximum local sensitivity (MLS)" in text
    assert "network MLS (NMLS)" in text
    rhs, lhs = (min((m[n] for n in ("eq11_bias", "eq12_bias")), key=lambda b: b.slack),) * 2
    assert f"<= {rhs.rhs:.3g}; measured {lhs.lhs:.3g}" in text
    assert b.verdict == "theorem"
    assert "Every inequality that applies to this network is proven for it." in text
    assert "print(m.table())" in text


def test_print_says_what_is_not_proven_and_why(conv):
    assert "because 0 shares its weights over 4 positions" in " ".join(str(conv).split())
    assert "Loss: cross_entropy." in str(conv)


def test_tables_have_every_quantity_layer_and_inequality(conv):
    text = conv.table()
    for name in (*conv.values, *(b.name for b in conv.bounds)):
        assert name in text


def test_html_is_escaped_and_folds(conv):
    html = conv._repr_html_()
    assert html.count("<details>") == html.count("</details>") >= 4
    assert "&lt;=" in html
    strange = dataclasses.replace(conv.probe.layers[0], name="<script>")
    probe = dataclasses.replace(conv.probe, layers=[strange, *conv.probe.layers[1:]])
    assert "<script>" not in dataclasses.replace(conv, probe=probe)._repr_html_()


# -- as a file -----------------------------------------------------------------


def same(a, b) -> bool:
    """Equality of all fields, bit for bit, NaN included."""
    if dataclasses.is_dataclass(a):
        pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(x, y) for x, y in pairs)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        if math.isnan(a):  # its sign bit means nothing
            return type(b) is float and math.isnan(b)
        return type(b) is float and np.float64(a).tobytes() == np.float64(b).tobytes()
    return type(a) is type(b) and a == b


SAVED = ["plain_mlp", "lenet", "tied_linear_linear", "zero_sample", "weight_norm"]


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("method", ["exact", "sketch"])
def test_a_saved_measurement_comes_back_bit_for_bit(tmp_path, name, method):
    case = ZOO[name]()

    def norms(p):
        return p.input.x_norm

    m = fl.measure(
        case.model, case.x, output=case.output, method=method, directions=2, loss="cross_entropy",
        quantities=["default", norms],
    )  # fmt: skip
    path = m.save(tmp_path / "m.json")
    again = fl.Measurement.load(str(path))
    assert same(m, again)
    assert str(m) == str(again)
    assert m.to_json() == again.to_json()
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["schema"] == 1
    assert content["quantities"].keys() == m.values.keys()
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]


DAMAGES = {
    "not JSON": (lambda c: "{", "is not JSON"),
    "another file": (lambda c: '{"a": 1}', "is not a saved measurement"),
    "a newer schema": (lambda c: json.dumps({**c, "schema": 2}), "has the schema 2"),
    "no probe": (lambda c: json.dumps({k: c[k] for k in c if k != "probe"}), "no 'probe'"),
    "an unknown class": (
        lambda c: json.dumps({**c, "probe": {"class": "Path", "fields": {}}}),
        "damaged measurement: no 'Path'",
    ),
    "a wrong class": (
        lambda c: json.dumps({**c, "probe": {"class": "WeightNorms", "fields": {}}}),
        "damaged measurement",
    ),
    "a number": (lambda c: json.dumps({**c, "probe": 3}), "a Probe is needed, not a int"),
    "a damaged array": (
        lambda c: json.dumps(c).replace('"base64": "', '"base64": "!', 1),
        "damaged measurement",
    ),
    "words for numbers": (
        lambda c: json.dumps({**c, "quantities": {"mls": "much"}}),
        "damaged measurement",
    ),
    "deep": (lambda c: "[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused_with_their_name(tmp_path, m, name):
    damage, words = DAMAGES[name]
    path = m.save(tmp_path / "m.json")
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(fl.FlatlensError, match=words) as refused:
        fl.Measurement.load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("path", [3, None, "", "a\0b"])
def test_wrong_paths_are_refused(m, path):
    with pytest.raises(fl.FlatlensError, match="path"):
        m.save(path)
    with pytest.raises(fl.FlatlensError, match="path"):
        fl.Measurement.load(path)


def test_files_that_cannot_be_are_refused(m, tmp_path):
    (tmp_path / "no").touch()
    with pytest.raises(fl.FlatlensError, match="Cannot write"):
        m.save(tmp_path / "no" / "m.json")
    with pytest.raises(fl.FlatlensError, match="Cannot read"):
        fl.Measurement.load(tmp_path / "m.json")


# -- as a figure ---------------------------------------------------------------


def test_slack_bars(conv):
    ax = conv.plot()
    shown = [t.get_text() for t in ax.get_yticklabels()]
    finite = [b for b in conv.bounds if 0 < b.slack < math.inf]
    assert shown == [b.name for b in finite]
    widths = [bar.get_width() for bar in ax.patches]
    np.testing.assert_allclose(widths, np.log10([b.slack for b in finite]))


@pytest.mark.parametrize(
    ("what", "column"), [("norm", "norm"), ("sensitivity", "mls"), ("gradient_share", "sharpness")]
)
def test_bars_of_layers(conv, what, column):
    _, ax = plt.subplots()
    assert conv.plot(what, ax=ax) is ax
    want = conv.layers[column] / (conv["sharpness"] if what == "gradient_share" else 1)
    np.testing.assert_allclose([bar.get_width() for bar in ax.patches], want)
    plt.close("all")


def test_wrong_plots_are_refused(conv):
    for options in ({"what": "weights"}, {"what": 3}, {"ax": "left"}):
        with pytest.raises(fl.FlatlensError, match=next(iter(options))):
            conv.plot(**options)
    short = fl.measure(nn.Linear(2, 2), torch.ones(1, 2), quantities="sharpness")
    for what in ("inequalities", "norm"):
        with pytest.raises(fl.FlatlensError, match="to draw"):
            short.plot(what)
