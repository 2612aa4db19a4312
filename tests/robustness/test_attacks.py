"""Single attacks, one row each: what is given, and words of the one sentence that refuses it."""

import contextlib
import gzip
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

import flatlens as fl
from flatlens import cli
from flatlens.report import report
from flatlens.runs import Run
from flatlens.training.measure_run import measure_run

TINY = [
    *("--model-options.widths", "[64,4,10]", "--steps", "1", "--measure", "end", "--samples", "2"),
    *("--train-size", "8", "--evaluate", "4", "--quantities", "sharpness", "--quiet"),
]
MODELS = """
import sys
import torch
from torch import nn
def lazy(): return nn.Sequential(nn.LazyLinear(10))
def meta(): return nn.Linear(64, 10, device="meta")
def scripted(): return torch.jit.trace(nn.Linear(64, 10), torch.zeros(1, 64))
def no_module(): return 3
def generator(): yield nn.Linear(64, 10)
def kind(): return nn.Linear
def leaving(): sys.exit(0)
def interrupting(): raise KeyboardInterrupt
def failing(): raise ValueError("a\\nb")
def complex_(): return nn.Linear(64, 10, dtype=torch.complex64)
def integers(): return nn.EmbeddingBag(64, 10)
def many(): return Pair()
def nothing(): return nn.Sequential()
class Pair(nn.Module):
    def forward(self, x): return x, x
"""


def tiny(*words):
    """A training of a moment, with other options in place of some of its own."""
    pairs = {TINY[k]: TINY[k + 1] for k in range(0, len(TINY) - 1, 2)}
    given = {words[k] for k in range(0, len(words), 2)}
    own = [w for option, value in pairs.items() if option not in given for w in (option, value)]
    return ["train", "--out", "run", "--quiet", *own, *words]


def plain(*words):
    """A training of a moment of a model without options."""
    line = tiny("--model-options.widths", "", *words)
    place = line.index("--model-options.widths")
    return line[:place] + line[place + 2 :]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    place = tmp_path / "code"
    place.mkdir()
    (place / "odd.py").write_text(MODELS)
    sys.path.append(str(place))

    def hang(*_):
        raise TimeoutError("the command waits")

    monkeypatch.setattr(signal, "alarm", signal.alarm)
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(120)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refusal(capsys, *words, code=2):
    """The one sentence of a command that is refused."""
    there = set(Path.cwd().iterdir())
    assert cli.main([str(word) for word in words]) == code
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.err
    if code == 2:
        assert output.out == ""
        assert set(Path.cwd().iterdir()) == there
    return output.err


# -- models ----------------------------------------------------------------------------------

ODD_MODELS = {
    "lazy": "is lazy",
    "meta": "device meta",
    "scripted": "TorchScript",
    "no_module": "made a int",
    "generator": "made a generator",
    "kind": "made a type",
    "leaving": "sys.exit|SystemExit",
    "failing": "ValueError: a",
    "complex_": "complex|cannot read an input",
    "integers": "cannot read an input|not",
    "many": "shape|tuple",
    "nothing": "",
}
IGNORED = ("ignore:.*torch.jit:DeprecationWarning", "ignore:.*Lazy", "ignore:.*lazy")


@pytest.mark.parametrize("model", ODD_MODELS)
@pytest.mark.filterwarnings(*IGNORED)
def test_odd_models_under_train(model, capsys):
    message = refusal(capsys, *plain("--model", f"odd:{model}"))
    assert any(word in message for word in ODD_MODELS[model].split("|"))


@pytest.mark.parametrize("model", ["lazy", "meta", "scripted", "no_module", "leaving", "failing"])
@pytest.mark.filterwarnings(*IGNORED)
def test_odd_models_under_sweep(model, capsys, monkeypatch):
    from flatlens.training import sweep
    from flatlens.workers.engine import Engine

    monkeypatch.setattr(sweep, "open_engine", lambda *_, **__: in_this_process(Engine))
    words = [w for w in TINY if "widths" not in w and w != "[64,4,10]"]
    command = ["sweep", "--model", f"odd:{model}", "--out", "runs", *words]
    message = refusal(capsys, *command, code=1)
    assert "1 of 1 runs failed" in message
    assert any(word in message for word in ODD_MODELS[model].split("|"))


