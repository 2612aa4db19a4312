"""What a shell does to a command: closed pipes, odd names, Ctrl-C; one sentence, no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatlens import cli
from flatlens.cli import demo as demo_command
from flatlens.cli.guard import guarded, refuse

SOURCE = Path(__file__).parents[2] / "src"
MODELS = """
import torch
from torch import nn
def lazy(): return nn.Sequential(nn.LazyLinear(10))
def meta(): return nn.Linear(64, 10, device="meta")
def scripted(): return torch.jit.trace(nn.Linear(64, 10), torch.zeros(1, 64))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    (tmp_path / "odd.py").write_text(MODELS)
    return tmp_path


def raising(error):
    def command(_):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ModuleNotFoundError("no", name="plotly.io"), 2, "pip install 'flatlens[report]'"),
        (ValueError("embedded null byte"), 2, "NUL character"),
        (MemoryError(), 1, "not enough memory"),
        (PermissionError(13, "Permission denied", "a.txt"), 2, "Cannot use a.txt"),
        (RuntimeError("a\nb"), 1, "RuntimeError: a b"),
        (SystemExit(0), 2, "sys.exit(0)"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_every_error_is_at_most_one_sentence(error, code, words, capsys, monkeypatch):
    monkeypatch.setattr("flatlens.cli.guard._drop_output", lambda: None)
    assert guarded(raising(error), []) == code
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == bool(words)


def test_a_nul_in_an_argument_is_refused(capsys):
    assert cli.main(["report", "a\0b"]) == 2
    assert "NUL character" in capsys.readouterr().err


def test_a_name_that_is_no_utf8_is_printed_with_escapes(capsys):
    assert cli.main(["report", os.fsdecode(b"runs-\xff")]) == 2
    assert "runs-" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "words"), [("lazy", "is lazy"), ("meta", "device meta"), ("scripted", "TorchScript")]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*Lazy")
def test_models_without_values_or_layers_are_refused(model, words, capsys):
    assert cli.main(["measure", f"odd:{model}", "--data", "digits", "--n", "2"]) == 2
    assert words in capsys.readouterr().err


def test_quiet_prints_nothing(capsys, monkeypatch):
    monkeypatch.setattr("flatlens.reproduction.demo.main", lambda *_: print("tables"))
    demo_command.demo(quiet=True)
    assert capsys.readouterr().out == ""


def start(*words: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flatlens", *words], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, **options,
    )  # fmt: skip


def test_a_reader_that_leaves_is_no_error():
    process = start("--help", stdout=subprocess.PIPE)
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == ""
    process.wait()


@pytest.mark.parametrize("delay", [0.2, 0.5, 1.0])
def test_control_c_while_torch_is_imported_is_silent(delay):
    script = "from flatlens.cli import main; print('started', flush=True); exit(main(['demo']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert process.stdout.readline() == "started\n"  # until then Python itself handles the signal
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""


def test_a_refusal_ends_in_one_full_stop(capsys):
    refuse("A  sentence\nin two lines..")
    assert capsys.readouterr().err == "flatlens: A sentence in two lines.\n"
