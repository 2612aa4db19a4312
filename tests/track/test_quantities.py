"""Own quantities, named sets, drawn samples, plots, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl
from flatlens.track import Tracker, at, every, log_spaced, on_interpolation

x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
y = torch.randint(3, (40,), generator=torch.Generator().manual_seed(2))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


# ------------------------------------------------------------------ own quantities


def largest(probe):
    """One number."""
    return float(probe.input.singular[:, 0].max())


def second(probe):
    """One number per sample."""
    return probe.input.singular[:, 1]


def test_own_functions_are_recorded_beside_names(tmp_path):
    net = network()
    with Tracker(
        net, x, y, when=every(1), quantities=["sharpness", largest, second], run=tmp_path / "a"
    ) as tracker:
        tracker(0)
    p = fl.probe(net, x)
    record = tracker.records[0]
    names = {name for name in record if "." not in name}
    assert names == {"step", "sharpness", "largest", "second", "loss", "accuracy"}
    assert record["largest"] == pytest.approx(largest(p), rel=1e-6)
    assert record["second"] == pytest.approx(second(p).mean(), rel=1e-6)
    assert record["sharpness"] == pytest.approx(fl.sharpness(p), rel=1e-6)
    assert fl.read_runs(tmp_path).largest[0] == record["largest"]


def test_a_function_alone_and_a_metric_of_the_package():
    tracker = Tracker(network(), x, when=every(1), quantities=largest)
    tracker(0)
    assert {name for name in tracker.records[0] if "." not in name} == {"step", "largest"}
    tracker = Tracker(network(), x, when=every(1), quantities=[fl.nmls, "mls"])
    tracker(0)
    assert {name for name in tracker.records[0] if "." not in name} == {"step", "nmls", "mls"}


def test_own_functions_see_the_whole_probe():
    def adaptive(probe):
        return fl.adaptive_sharpness(probe)

    net = network()
    tracker = Tracker(net, x, when=every(1), quantities=["sharpness", adaptive])
    tracker(0)
    expected = fl.measure(net, x)["adaptive_sharpness"]
    assert tracker.records[0]["adaptive"] == pytest.approx(expected, rel=1e-6)


def test_an_own_function_that_fails_is_named():
    def broken(probe):
        raise KeyError("gone")

    def matrix(probe):
        return np.zeros((2, 2))

    for function, message in ((broken, "quantity broken fails: 'gone'"), (matrix, "shape")):
        with pytest.raises(fl.FlatlensError, match=message):
            Tracker(network(), x, when=every(1), quantities=[function])(0)


def test_an_own_function_that_fails_later_does_not_end_the_training():
    calls = []

    def twice(probe):
        calls.append(probe)
        if len(calls) == 2:
            raise ZeroDivisionError("division by zero")
        return 1.0

    tracker = Tracker(network(), x, when=every(1), quantities=[twice])
    tracker(0)
    with pytest.warns(UserWarning, match="twice fails"):
        tracker(1, train_loss=0.5)
    tracker(2)
    assert [record.get("twice") for record in tracker.records] == [1.0, None, 1.0]


def test_the_headline_set():
    tracker = Tracker(network(), x, when=every(1), quantities="headline")
    tracker(0)
    metrics = {"sharpness", "mls", "nmls", "log_volume", "local_dimension", "normalized_mls"}
    sides = {f"{name}.{side}" for name in ("eq11", "eq12") for side in ("lhs", "rhs")}
    assert tracker.records[0].keys() - {"step"} == metrics | sides


# ------------------------------------------------------------------ drawn samples


@pytest.mark.parametrize("kind", ["tensor", "data set", "loader"])
def test_n_samples_are_drawn_once_and_seeded(kind):
    data = {
        "tensor": lambda: (x, y),
        "data set": lambda: (TensorDataset(x, y), None),
        "loader": lambda: (DataLoader(TensorDataset(x, y), 7, shuffle=True), None),
    }[kind]
    before = torch.get_rng_state()
    trackers = [Tracker(network(), *data(), when=every(1), n=10, seed=s) for s in (3, 3, 4)]
    if kind != "tensor":
        torch.set_rng_state(before)
        Tracker(nn.Identity(), *data(), n=10)
        assert torch.equal(torch.get_rng_state(), before)
    values = [tracker(0)["sharpness"] for tracker in trackers]
    assert values[0] == values[1] == trackers[0](1)["sharpness"]
    assert values[0] != values[2]
    assert trackers[0].samples.count() == 10
    assert "accuracy" in trackers[0].records[0]


def test_a_data_set_without_n_is_measured_as_a_whole():
    net = network()
    tracker = Tracker(net, TensorDataset(x, y), when=every(1))
    assert tracker(0).to_dict() == fl.measure(net, x, y).to_dict()


# ------------------------------------------------------------------ plots


def test_plot_draws_the_headline_over_steps():
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    net = network()
    tracker = Tracker(net, x, y, when=every(1))
    for step in range(3):
        tracker(step)
        with torch.no_grad():
            net[0].weight.mul_(0.5)
    figure, ax = plt.subplots()
    assert tracker.plot(ax=ax) is ax
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert set(lines) == {
        "sharpness", "mls", "nmls", "log volume", "local dimension", "normalized mls",
    }  # fmt: skip
    nmls = [record["nmls"] for record in tracker.records]
    assert lines["nmls"].get_xdata().tolist() == [0, 1, 2]
    assert lines["nmls"].get_ydata().tolist() == [value / nmls[0] for value in nmls]
    volume = np.exp([r["log_volume"] - tracker.records[0]["log_volume"] for r in tracker.records])
    assert lines["log volume"].get_ydata() == pytest.approx(volume)
    plt.close(figure)
    with pytest.raises(fl.FlatlensError, match="'absent', which no record has"):
        tracker.plot(["absent"])
    with pytest.raises(fl.FlatlensError, match="no records to plot"):
        Tracker(net, x).plot()


# ------------------------------------------------------------------ what is refused

WRONG = {
    "model": lambda: Tracker(5, x),
    "model ": lambda: Tracker(None, x),
    "x": lambda: Tracker(network(), object()),
    "x is a float": lambda: Tracker(network(), 3.0, n=5),
    "y": lambda: Tracker(network(), x, object()),
    "when": lambda: Tracker(network(), x, when=5),
    "when=": lambda: Tracker(network(), x, when=[]),
    "when='": lambda: Tracker(network(), x, when="often"),
    "quantities": lambda: Tracker(network(), x, quantities=5),
    "quantities has the unknown name 'shrpness'": lambda: Tracker(
        network(), x, quantities="shrpness"
    ),
    "quantities holds": lambda: Tracker(network(), x, quantities=[None]),
    "quantities has the function": lambda: Tracker(network(), x, quantities=[lambda p: 1.0]),
    "run": lambda: Tracker(network(), x, run=5),
    "run=''": lambda: Tracker(network(), x, run=""),
    "exist": lambda: Tracker(network(), x, run="a", exist="replace"),
    "exist=": lambda: Tracker(network(), x, run="a", exist=["number"]),
    "config": lambda: Tracker(network(), x, run="a", config=5),
    "config=": lambda: Tracker(network(), x, run="a", config={1: 2}),
    "config holds": lambda: Tracker(network(), x, run="a", config={"net": object()}),
    "n=": lambda: Tracker(network(), x, n=2.5),
    "n=0": lambda: Tracker(network(), x, n=0),
    "n=41": lambda: Tracker(network(), x, n=41),
    "seed": lambda: Tracker(network(), x, n=4, seed="a"),
    "sinks": lambda: Tracker(network(), x, sinks=5),
    "max_overhead": lambda: Tracker(network(), x, max_overhead="much"),
    "max_overhead=": lambda: Tracker(network(), x, max_overhead=float("nan")),
    "loss": lambda: Tracker(network(), x, loss=5),
    "loss ": lambda: Tracker(network(), x, loss="cross"),
    "step": lambda: Tracker(network(), x)("a"),
    "step=": lambda: Tracker(network(), x)(0.5),
    "optimizer": lambda: Tracker(network(), x).attach(5),
    "state": lambda: Tracker(network(), x).load_state_dict(5),
    "state=": lambda: Tracker(network(), x).load_state_dict({"records": 5}),
    "k": lambda: every("a"),
    "k ": lambda: every(True),
    "per_decade": lambda: log_spaced(None),
    "steps": lambda: at(5),
    "steps=": lambda: at(["a"]),
    "threshold": lambda: on_interpolation("a"),
    "scalar": lambda: on_interpolation(0.1, 5),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_named(words):
    with pytest.raises(fl.FlatlensError, match=words.strip()):
        WRONG[words]()


def test_a_long_range_of_steps_is_not_expanded():
    due = at(range(0, 10**15, 1000))
    assert due(5000)
    assert not due(5001)