def in_this_process(engine):
    """An engine that runs each task at once."""
    from concurrent.futures import Future
    from contextlib import nullcontext

    def submit(function, *words):
        future = Future()
        future.set_result(function(*words))
        return future

    return nullcontext(engine(submit, list, 1, 0))


# -- a stranger's folder ---------------------------------------------------------------------


@pytest.fixture
def stranger(folder):
    """A run folder whose config names a shell command as its model."""
    assert cli.main(["train", "--out", "runs/a", *TINY]) == 0
    path = folder / "runs/a/config.json"
    config = json.loads(path.read_text())
    options = {"cmd": f"touch {folder}/ran"}
    config["config"] |= {"model": "subprocess:getoutput", "model_options": options}
    path.write_text(json.dumps(config))
    return folder / "runs"


def test_python_runs_no_code_that_a_folder_names(stranger, folder):
    with pytest.raises(fl.FlatlensError, match=r"names the model 'subprocess:getoutput'"):
        measure_run(stranger / "a")
    with pytest.raises(fl.FlatlensError, match=r"names the model 'subprocess:getoutput'"):
        report(stranger, folder / "page.html", measure=True)
    with pytest.raises(fl.FlatlensError, match="made a str"):  # asked for, and no module
        measure_run(stranger / "a", models=["subprocess:getoutput"])
    assert not (folder / "page.html").exists()


def test_a_trusted_folder_is_measured(folder):
    words = [w for w in TINY if "widths" not in w and w != "[64,4,10]"]
    (folder / "code/odd.py").write_text("from torch import nn\ndef ok(): return nn.Linear(64, 10)")
    assert cli.main(["train", "--model", "odd:ok", "--out", "runs/a", *words]) == 0
    with pytest.raises(fl.FlatlensError, match=r"models=\['odd:ok'\] or trust=True"):
        measure_run("runs/a")
    for allowed in ({"models": ["odd:ok"]}, {"trust": True}):
        assert measure_run("runs/a", **allowed)["sharpness"] > 0


# -- pipes, links and devices ----------------------------------------------------------------


@pytest.fixture
def pipe(folder):
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "pipe.gz")
    (folder / "images/a").mkdir(parents=True)
    os.mkfifo(folder / "images/a/x.png")
    return folder / "pipe"


