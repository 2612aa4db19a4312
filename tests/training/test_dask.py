"""Sweeps on a real Dask scheduler with two worker processes, all on 127.0.0.1."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from test_sweep import BASE, BROKEN_GRID, GRID, cells, records

from flatlens import FlatlensError
from flatlens.training import sweep as sweeps
from flatlens.training.sweep import SweepError, sweep
from flatlens.training.train import train
from flatlens.workers.dask import dask_engine

pytestmark = pytest.mark.slow

distributed = pytest.importorskip("distributed")

HERE = Path(__file__).parent
RESOURCES = {"GPU": 1}  # declared by the workers, taken by each run


def start(module: str, *words: object) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(map(str, (HERE.parents[1] / "src", HERE)))
    return subprocess.Popen(
        [sys.executable, "-m", f"distributed.cli.{module}", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of a scheduler with two workers, and the processes of the workers."""
    folder = tmp_path_factory.mktemp("dask")
    file = folder / "scheduler.json"
    words = ("--host", "127.0.0.1", "--port", 0, "--no-dashboard", "--scheduler-file", file)
    processes = [start("dask_scheduler", *words)]
    words = ("--scheduler-file", file, "--host", "127.0.0.1", "--nthreads", 1, "--no-nanny")
    words += ("--no-dashboard", "--local-directory", folder, "--resources", "GPU=1")
    try:
        while not file.exists():
            assert processes[0].poll() is None
            time.sleep(0.05)
        processes += [start("dask_worker", *words, "--name", name) for name in ("one", "two")]
        with distributed.Client(scheduler_file=str(file), set_as_default=False) as client:
            client.wait_for_workers(2, timeout=120)
            yield client.scheduler.address, processes[1:]
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    for config in cells(BASE, GRID):
        train(config, folder / config.name)
    return records(folder)


def test_workers_that_do_not_see_the_disk_send_the_files(tmp_path, monkeypatch, cluster, expected):
    monkeypatch.setattr(sweeps, "marked", lambda folder: nullcontext("a token that is nowhere"))
    address, _ = cluster
    out = tmp_path / "runs"
    options = {"out": out, "engine": "dask", "address": address, "resources": RESOURCES}
    frame = sweep(BASE, GRID, **options)
    assert records(out) == expected
    assert sorted(p.name for p in (out / next(iter(expected))).iterdir()) == [
        "checkpoint.safetensors", "config.json", "done", "lock", "records.jsonl"
    ]  # fmt: skip
    assert frame.groupby("run").size().tolist() == [3] * 4
    monkeypatch.setattr(sweeps, "open_engine", None)
    assert sweep(BASE, GRID, **options).equals(frame)  # nothing is done twice


def test_six_runs_one_raises_and_one_worker_is_killed(tmp_path, cluster):
    """Nothing is lost and nothing is doubled. (The last test: it leaves one worker.)"""
    address, workers = cluster
    base = replace(BASE, model="test_sweep:Fatal", model_options={"flag": f"{tmp_path}/flag"})
    grid = [BROKEN_GRID, {"seed": range(5)}]
    out = tmp_path / "runs"
    bad, *good = cells(base, grid)
    with pytest.raises(SweepError, match=f"1 of 6 runs failed: {bad.name} "):
        sweep(base, grid, out=out, engine="dask", address=address, resources=RESOURCES)
    # the flag tells that a worker died in the middle of a run
    assert (tmp_path / "flag").exists()
    assert [worker.wait(10) for worker in workers if worker.poll() is not None] == [-signal.SIGKILL]
    assert "divisible by groups" in (out / bad.name / "error.txt").read_text()
    for config in good:
        train(config, tmp_path / "alone" / config.name)
    assert records(out) == records(tmp_path / "alone")
    assert sorted(p.parent.name for p in out.glob("*/done")) == sorted(c.name for c in good)
    assert sorted(p.name for p in out.iterdir()) == sorted(c.name for c in (bad, *good))


def test_a_cluster_of_its_own(tmp_path, expected):
    sweep(BASE, GRID, out=tmp_path, engine="dask", workers=2)
    assert records(tmp_path) == expected


def test_no_scheduler_is_said(tmp_path):
    with pytest.raises(FlatlensError, match=r"No Dask scheduler answers at tcp://127.0.0.1:9"):
        sweep(BASE, GRID, out=tmp_path, engine="dask", address="tcp://127.0.0.1:9")


def test_without_dask_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(FlatlensError, match=r"pip install 'flatlens\[dask\]'"):
        sweep(BASE, GRID, out=tmp_path, engine="dask")


def test_ctrl_c_does_not_end_a_worker(capfd):
    """It reaches every process of a terminal; the driver decides when its workers stop."""
    with dask_engine(1, None, None) as engine:

        def worker_process() -> int:
            (future,) = engine.wait([engine.submit(os.getpid)])
            return future.result()

        process = worker_process()
        os.kill(process, signal.SIGINT)
        assert worker_process() == process
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_while_workers_start_ends_them_quietly(capfd):
    main = threading.get_ident()
    timer = threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt), dask_engine(2, None, None):
        time.sleep(30)
    assert "Traceback" not in capfd.readouterr().err
    assert not multiprocessing.active_children()
