"""Sweeps: the cells of a grid, local processes, failures, two at once, killed and started again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from torch import nn

from flatlens import FlatlensError, cli
from flatlens.runs import Run
from flatlens.training import sweep as sweeps
from flatlens.training.config import Config
from flatlens.training.grid import cells, read_sweep
from flatlens.training.sweep import SweepError, run_cell, sweep
from flatlens.training.train import train
from flatlens.workers import Engine, Outcome, local
from flatlens.workers.outcome import marked

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "src"
KILLS = int(os.environ.get("FLATLENS_KILLS", "20")) // 5  # the other four fifths: test_train
BASE = Config(
    model_options={"widths": (64, 8, 10)},
    steps=40,
    measure="every:20",
    samples=5,
    train_size=100,
    evaluate=50,
    checkpoint_every=10,
)
GRID = {"lr": [0.1, 0.2], "seed": range(2)}
# two groups do not divide three channels: an error of the network's own, a ValueError
BROKEN = {"in_channels": 3, "out_channels": 4, "kernel_size": 1, "groups": 2}
BROKEN_GRID = {"model": ["torch.nn:Conv2d"], "model_options": [BROKEN]}


def records(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/records.jsonl")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, bytes]:
    """The records of the four cells, made one after the other in this process."""
    folder = tmp_path_factory.mktemp("expected")
    for config in cells(BASE, GRID):
        train(config, folder / config.name)
    return records(folder)


# --- the cells


def test_the_documented_file_is_the_paper_s_hundred_networks(tmp_path):
    text = (SOURCE.parent / "docs" / "training.md").read_text()
    (tmp_path / "sweep.toml").write_text(text.split("```toml\n")[1].split("```")[0])
    found = cells(*read_sweep(tmp_path / "sweep.toml"))
    settings = [(0.05, 20), (0.1, 20), (0.2, 20), (0.1, 8), (0.1, 32)]
    assert [(c.lr, c.batch_size, c.seed) for c in found] == [
        (*setting, seed) for setting in settings for seed in range(20)
    ]
    assert {(c.model, c.data, c.classes, c.loss) for c in found} == {
        ("vgg", "cifar10", (0, 1), "mean_squared")
    }
    assert len({c.name for c in found}) == 100


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        ({"lr": 0.1}, "The grid's lr is 0.1, but it must be a list"),
        ({"optimizer": "sgd"}, "The grid's optimizer is 'sgd'"),
        ({"lr": []}, "The grid's lr is []"),
        ({"rate": [1]}, "Unknown field 'rate' in the grid"),
        ({"lr": [-1.0]}, "The field lr is -1.0"),
        ({"lr.x": [1]}, "The grid's lr.x is an option of lr, but lr is 0.1"),
    ],
)
def test_a_bad_grid_is_refused_before_anything_runs(tmp_path, grid, reason):
    with pytest.raises(FlatlensError) as caught:
        sweep(BASE, grid, out=tmp_path / "runs")
    assert reason in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_toml(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        "[base]\nsteps = 7\n[grid]\nlr = [0.1, 0.2]\n[grid.model_options]\nactivation = ['tanh']\n"
    )
    found = cells(*read_sweep(path))
    assert [(c.lr, c.steps, c.model_options) for c in found] == [
        (0.1, 7, {"activation": "tanh"}),
        (0.2, 7, {"activation": "tanh"}),
    ]
    path.write_text("[[grid]]\nlr = [0.1]\n[[grid]]\nlr = [0.3]\n")
    assert [c.lr for c in cells(*read_sweep(path))] == [0.1, 0.3]
    path.write_text("lr = [0.1]\n")
    with pytest.raises(FlatlensError, match="has 'lr' beside its tables"):
        read_sweep(path)
    for text in ("base = 5", "base = [1]", "grid = 3", "grid = ['a']"):
        path.write_text(text)
        with pytest.raises(FlatlensError, match=r"sweep.toml base and grid must be tables"):
            read_sweep(path)


# --- one cell


def test_a_cell_that_another_process_writes_is_left_to_it(tmp_path):
    with Run.open(tmp_path / BASE.name, BASE.identity):
        (tmp_path / "token").touch()
        assert run_cell(BASE.to_dict(), str(tmp_path), "token").status == "busy"


def test_without_the_driver_s_disk_the_files_come_back(tmp_path, expected):
    config = cells(BASE, GRID)[0]
    outcome = run_cell(config.to_dict(), str(tmp_path / "elsewhere"), "token")
    assert list(tmp_path.iterdir()) == []  # nothing was written where it does not belong
    assert set(outcome.files) == {
        "config.json", "records.jsonl", "checkpoint.safetensors", "done"
    }  # fmt: skip
    assert sweeps._store(config, outcome, tmp_path).status == "done"
    assert records(tmp_path) == {config.name: expected[config.name]}
    before = (tmp_path / config.name / "done").stat()
    assert sweeps._store(config, outcome, tmp_path).status == "done"  # there already
    assert (tmp_path / config.name / "done").stat() == before
    with Run.open(tmp_path / config.name):
        assert sweeps._store(config, outcome, tmp_path).status == "busy"


# --- local processes


def test_local_sweep(tmp_path, expected, monkeypatch):
    (tmp_path / cells(BASE, GRID)[1].name).mkdir()
    (tmp_path / cells(BASE, GRID)[1].name / "error.txt").write_text("of an earlier try")
    frame = sweep(BASE, GRID, out=tmp_path, workers=2)
    assert records(tmp_path) == expected
    assert frame.groupby("run")["step"].apply(list).tolist() == [[0, 20, 40]] * 4
    assert frame.attrs["busy"] == []
    assert list(tmp_path.rglob("error.txt")) == []
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    # what is done is not done again, nor is a worker started for it
    monkeypatch.setattr(sweeps, "open_engine", None)
    assert sweep(BASE, GRID, out=tmp_path).equals(frame)


def test_a_failed_run_stops_no_other_and_its_traceback_is_kept(tmp_path, expected):
    bad = cells(BASE, BROKEN_GRID)[0]
    with pytest.raises(SweepError) as caught:
        sweep(BASE, [BROKEN_GRID, GRID], out=tmp_path, workers=2)
    assert "1 of 5 runs failed" in str(caught.value)
    assert f"{bad.name} (ValueError: in_channels must be divisible" in str(caught.value)
    error = (tmp_path / bad.name / "error.txt").read_text()
    assert error.startswith("Traceback")
    assert "in_channels must be divisible by groups" in error
    assert records(tmp_path) == expected


@pytest.mark.parametrize(("refused", "tries"), [(False, 3), (True, 1)])
def test_failures_are_tried_again_and_refusals_are_not(tmp_path, monkeypatch, refused, tries):
    calls = []

    def failing(config, folder, progress):
        calls.append(config)
        raise FlatlensError("no") if refused else OSError("disk trouble")

    class Done:
        def __init__(self, outcome):
            self.result = lambda: outcome

    monkeypatch.setattr(sweeps, "train", failing)
    engine = Engine(lambda f, *task: Done(f(*task)), lambda futures: futures, 1, 0)
    ((name, outcome),) = sweeps._outcomes({BASE.name: BASE}, engine, tmp_path, retries=2)
    assert (name, len(calls)) == (BASE.name, tries)
    assert outcome.error.splitlines()[-1].endswith("no" if refused else "disk trouble")


class Fatal(nn.Linear):
    """Kills its process in the 25th step of training, unless the file `flag` says that it did."""

    def __init__(self, flag: str) -> None:
        super().__init__(64, 10)
        self.flag, self.calls = Path(flag), 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == 25 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def test_a_killed_worker_costs_nothing(tmp_path):
    """What was under way goes on in a new process, from its checkpoint."""
    base = replace(BASE, model="test_sweep:Fatal", model_options={"flag": f"{tmp_path}/flag"})
    grid = {"seed": range(3)}
    frame = sweep(base, grid, out=tmp_path / "runs", workers=2, retries=0)
    assert (tmp_path / "flag").exists()
    assert frame.groupby("run")["step"].apply(list).tolist() == [[0, 20, 40]] * 3
    for config in cells(base, grid):
        train(config, tmp_path / "alone" / config.name)
    assert records(tmp_path / "runs") == records(tmp_path / "alone")


class Doomed(nn.Linear):
    """Ends its process in the first step, in one of two ways."""

    def __init__(self, way: str) -> None:
        super().__init__(64, 10)
        self.way = way

    def forward(self, x):
        if self.training and self.way == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.training and self.way == "exit":
            sys.exit(3)
        return super().forward(x)


def doomed(way: str) -> Config:
    return replace(BASE, model="test_sweep:Doomed", model_options={"way": way})


def test_a_run_that_kills_its_worker_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "LOSSES", 1)
    with pytest.raises(SweepError, match=r"\(Its worker process died, SIGKILL\(-9\).\)"):
        sweep(doomed("die"), {}, out=tmp_path, workers=1, retries=0)


def test_a_run_that_exits_is_a_failed_one(tmp_path):
    (tmp_path / "token").touch()
    outcome = run_cell(doomed("exit").to_dict(), str(tmp_path), "token")
    assert (outcome.status, outcome.error.splitlines()[-1]) == ("failed", "SystemExit: 3")


def test_losses_count_only_against_runs_that_were_alone(tmp_path):
    """With futures made to order: of three runs one kills every worker, with all beside it."""
    configs = cells(BASE, {"seed": range(3)})
    bad, started = configs[1], []

    class Future:
        def __init__(self, name):
            self.name = name

        def result(self):
            if self.name == bad.name or bad.name in self.beside:
                raise BrokenProcessPool("dead")
            return Outcome("done")

    def submit(_, settings, *__):
        started.append(Future(Config.from_dict(settings).name))
        return started[-1]

    def wait(futures):
        for future in futures:
            future.beside = [f.name for f in futures]
        return futures

    todo = {config.name: config for config in configs}
    outcomes = dict(sweeps._outcomes(todo, Engine(submit, wait, 2, 3), tmp_path, 0))
    assert [outcomes[c.name].status for c in configs] == ["done", "lost", "done"]
    assert [f.name for f in started].count(bad.name) == 1 + 1 + 3
    assert outcomes[bad.name].error.splitlines()[-1] == "Its worker process died."


def test_a_finished_run_that_lost_records_is_trained_again(tmp_path):
    grid = {"seed": [0]}
    sweep(BASE, grid, out=tmp_path, workers=1)
    records_file = tmp_path / cells(BASE, grid)[0].name / "records.jsonl"
    before = records_file.read_bytes()
    records_file.write_bytes(b"{\n" + before)
    sweep(BASE, grid, out=tmp_path, workers=1)  # trained again, not passed over as done
    assert records_file.read_bytes() == before


UNGUARDED = """
import flatlens as fl
fl.sweep({"steps": 1}, {"seed": [0]}, out="runs", engine="dask", workers=1)
"""


def test_without_the_main_guard_dask_says_so(tmp_path):
    pytest.importorskip("distributed")
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert 'has to stand below if __name__ == "__main__".' in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": "slurm"}, "Unknown engine 'slurm'"),
        ({"workers": 0}, "at least one worker"),
        ({"address": "tcp://127.0.0.1:1"}, "belong to the engine dask"),
    ],
)
def test_refusals(tmp_path, options, reason):
    with pytest.raises(FlatlensError, match=reason):
        sweep(BASE, GRID, out=tmp_path, **options)


# --- the command, in processes of its own

WORDS = """sweep --model-options.widths [64,8,10] --measure every:20 --samples 5
--train-size 100 --evaluate 50 --checkpoint-every 10 --lr 0.1 0.2 --seeds 2
""".split()  # noqa: SIM905


def start(*words: object) -> subprocess.Popen[str]:
    """A sweep with its workers, in a process group that can be killed as a whole."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "flatlens", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_the_command_is_the_function(tmp_path, capsys, expected):
    file = tmp_path / "sweep.toml"
    file.write_text("[base]\nlr = 7.0\n[grid]\nbatch_size = [8, 9]\n")
    out = tmp_path / "runs"
    words = [*WORDS[1:], "--steps", "40", "--workers", "2", "--out", str(out)]
    assert cli.main(["sweep", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert records(out) == expected
    assert {run: row["step"] for run, row in told.items()} == dict.fromkeys(expected, 40)
    # options come before the file: one value for an axis of the grid, two for one of the base
    assert cli.main(["sweep", str(file), *words, "--batch-size", "20"]) == 0
    assert next(iter(expected)) in capsys.readouterr().out
    assert records(out) == expected


def test_the_command_says_what_failed(tmp_path, capsys):
    words = [f"--model-options.{key.replace('_', '-')}={value}" for key, value in BROKEN.items()]
    command = ["sweep", "--model", "torch.nn:Conv2d", *words, "--out", str(tmp_path)]
    assert cli.main(command) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("flatlens: 1 of 1 runs failed: Conv2d-digits")
    assert told.err.count("\n") == 1


def test_help_shows_an_example(capsys):
    assert cli.main(["sweep", "--help"]) == 0
    assert "flatlens sweep" in capsys.readouterr().out.split("Example")[1]


def test_two_sweeps_at_once_share_the_work(tmp_path, expected):
    both = [start(*WORDS, "--steps", "40", "--workers", "1", "--out", tmp_path) for _ in range(2)]
    told = [process.communicate() for process in both]
    for process, (_, err) in zip(both, told, strict=True):
        # 3: the other sweep was still writing a run when this one ended
        assert (process.returncode, err) == (0, "") or (
            process.returncode == 3 and "left to another process" in err
        )
    assert records(tmp_path) == expected
    assert len(list(tmp_path.glob("*/done"))) == 4


def test_control_c_stops_cleanly(tmp_path):
    process = start(*WORDS, "--steps", "100000", "--workers", "1", "--out", tmp_path)
    while not list(tmp_path.glob("*/checkpoint.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of them
    assert process.communicate() == ("", "")
    assert process.returncode == 130
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_workers_end_with_their_driver(tmp_path, name):
    """The signal goes to the driver alone, as from a batch system."""
    process = start(*WORDS, "--steps", "100000", "--workers", "2", "--out", tmp_path)
    while not list(tmp_path.glob("*/checkpoint.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    workers = children_of(process)
    assert workers
    number = getattr(signal, name)
    process.send_signal(number)
    output = process.communicate()
    # after SIGKILL loky warns of semaphores that it then removes
    assert output == ("", "") or (name == "SIGKILL" and output[0] == "")
    assert process.returncode == -number
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    with marked(tmp_path) as token:  # the next sweep removes what a killed one left
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [token]


def test_runs_of_another_process_have_an_exit_code_and_no_line_in_the_table(tmp_path, capsys):
    words = [*WORDS[1:], "--steps", "40", "--workers", "1", "--out", str(tmp_path)]
    busy, *others = cells(BASE, GRID)
    with Run.open(tmp_path / busy.name, busy.identity) as run:
        run.append({"step": 0, "train_loss": 1.0, "sharpness": 1.0, "nmls": 1.0, "mls": 1.0})
        assert cli.main(["sweep", *words]) == cli.BUSY
    output = capsys.readouterr()
    assert f"1 run is left to another process that is writing them: {busy.name}" in output.err
    assert busy.name not in output.out
    assert all(config.name in output.out for config in others)


def test_a_grid_that_would_fill_a_disk_is_refused_at_once(tmp_path):
    for grid in ({"seed": range(10**8)}, {"seed": range(10**4), "steps": range(1, 10**4 + 1)}):
        with pytest.raises(FlatlensError, match=r"00 runs, which would write at least .* GB"):
            sweep(BASE, grid, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_more_workers_than_memory_are_refused(tmp_path):
    with pytest.raises(FlatlensError, match=r"workers need about .* GB of memory"):
        sweep(BASE, {"seed": range(50_000)}, out=tmp_path, workers=40_000)


def test_killed_at_random_moments_it_ends_with_the_same_records(tmp_path):
    words = [*WORDS, "--steps", "400", "--workers", "2", "--out", tmp_path / "broken"]
    base = replace(BASE, steps=400)
    for config in cells(base, GRID):
        train(config, tmp_path / "whole" / config.name)
    moments = random.Random(0)
    for k in range(KILLS):
        process = start(*words)
        if k % 2:  # early, or while runs are under way
            while process.poll() is None and not records(tmp_path / "broken"):
                time.sleep(0.01)
        time.sleep(moments.uniform(0, 2))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    process = start(*words)
    told = process.communicate()
    assert (process.returncode, told[1]) == (0, "")
    assert records(tmp_path / "broken") == records(tmp_path / "whole")
