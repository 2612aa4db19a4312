"""``flatlens compare``: saved measurements, run folders and checkpoints, and what is refused."""

import json
import sys

import matplotlib as mpl
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens import cli
from flatlens.data.datasets import load

mpl.use("Agg")
MODEL = """
from torch import nn
def build(): return nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))
def wide(): return nn.Sequential(nn.Linear(64, 7), nn.Tanh(), nn.Linear(7, 10))
def largest(p): return p.input.singular[:, 0]
def text(p): return "a"
value = 3
"""
TINY = """train --model-options.widths [64,4,10] --steps 2 --measure end --samples 3 --train-size 20
--evaluate 10 --quiet""".split()  # noqa: SIM905


def network(seed: int, width: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder with a model file and two checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    (tmp_path / "nets.py").write_text(MODEL)
    for seed, name in enumerate(("sgd.pt", "sam.pt")):
        torch.save({"model": network(seed).state_dict()}, tmp_path / name)
    return tmp_path


def compared(capsys, *words: str) -> dict:
    assert cli.main(["compare", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *words: str) -> str:
    assert cli.main(["compare", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


MEASURED = ["--model", "nets:build", "--data", "digits", "--n", "6"]


def test_checkpoints_are_measured_on_the_same_samples(capsys):
    result = compared(capsys, "sgd.pt", "sam.pt", *MEASURED)
    ratio = result["values"]["sam"]["sharpness"] / result["values"]["sgd"]["sharpness"]
    assert result["ratios"]["sam"]["sharpness"] == pytest.approx(ratio, rel=1e-12)
    assert result["warnings"] == []
    assert result["differing_verdicts"] == {}


def test_each_checkpoint_may_have_a_model_of_its_own(capsys, folder):
    torch.save(network(2, 7).state_dict(), folder / "wide.pt")
    words = ["--model", "nets:build", "nets:wide", "--data", "digits", "--n", "6"]
    result = compared(capsys, "sgd.pt", "wide.pt", *words, "--quantities", "mls", "nets:largest")
    values = result["values"]["wide"]
    assert values["largest"] == pytest.approx(values["mls"], rel=1e-6)


def test_saved_measurements_and_a_checkpoint_together(capsys, folder):
    data = load("digits")
    m = fl.measure(network(0), data.x_train[:6], data.y_train[:6])
    m.save(folder / "before.json")
    result = compared(capsys, "before.json", "sgd.pt", *MEASURED)
    assert result["values"]["before"]["nmls"] == m["nmls"]
    assert result["warnings"] == ["The samples of sgd are not those of before."]


def test_measure_saves_what_compare_reads(capsys, folder):
    for seed in "01":
        words = ["nets:build", "--data", "digits", "--n", "4", "--seed", seed]
        assert cli.main(["measure", *words, "--save", f"{seed}.json"]) == 0
    assert cli.main(["measure", "nets:build", "--data", "digits", "--save", "nets.py"]) == 2
    assert "is not a measurement of flatlens" in capsys.readouterr().err
    assert (folder / "nets.py").read_text() == MODEL
    assert set(compared(capsys, "0.json", "1.json")["values"]) == {"0", "1"}


def test_run_folders_of_trainings_are_measured_at_their_checkpoint(capsys):
    for lr in ("0.1", "0.2"):
        assert cli.main([*TINY, "--lr", lr, "--out", f"runs/{lr}"]) == 0
    assert cli.main(["compare", "runs/0.1", "runs/0.2"]) == 0
    assert "All verdicts on inequalities agree." in capsys.readouterr().out


def test_run_folders_of_a_tracker_are_compared_by_their_last_record(capsys, folder):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for seed, name in enumerate("ab"):
        with fl.Tracker(network(seed), x, when=fl.every(1), run=folder / name) as tracker:
            tracker(0)
            tracker(seed + 1)
    result = compared(capsys, "a", "b")
    assert result["values"]["b"]["nmls"] == fl.read_runs(folder).query("run == 'b'").nmls.iloc[-1]
    assert result["warnings"] == ["The step differs: a 1, b 2."]


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_a_figure_replaces_only_figures_of_flatlens(capsys, folder, kind):
    words = ["compare", "sgd.pt", "sam.pt", *MEASURED, "--figure", f"ratios.{kind}"]
    assert cli.main(words) == 0
    drawn = (folder / f"ratios.{kind}").read_bytes()
    assert cli.main(words) == 0
    assert (folder / f"ratios.{kind}").read_bytes() == drawn
    (folder / f"ratios.{kind}").write_text("mine")
    capsys.readouterr()
    assert "exists and is not a figure of flatlens" in refusal(capsys, *words[1:])
    assert (folder / f"ratios.{kind}").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "There is no source to compare"),
        (["sgd.pt"], "There is one source to compare"),
        (["sgd.pt", "absent.pt"], "There is no file or folder absent.pt"),
        (["sgd.pt", "sgd.pt"], "sgd.pt is given twice"),
        (["sgd.pt", "sam.pt"], "sgd.pt holds weights only; give --model and --data"),
        (["sgd.pt", "sam.pt", *MEASURED, "--model", "a:b", "c:d", "e:f"], "There are 4 models"),
        (["sgd.pt", "nets.py", *MEASURED], "nets.py is neither safetensors nor"),
        (["sgd.pt", "empty", *MEASURED], "empty is not a run folder"),
        (["other.json", "sgd.pt", *MEASURED], "other.json is not a saved measurement"),
        (["sgd.pt", "sam.pt", *MEASURED, "--figure", "a.gif"], "A figure ends in .png, .pdf, .svg"),
        (["sgd.pt", "sam.pt", *MEASURED, "--figure", "no/a.png"], "There is no folder no"),
        (["sgd.pt", "sam.pt", *MEASURED, "--quantities", "nets:gone"], "nets:gone' cannot be"),
        (["sgd.pt", "sam.pt", *MEASURED, "--quantities", "nets:value"], "a value of type int"),
        (["sgd.pt", "sam.pt", *MEASURED, "--quantities", "nets:text"], "text returns str"),
    ],
)
def test_bad_input_is_one_sentence(capsys, folder, words, says):
    (folder / "empty").mkdir()
    (folder / "other.json").write_text('{"values": 3}')
    assert says in refusal(capsys, *words)


def test_a_run_folder_runs_no_code_that_the_user_did_not_name(capsys, folder):
    for lr in ("0.1", "0.2"):
        assert cli.main([*TINY, "--lr", lr, "--out", f"runs/{lr}"]) == 0
    path = folder / "runs/0.1/config.json"
    content = json.loads(path.read_text())
    content["config"] |= {"model": "os:getcwd", "model_options": {}}
    path.write_text(json.dumps(content))
    assert "names the model 'os:getcwd', which is code" in refusal(capsys, "runs/0.1", "runs/0.2")
