"""Whose code runs: models of flatlens and factories of the command line, never a stranger's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatlens import FlatlensError, cli
from flatlens.training.trust import check_trusted, import_factory, is_own_model

SOURCE = Path(__file__).parents[2] / "src"
TINY = """train --model-options.widths [64,4,10] --steps 2 --measure end --samples 3 --train-size 20
--evaluate 10 --quantities sharpness""".split()  # noqa: SIM905
FACTORY = """
import sys
from torch import nn
def build(): return nn.Linear(64, 10)
def leave(): sys.exit(0)
"""
LEAVING = "import sys\nsys.exit(0)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("mine", "leaving"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "mine.py").write_text(FACTORY)
    (tmp_path / "leaving.py").write_text(LEAVING)
    return tmp_path


@pytest.fixture
def stranger(folder):
    """A run folder whose config names a shell command as its model."""
    assert cli.main([*TINY, "--out", "runs/a", "--quiet"]) == 0
    rename_model(folder / "runs/a", "subprocess:getoutput", {"cmd": f"touch {folder}/ran"})
    return folder / "runs"


def rename_model(run: Path, model: str, options: dict[str, str]) -> None:
    config = json.loads((run / "config.json").read_text())
    config["config"] |= {"model": model, "model_options": options}
    (run / "config.json").write_text(json.dumps(config))


def refusal(capsys, *words: str) -> str:
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


def test_models_that_flatlens_knows():
    assert all(map(is_own_model, ["mlp", "vit", "timm:resnet18", "hf:name"]))
    assert not any(map(is_own_model, ["subprocess:getoutput", "timm.x:y", "mlp:x", "os:system"]))


def test_a_factory_in_a_file_needs_trust_or_its_name():
    with pytest.raises(FlatlensError, match=r"a.toml names the model 'm:f', .* give --model m:f"):
        check_trusted(["mlp", "m:f"], "a.toml")
    check_trusted(["m:f"], "a.toml", trust=True)
    check_trusted(["m:f"], "a.toml", named=["m:f"])


def test_a_report_runs_no_code_that_a_run_names(stranger, folder, capsys):
    message = refusal(capsys, "report", "runs", "--measure")
    assert "runs/a names the model 'subprocess:getoutput'" in message
    assert not (folder / "ran").exists()
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("command", [["train", "--config"], ["sweep"]])
def test_a_toml_file_runs_no_code(command, folder, capsys):
    settings = f'model = "subprocess:getoutput"\nmodel_options = {{cmd = "touch {folder}/ran"}}\n'
    head = "[base]\n" if command == ["sweep"] else ""
    (folder / "evil.toml").write_text(head + settings)
    assert "evil.toml names the model" in refusal(capsys, *command, "evil.toml")
    assert not (folder / "ran").exists()
    assert not (folder / "runs").exists()


def test_a_grid_in_a_toml_file_runs_no_code(folder, capsys):
    (folder / "evil.toml").write_text('[grid]\nmodel = ["mlp", "subprocess:getoutput"]\n')
    assert "evil.toml names the model" in refusal(capsys, "sweep", "evil.toml")


@pytest.mark.parametrize("word", ["--trust", "--model=mine:build"])
def test_a_factory_of_a_toml_file_runs_with_trust_or_by_its_name(word, folder, capsys):
    (folder / "own.toml").write_text('model = "mine:build"\n')
    words = [w for w in TINY[1:] if "widths" not in w and w != "[64,4,10]"]
    assert cli.main(["train", "--config", "own.toml", word, *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sharpness"] > 0


def test_the_folder_comes_last_on_the_path_after_the_import(folder):
    before = [*sys.path]
    import_factory("mine:build", folder)
    assert sys.path == [*before, str(folder)]


def test_models_of_flatlens_leave_the_path_alone(capsys):
    before = [*sys.path]
    assert cli.main(["measure", "mlp", "--data", "digits", "--n", "2"]) == 2  # 784 inputs, not 64
    import_factory("timm:resnet18", "elsewhere")
    assert sys.path == before


@pytest.mark.parametrize("model", ["mine:leave", "leaving:build"])
def test_a_factory_that_exits_is_an_error(model, capsys):
    message = refusal(capsys, "measure", model, "--data", "digits")
    assert "sys.exit" in message or "SystemExit: 0" in message


SHADOWS = ("plotly", "pandas", "matplotlib", "loky", "timm", "safetensors", "json", "cyclopts")


@pytest.mark.slow
def test_modules_in_the_current_folder_do_not_shadow_installed_ones(folder):
    """A user who looks at a stranger's folder from inside it runs nothing of it."""
    assert cli.main([*TINY, "--out", "runs/a", "--quiet"]) == 0
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open('{folder}/ran', 'w').close()\n")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path[:] = sys.path[1:]\n"
         "from flatlens.cli import main; sys.exit(main(['report', 'runs']))"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert not (folder / "ran").exists()


@pytest.mark.slow
def test_python_m_takes_the_current_folder_off_the_path(folder):
    (folder / "plotly.py").write_text(f"open('{folder}/ran', 'w').close()\n")
    assert cli.main([*TINY, "--out", "runs/a", "--quiet"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "flatlens", "report", "runs"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert not (folder / "ran").exists()
