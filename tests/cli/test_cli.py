"""The command line: numbers on standard output, refusals as one sentence and exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import flatlens as fl
from flatlens import cli
from flatlens.cli.networks import draw
from flatlens.data.datasets import load
from flatlens.reproduction import demo

SOURCE = Path(__file__).parents[2] / "src"
FACTORY = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))

net = build()

def number():
    return 3

def raises():
    raise KeyError("layers")

def disk():
    raise OSError("disk trouble")

def two():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 2), nn.Linear(64, 10)
        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x)}
    return Two()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder with a model file; imports of that model are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    (tmp_path / "mymodel.py").write_text(FACTORY)
    return tmp_path


@pytest.fixture
def trained():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A real process, as a user starts it; warnings are errors there too."""
    command = [sys.executable, "-W", "error", "-m", "flatlens", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def refusal(capsys, *arguments: str) -> str:
    """The one sentence with which the command line refuses."""
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("flatlens: ")
    assert told.err.endswith((".\n", "?\n"))
    assert told.err.count("\n") == 1
    return told.err


# --- help


@pytest.mark.parametrize(
    "command",
    [(), ("demo",), ("measure",), ("train",), ("sweep",), ("reproduce",), ("zoo",), ("report",)],
    ids=lambda command: command[0] if command else "flatlens",
)
def test_help_shows_an_example(command, capsys):
    assert cli.main([*command, "--help"]) == 0
    told = capsys.readouterr().out
    assert "Example" in told
    assert " ".join(["flatlens", *command]) in told.split("Example")[1]


# --- demo


@pytest.mark.slow
def test_demo_prints_both_runs_and_saves_the_figure(capsys, folder):
    assert cli.main(["demo", "--steps", "60", "--out", "figures"]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("learning rate 0.1", "learning rate 1.0", "sharpness"))
    assert str(Path("figures") / "demo.png") in told
    assert (folder / "figures" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "figures" / "demo.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in (folder / "figures").iterdir()) == ["demo.pdf", "demo.png"]


@pytest.mark.slow
def test_demo_json_is_one_object_and_repeats_bit_for_bit(capsys):
    told = []
    for _ in range(2):
        assert cli.main(["demo", "--steps", "12", "--json"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    summary = json.loads(told[0])
    assert [run["lr"] for run in summary["runs"]] == [0.1, 1.0]
    assert [r["step"] for r in summary["runs"][0]["records"]] == [0, 1, 2, 5, 10, 12]
    assert Path(summary["figure"]["png"]).is_file()


def test_demo_learns_and_records_what_measure_says():
    data = load("digits")
    run = demo.train(lr=1.0, steps=60, seed=0)
    assert run.last.train_loss < 0.7 * run.records[0].train_loss
    m = fl.measure(run.model, data.x_train[: demo.SAMPLES])
    assert run.last.sqrt_sharpness == pytest.approx(m["sharpness"] ** 0.5, rel=1e-6)
    assert run.last.nmls == pytest.approx(m["nmls"], rel=1e-6)
    assert run.last.log_volume == pytest.approx(m["log_volume"], rel=1e-6)


def test_demo_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    demo.train(lr=0.1, steps=2, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_demo_refuses_steps(capsys, steps):
    assert "--steps" in refusal(capsys, "demo", "--steps", steps)


def test_demo_refuses_a_folder_that_is_a_file(capsys, folder):
    assert "mymodel.py: File exists" in refusal(capsys, "demo", "--out", "mymodel.py")


# --- measure


def test_measure_gives_what_the_library_gives(capsys, trained):
    torch.save(trained.state_dict(), "weights.pt")
    words = "measure mymodel:build --checkpoint weights.pt --data digits --n 20 --json"
    assert cli.main([*words.split(), "--dtype", "float64"]) == 0
    told = json.loads(capsys.readouterr().out)["quantities"]
    data = load("digits")
    index = draw(1000, 20, seed=0)
    m = fl.measure(trained.double(), data.x_train[index].double(), data.y_train[index])
    for name in ("sharpness", "nmls", "local_dimension", "loss", "accuracy"):
        assert told[name] == pytest.approx(m[name], rel=1e-12)


def test_measure_prints_a_table_and_reads_npz(capsys, folder):
    generator = np.random.default_rng(0)
    np.savez("data.npz", x=generator.normal(size=(7, 64)), y=np.arange(7))
    assert cli.main(["measure", "mymodel:build", "--data", "npz:data.npz"]) == 0
    assert "sharpness" in capsys.readouterr().out


def test_measure_selects_an_output(capsys):
    words = "measure mymodel:two --data digits --n 3 --output b --json"
    assert cli.main(words.split()) == 0
    assert json.loads(capsys.readouterr().out)["N"] == 10


def test_measure_takes_a_module_as_it_is(capsys):
    words = "measure mymodel:net --data digits --n 5 --json --dtype float64"
    assert cli.main(words.split()) == 0
    told = json.loads(capsys.readouterr().out)["quantities"]
    net = sys.modules["mymodel"].net.double()
    m = fl.measure(net, load("digits").x_train[draw(1000, 5, seed=0)].double())
    assert told["sharpness"] == pytest.approx(m["sharpness"], rel=1e-12)


def test_measure_in_the_precision_of_the_network(capsys):
    words = "measure mymodel:build --data digits --n 3 --dtype bfloat16"
    assert cli.main([*words.split(), "--precision", "model", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["dtype"] == "bfloat16"
    assert any("computed in bfloat16" in note for note in record["notes"])
    assert "--precision" in refusal(capsys, *words.split(), "--precision", "bfloat16")


def test_rtol_is_of_estimates_beside_an_exact_pass_too(capsys):
    words = (
        "measure mymodel:build --data digits --n 5 --json --method exact --rtol 0.2 --quantities"
    )
    assert "rtol" in refusal(capsys, *words.split(), "sharpness")
    assert cli.main([*words.split(), "sharpness", "hessian_trace"]) == 0
    assert "hessian_trace" in json.loads(capsys.readouterr().out)["quantities"]


@pytest.mark.slow
def test_measure_works_as_a_process_in_the_users_folder(folder):
    done = shell("measure", "mymodel:build", "--data", "digits", "--n", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["quantities"]["nmls"] > 0


WRAPPED = {
    "state dict": lambda state: state,
    "under state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "under model": lambda state: {"model": state, "step": 7},
    "from data parallel": lambda state: {f"module.{key}": value for key, value in state.items()},
    "from torch.compile": lambda state: {f"_orig_mod.{key}": value for key, value in state.items()},
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_checkpoint_in_every_usual_form(capsys, trained, wrap):
    save_file(trained.state_dict(), "weights.safetensors")
    torch.save(WRAPPED[wrap](trained.state_dict()), "weights.anything")
    told = []
    for name in ("weights.safetensors", "weights.anything"):
        words = f"measure mymodel:build --checkpoint {name} --data digits --n 3 --json"
        assert cli.main(words.split()) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


def with_checkpoint(name: str) -> list[str]:
    return ["measure", "mymodel:build", "--checkpoint", name, "--data", "digits"]


def test_checkpoint_of_another_network_is_refused(capsys):
    other = nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 10))
    torch.save(other.state_dict(), "weights.pt")
    told = refusal(capsys, *with_checkpoint("weights.pt"))
    assert "unexpected: 3.weight, 3.bias" in told
    assert "2.weight is [4, 5] instead of [10, 5], 2.bias is [4] instead of [10]" in told


def test_checkpoint_with_missing_weights_is_refused(capsys, trained):
    save_file({"0.bias": trained[0].bias.detach()}, "weights.safetensors")
    told = refusal(capsys, *with_checkpoint("weights.safetensors"))
    assert "missing: 0.weight, 2.weight, 2.bias" in told


def test_checkpoint_that_would_run_code_is_refused(capsys, trained):
    torch.save(trained, "model.pt")  # a pickled module, not a state dict
    assert "save model.state_dict()" in refusal(capsys, *with_checkpoint("model.pt"))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x10" + bytes(7) + b"{bad header"])
def test_checkpoint_that_is_damaged_is_refused(capsys, folder, content):
    (folder / "weights.pt").write_bytes(content)
    assert "weights.pt" in refusal(capsys, *with_checkpoint("weights.pt"))


def test_checkpoint_without_weights_is_refused(capsys):
    torch.save({"epoch": 3}, "weights.pt")
    assert "holds no state dict" in refusal(capsys, *with_checkpoint("weights.pt"))


REFUSED = {
    "none.pt: No such file": with_checkpoint("none.pt"),
    "No module named 'nosuch'": ["measure", "nosuch:build", "--data", "digits"],
    "has no attribute 'nosuch'": ["measure", "mymodel:nosuch", "--data", "digits"],
    "mymodel:raises': KeyError: 'layers' (": ["measure", "mymodel:raises", "--data", "digits"],
    "mymodel.py, line 13).": ["measure", "mymodel:raises", "--data", "digits"],
    "mymodel:disk': OSError: disk trouble (": ["measure", "mymodel:disk", "--data", "digits"],
    "'mymodel:__name__' is not callable": ["measure", "mymodel:__name__", "--data", "digits"],
    "KeyError: 'layers'": ["train", "--model", "mymodel:raises", "--data", "digits"],
    "The recipe fig3 has no scale paper": ["reproduce", "fig3", "--scale", "paper"],
    "interventions_mlp has no scale night": ["reproduce", "interventions", "--scale", "night"],
    "made a int": ["measure", "mymodel:number", "--data", "digits"],
    "Unknown data 'mnist'": ["measure", "mymodel:build", "--data", "mnist"],
    "none.npz: No such file": ["measure", "mymodel:build", "--data", "npz:none.npz"],
    "the data has only 1,000": ["measure", "mymodel:build", "--data", "digits", "--n", "1001"],
    "--n": ["measure", "mymodel:build", "--data", "digits", "--n", "0"],
    "input of shape [1, 64]": ["measure", "lenet", "--data", "digits"],
    "device 'abacus'": ["measure", "mymodel:build", "--data", "digits", "--device", "abacus"],
    "--weight-norm": ["measure", "mymodel:build", "--data", "digits", "--weight-norm", "nuclear"],
    "--data": ["measure", "mymodel:build"],
    "--colour": ["demo", "--colour", "red"],
    "nosuch": ["nosuch"],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(capsys, reason):
    assert reason in refusal(capsys, *REFUSED[reason])


@pytest.mark.parametrize("value", ["-1", "0", "nan"])
@pytest.mark.parametrize("option", ["--budget", "--rtol"])
def test_measure_refuses_what_is_not_above_zero(capsys, option, value):
    told = refusal(capsys, "measure", "mymodel:build", "--data", "digits", option, value)
    assert f"for {option}. Must be > 0." in told


def test_a_refusal_of_the_core_is_one_sentence(capsys):
    np.savez("data.npz", x=np.full((3, 64), np.nan), y=np.zeros(3, dtype=int))
    refusal(capsys, "measure", "mymodel:build", "--data", "npz:data.npz")


@pytest.mark.slow
def test_refusals_have_their_exit_code_in_the_shell_too(folder):
    done = shell("measure", "nosuch:build", "--data", "digits")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_control_c_has_its_exit_code(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "main", interrupted)
    assert cli.main(["demo"]) == 130