PIPES = {
    "npz": ["measure", "torch.nn:Flatten", "--data", "npz:pipe"],
    "device": ["measure", "torch.nn:Flatten", "--data", "npz:/dev/zero"],
    "image": ["measure", "torch.nn:Flatten", "--data", "folder:images"],
    "checkpoint": ["measure", "torch.nn:Flatten", "--data", "digits", "--checkpoint", "pipe"],
    "weights": ["measure", "torch.nn:Flatten", "--data", "digits", "--checkpoint", "/dev/zero"],
    "config": ["train", "--config", "pipe"],
    "config device": ["train", "--config", "/dev/zero"],
    "sweep": ["sweep", "pipe"],
    "records": ["reproduce", "--from", "pipe.gz", "--out", "results"],
    "report": ["report", "pipe"],
    "measurements": ["report", "images", "--measurements", "pipe"],
    "output": ["report", "images", "-o", "pipe"],
    "out": ["train", "--out", "pipe", *TINY],
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_or_device_is_refused_and_not_waited_for(name, pipe, capsys):
    refusal(capsys, *PIPES[name])


@pytest.mark.parametrize("name", ["records.jsonl", "config.json", "done", "checkpoint.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_run_with_a_strange_file(name, kind, folder):
    with Run.open("runs/a", {"lr": 1}) as run:
        run.append({"step": 0, "sharpness": 1.0})
        run.checkpoint({}, {})
        run.finish()
    path = folder / "runs/a" / name
    path.unlink()
    {"pipe": os.mkfifo, "link": lambda p: p.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    words = "not a regular file|symbolic link"
    if name == "checkpoint.safetensors":
        assert len(fl.read_runs("runs")) == 1
        with Run.open("runs/a") as run, pytest.raises(fl.FlatlensError, match=words):
            run.restore()
    else:
        with pytest.raises(fl.FlatlensError, match=words):
            fl.read_runs("runs")


def test_an_error_file_that_is_a_pipe(folder):
    with Run.open("runs/model", {"model": "x"}) as run:
        run.append({"step": 0, "adaptive_sharpness": 1.0, "normalized_mls": 1.0, "class": "x"})
    os.mkfifo(folder / "runs/model/error.txt")
    (folder / "runs/other").mkdir()
    os.mkfifo(folder / "runs/other/error.txt")
    with contextlib.suppress(fl.FlatlensError):
        report("runs", "page.html")


# -- hogs ------------------------------------------------------------------------------------

BIG = 10**12
HOGS = {
    "schedule": (tiny("--measure", "log:9999999999"), "measure"),
    "steps at": (tiny("--measure", f"at:{'9' * 40}"), "measure"),
    "seeds": (["sweep", *TINY, "--seeds", 10**8], "runs"),
    "grid": (["sweep", *TINY, "--seeds", 10**4, "--lr", *(f"{k}e-4" for k in range(1, 999))], ""),
    "depth": (tiny("--model-options.depth", 10**8), "depth"),
    "width": (tiny("--model-options.widths", f"[64,{BIG},10]"), "memory"),
    "widths": (tiny("--model-options.widths", f"[64,{BIG}{BIG},10]"), "model_options"),
    "vit": (["train", "--model", "vit", "--model-options.dim", 3 * 10**9], "memory"),
    "vit image": (["train", "--model", "vit", "--model-options.image", 4 * 10**9], "memory"),
    "vit depth": (["train", "--model", "vit", "--model-options.depth", BIG], "depth"),
    "vit mlp": (["train", "--model", "vit", "--model-options.mlp_ratio", 10**15], "memory"),
    "classes": (["train", "--model", "vgg11", "--model-options.classes", BIG], "memory"),
    "n": (["measure", "torch.nn:Flatten", "--data", "digits", "--n", BIG], "only 1,"),
    "samples": (tiny("--samples", BIG), ""),
    "synthetic": (tiny("--data", f"synthetic:gaussians?n={BIG}"), "memory"),
    "dimensions": (tiny("--data", f"synthetic:gaussians?d={BIG}"), ""),
    "teacher": (tiny("--data", f"synthetic:teacher?n={BIG}"), ""),
    "image size": (["measure", "torch.nn:Flatten", "--data", f"folder:pictures?size={10**7}"], ""),
    "workers": (["sweep", *TINY, "--workers", BIG, "--seeds", 5_000], "memory"),
    "directions": (
        ["measure", "vit", "--data", "digits", "--method", "sketch",
         "--directions", BIG, "--n", 2],
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOGS)
def test_what_would_take_all_memory_or_time_is_refused(name, folder, capsys):
    from PIL import Image

    (folder / "pictures/a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "pictures/a/x.png")
    words, sentence = HOGS[name]
    assert any(word in refusal(capsys, *words) for word in sentence.split("|"))


def test_a_training_of_very_many_steps_starts_at_once(folder, capsys, monkeypatch):
    from flatlens.training import train as module

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_steps", stop)
    assert cli.main(tiny("--steps", str(BIG))) == 130


@pytest.mark.slow
def test_a_gzip_bomb_is_refused(folder, capsys):
    (folder / "r.jsonl.gz").write_bytes(gzip.compress(b"0" * 70_000_000))
    assert "unpacks to more" in refusal(capsys, "reproduce", "--from", "r.jsonl.gz", "--out", "o")


def test_an_npz_bomb_is_refused(folder, capsys):
    import zipfile

    with zipfile.ZipFile("a.npz", "w") as archive:
        header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': "
        text = header + b"(1000000000000, 64), }"
        archive.writestr("x.npy", text.ljust(127) + b"\n")
    np.save("y.npy", np.zeros(3))
    with zipfile.ZipFile("a.npz", "a") as archive:
        archive.write("y.npy")
    refusal(capsys, "measure", "torch.nn:Flatten", "--data", "npz:a.npz")


# -- outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("runs/a/records.jsonl", "is not a report"),
        ("runs/a/config.json", "is not a report"),
        ("runs", "is a folder"),
        ("/dev/null", "not a regular file"),
        ("/dev/full", "not a regular file"),
        ("link.html", "not a regular file"),
        ("nowhere/page.html", "no folder"),
        ("notes.html", "is not a report"),
    ],
)
def test_a_report_overwrites_nothing_of_others(output, words, folder, capsys):
    with Run.open("runs/a", {"lr": 1}) as run:
        run.append({"step": 0, "sharpness": 1.0})
    (folder / "link.html").symlink_to("runs/a/records.jsonl")
    (folder / "notes.html").write_text("<title>mine")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert words in refusal(capsys, "report", "runs", "-o", output)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_users_files_stay_when_a_run_is_opened(folder):
    with Run.open("a", {}) as run:
        run.append({"step": 0})
    names = [".mine.new", ".x.tmp", "figure3.txt", "records.jsonl.bak", ".flatlens", "mine.part"]
    for name in names:
        (folder / "a" / name).write_text("mine")
    with Run.open("a", {}):
        pass
    assert all((folder / "a" / name).read_text() == "mine" for name in names)


def test_a_busy_run_is_said(folder, capsys):
    assert cli.main(["train", "--out", "run", *TINY]) == 0
    (folder / "run/done").unlink()
    lock = next(p for p in (folder / "run").iterdir() if "lock" in p.name)
    with FileLock(lock):
        assert "open elsewhere" in refusal(capsys, "train", "--out", "run", *TINY)


# -- samples and targets ---------------------------------------------------------------------

ARRAYS = {
    "NaN inputs": ({"x": np.full((4, 3), np.nan), "y": np.arange(4) % 2}, "NaN|finite"),
    "infinite targets": ({"x": np.zeros((4, 3)), "y": np.full((4, 2), np.inf)}, "finite"),
    "complex": ({"x": np.zeros((4, 3), complex), "y": np.arange(4) % 2}, "complex"),
    "objects": ({"x": np.array([object()] * 4), "y": np.arange(4) % 2}, ""),
    "texts": ({"x": np.array(["a"] * 4), "y": np.arange(4) % 2}, ""),
    "no y": ({"x": np.zeros((4, 3))}, "y"),
    "no x": ({"y": np.zeros((4, 3))}, "x"),
    "lengths": ({"x": np.zeros((4, 3)), "y": np.arange(5)}, ""),
    "empty": ({"x": np.zeros((0, 3)), "y": np.zeros(0, int)}, ""),
    "negative labels": ({"x": np.zeros((4, 3)), "y": -np.arange(4)}, ""),
    "a number": ({"x": np.float64(3), "y": np.float64(3)}, ""),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("command", ["measure", "train"])
def test_odd_arrays_are_refused(name, command, folder, capsys):
    arrays, words = ARRAYS[name]
    np.savez("a.npz", **arrays)
    line = {
        "measure": ["measure", "torch.nn:Flatten", "--data", "npz:a.npz", "--n", 1],
        "train": ["train", "--data", "npz:a.npz", "--steps", 1, "--measure", "end", "--samples", 1,
                  "--model-options.widths", "[3,4,2]", "--out", "run"],
    }[command]  # fmt: skip
    if name == "negative labels" and command == "measure":
        return  # no loss is asked for
    message = refusal(capsys, *line)
    assert any(word in message for word in words.split("|"))


def test_float_targets_without_a_test_part_are_trained(folder):
    np.savez("a.npz", x=np.random.default_rng(0).normal(size=(20, 3)), y=np.zeros((20, 2)))
    words = ["--steps", "2", "--measure", "end", "--samples", "2", "--quantities", "sharpness"]
    words += ["--model-options.widths", "[3,4,2]", "--out", "run", "--quiet"]
    assert cli.main(["train", "--data", "npz:a.npz", *words]) == 0
