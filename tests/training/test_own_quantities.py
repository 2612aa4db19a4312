"""Quantities of the user, named module:function, in a TOML config and in sweeps."""

import json
import sys

import pytest

from flatlens import FlatlensError, cli
from flatlens.runs import read_runs
from flatlens.training.config import Config
from flatlens.training.train import train

MODULE = """
def layers_times_ten(probe):
    return 10.0 * len(probe.layers)

def top_of_each_sample(probe):
    return probe.input.singular[:, 0]
"""
OWN = ["my_quantities:layers_times_ten", "my_quantities:top_of_each_sample"]
SETTINGS = """
model_options = {widths = [64, 4, 10]}
train_size = 20
evaluate = 10
steps = 4
measure = "every:2"
samples = 4
quantities = ["mls", "my_quantities:layers_times_ten", "my_quantities:top_of_each_sample"]
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with the user's module, from which commands run."""
    (tmp_path / "my_quantities.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text(SETTINGS)
    (tmp_path / "sweep.toml").write_text(f"[base]\n{SETTINGS}\n[grid]\nlr = [0.1, 0.2]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_quantities", raising=False)
    return tmp_path


def check(records):
    """The own quantities stand beside those of flatlens, with the values that they must have."""
    assert [record["step"] for record in records] == [0, 2, 4]
    for record in records:
        assert record["layers_times_ten"] == 20.0
        assert record["top_of_each_sample"] == pytest.approx(record["mls"], rel=1e-6)


def records_of(folder):
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_toml_config_names_functions(place):
    assert cli.main(["train", "--config", "run.toml", "--trust", "--out", "a", "--quiet"]) == 0
    check(records_of(place / "a"))


def test_a_toml_config_of_a_stranger_imports_nothing(place, capsys):
    assert cli.main(["train", "--config", "run.toml", "--out", "a", "--quiet"]) == 2
    assert "my_quantities:layers_times_ten" in capsys.readouterr().err
    assert "my_quantities" not in sys.modules
    assert not (place / "a").exists()


def test_a_name_that_is_no_function_is_refused(place, monkeypatch):
    monkeypatch.syspath_prepend(place)
    with pytest.raises(FlatlensError, match=r"'my_quantities:gone' cannot be imported"):
        train(Config(quantities=("my_quantities:gone",)), place / "a")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["options", "toml"])
def test_a_sweep_on_workers_names_functions(place, source):
    pytest.importorskip("loky")
    options = ["sweep.toml", "--trust"]
    if source == "options":
        options = [
            *("--model-options.widths", "[64,4,10]", "--train-size", "20", "--evaluate", "10"),
            *("--steps", "4", "--measure", "every:2", "--samples", "4", "--lr", "0.1", "0.2"),
            *("--quantities", "mls", *OWN),
        ]
    assert cli.main(["sweep", *options, "--workers", "2", "--out", "s", "--quiet"]) == 0
    df = read_runs(place / "s")
    assert df["run"].nunique() == 2
    for _, records in df.groupby("run"):
        check(records.to_dict("records"))
