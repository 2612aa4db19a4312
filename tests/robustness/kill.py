"""Kill commands at random moments and check that nothing is lost and nothing is left behind.

    python tests/robustness/kill.py --kills 100

Each case starts a command in a fresh folder, sends one signal at a random moment, waits for the
end, and starts the same command again. The second run must succeed. Its files must have the same
bytes as those of an undisturbed run. No process, temporary file or lock may stay behind, and no
traceback may be printed. The table at the end has one row per command and target. Use --log to keep
the outcome of every case, and --minutes to stop early.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
MARK = "FLATLENS_KILL_CASE"  # environment variable that every process of a case inherits
PATIENCE = 300  # seconds that a command may take to end; a busy machine needs more
ORPHANS = 20  # seconds for the workers to follow their driver
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
TINY = [
    *("--model-options.widths", "[64,8,10]", "--train-size", "100", "--evaluate", "50"),
    *("--steps", "200", "--measure", "every:10", "--samples", "5", "--checkpoint-every", "20"),
    *("--quantities", "sharpness", "nmls", "--quiet"),
]


def fetch(words: list[str]) -> int:
    """Run ``flatlens data fetch`` on a data set of one archive on a server of this machine."""
    from flatlens.cli import _run
    from flatlens.cli.guard import guarded

    def command(_: object) -> object:
        from flatlens.data.published import PUBLISHED, Published

        base, archive, *files = words
        checksums = dict(file.split("=") for file in files)
        PUBLISHED["kill"] = Published("numbers", checksums, base, {"kill.tar.gz": archive})
        return _run(["data", "fetch", "kill"])

    return guarded(command, [])


def call(words: list[str]) -> int:
    """Run a command in this process."""
    if words[0] == "fetch":
        return fetch(words[1:])
    from flatlens.cli import main

    return main(words)


@dataclass(frozen=True)
class Command:
    """A command that can be killed and started again.

    Args:
        words: the words after ``flatlens``, in the folder of the case.
        results: patterns of the files that must be the same after a kill.
        targets: who can be killed.
        share: number of kills out of 100.
    """

    words: list[str]
    results: tuple[str, ...]
    targets: tuple[str, ...] = ("driver", "group")
    share: int = 10


@dataclass(frozen=True)
class Outcome:
    """What one kill did; every count but `same` should be 0."""

    command: str
    target: str
    signal: str
    moment: float
    code: int | None
    same: bool
    orphans: int
    files: int
    tracebacks: int
    note: str = ""

    @property
    def good(self) -> bool:
        return self.same and not (self.orphans or self.files or self.tracebacks)


def commands(place: Path, address: str, checksums: list[str]) -> dict[str, Command]:
    """Return the commands, with what they need prepared below `place`."""
    sweep = ["sweep", "--out", "out", "--lr", "0.05", "0.1", "--workers", "2", *TINY]
    everyone = ("driver", "worker", "group")
    records = ("out/**/records.jsonl",)
    zoo = [
        *("zoo", "--models", "test_vit", "test_resnet", "--random", "--images"),
        *(str(place / "images"), "--n", "2", "--directions", "2", "--perturbations", "0"),
        *("--out", "out", "--workers", "1", "--max-se", "1000", "--quiet"),
    ]
    figure = ("--figure", "compare.png")
    reproduce = ["reproduce", "h8", "--scale", "smoke", "--out", "out", "--workers", "1"]
    table = {
        "train": Command(["train", "--out", "out/run", *TINY], records, share=30),
        "sweep (local)": Command(sweep, records, everyone, 20),
        "sweep (Dask)": Command([*sweep, "--engine", "dask"], records, everyone, 10),
        "zoo": Command(zoo, records, everyone, 6),
        "reproduce": Command(
            [*reproduce, "--quiet"], (*records, "out/claims.json", "out/*.gz"), everyone, 6
        ),
        "data fetch": Command(
            ["fetch", address, *checksums], ("cache/flatlens/kill/**/*.bin",), share=10
        ),
        "report": Command(
            ["report", str(place / "runs"), "-o", "report.html", "--quiet"],
            ("report.html",),
            share=12,
        ),
    }
    from flatlens.cli.app import app

    if "compare" in app:
        runs = [str(run) for run in sorted((place / "runs").iterdir())[:2]]
        table["compare"] = Command(["compare", *runs, *figure], ("compare.png",), share=5)
    return table


def environment(folder: Path, case: str) -> dict[str, str]:
    """Return the variables of a case: folders of its own for caches and temporary files."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    own = {
        "PYTHONPATH": str(SOURCE), "TMPDIR": str(temporary), MARK: case, "NO_PROXY": "127.0.0.1",
        "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "FLATLENS_DATA": "",
        "MPLCONFIGDIR": str(folder.parent / "matplotlib"), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    return {**os.environ, **own}


def start(command: Command, folder: Path, case: str, cold: bool) -> Process:
    """Start a command in its own process group; its output goes into files.

    Args:
        command: what to start.
        folder: its current folder.
        case: a name that all its processes carry.
        cold: start a new interpreter, so that its imports can be killed too. Otherwise the process
            is a fork of this one, which has imported everything.
    """
    if cold:
        path = f"import sys; sys.path.append({str(HERE)!r})"
        code = f"{path}; import kill; sys.exit(kill.call(sys.argv[1:]))"
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("ab") as err:
            return subprocess.Popen(
                [sys.executable, "-c", code, *command.words], cwd=folder,
                env=environment(folder, case), stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    code = 70
    try:
        prepare_fork(folder, case)
        code = call(command.words)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prepare_fork(folder: Path, case: str) -> None:
    """Reset a forked process to the state of a new one."""
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment(folder, case))
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open("stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    err = os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(err, 2)
    warnings.simplefilter("ignore")


class Forked:
    """A forked process with the methods of `subprocess.Popen` that are used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.01)
        return self.code or 0


Process = subprocess.Popen[bytes] | Forked


def members(case: str) -> list[psutil.Process]:
    """Return the living processes of a case, wherever they are."""
    living = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == case and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def workers(driver: int) -> list[psutil.Process]:
    """Return the worker processes of a driver, without the tracker of shared memory."""
    with contextlib.suppress(psutil.Error):
        return [
            child
            for child in psutil.Process(driver).children(recursive=True)
            if "resource_tracker" not in " ".join(child.cmdline())
        ]
    return []


def strike(process: Process, target: str, name: str, draw: random.Random) -> str:
    """Send the signal and return who got it, because a worker may not exist yet or any more."""
    number = getattr(signal, name)
    with contextlib.suppress(ProcessLookupError, psutil.Error):
        there = workers(process.pid) if target == "worker" else []
        if there:
            draw.choice(there).send_signal(number)
            return "worker"
        if target == "group":
            os.killpg(process.pid, number)
            return "group"
        os.kill(process.pid, number)
    return "driver"


def results(folder: Path, command: Command) -> dict[str, bytes]:
    """Return the content of the files that a command promises."""
    files = {path for pattern in command.results for path in folder.glob(pattern)}
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def leftovers(folder: Path) -> list[str]:
    """Return the temporary files that a finished command should not leave."""
    names = [path for path in folder.rglob("*") if "matplotlib" not in path.parts]
    ours = [p for p in names if p.name.startswith(".flatlens-unfinished") or p.suffix == ".part"]
    ours += [p for p in (folder / "tmp").iterdir() if "flatlens" in p.name]
    return [str(path.relative_to(folder)) for path in ours]


def end_of(process: Process) -> int | None:
    """Wait for a process and return its exit code, or None if it hangs; then it is killed."""
    try:
        return process.wait(float(os.environ.get("FLATLENS_KILL_PATIENCE", PATIENCE)))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def orphans_of(case: str) -> int:
    """Return how many processes of a case outlive their driver, and end them."""
    deadline = time.monotonic() + ORPHANS
    while (living := members(case)) and time.monotonic() < deadline:
        time.sleep(0.3)
    for process in living:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(living)


def undisturbed(
    name: str, command: Command, place: Path, cold: bool
) -> tuple[dict[str, bytes], float]:
    """Run a command without a kill; return its files and its duration."""
    folder = place / f"undisturbed {name} {cold}"
    folder.mkdir()
    before = time.monotonic()
    code = end_of(start(command, folder, f"{os.getpid()}-{name}", cold))
    duration = time.monotonic() - before
    files = results(folder, command)
    if code != 0 or (command.results and not files):
        raise SystemExit(f"{name} ended with {code}: {(folder / 'stderr').read_text()[-500:]}")
    return files, duration


def kill_once(
    name: str,
    command: Command,
    expected: dict[str, bytes],
    moment: float,
    draw: random.Random,
    place: Path,
    cold: bool,
) -> Outcome | None:
    """Kill a command once, start it again, and compare; None if it ended before the kill."""
    case = f"{os.getpid()}-{time.monotonic_ns()}"
    folder = Path(tempfile.mkdtemp(dir=place))
    sent = draw.choice(SIGNALS)
    process = start(command, folder, case, cold)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(moment)
        return None
    target = strike(process, draw.choice(command.targets), sent, draw)
    code = end_of(process)
    orphans = orphans_of(case)
    again = end_of(start(command, folder, case, cold=False))
    orphans += orphans_of(case)
    same = again == 0 and results(folder, command) == expected
    left = leftovers(folder)
    errors = (folder / "stderr").read_text(errors="replace")
    note = "" if same else f"second run: {again}; {errors.strip()[-300:]}"
    note += f" left: {left}" if left else ""
    tracebacks = errors.count("Traceback (most recent call last)")
    note += f" {errors.strip()[-300:]}" if tracebacks else ""
    outcome = Outcome(
        name, target, sent, round(moment, 2), code, same, orphans, len(left), tracebacks, note
    )
    if outcome.good:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


# -- what the commands need ------------------------------------------------------------------


class SlowFiles(SimpleHTTPRequestHandler):
    """Serve files slowly, so that a download lasts long enough to be killed."""

    def log_message(self, *_: object) -> None:
        pass

    def copyfile(self, source: object, outputfile: object) -> None:
        with contextlib.suppress(ConnectionError):
            while block := source.read(1 << 16):  # type: ignore[attr-defined]
                outputfile.write(block)  # type: ignore[attr-defined]
                time.sleep(0.02)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine and yield its address."""
    handler = functools.partial(SlowFiles, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def prepare(place: Path) -> list[str]:
    """Write images, runs to report on and an archive to fetch; return the archive's checksums."""
    import hashlib
    import io
    import tarfile

    import numpy as np
    from PIL import Image

    from flatlens.runs import Run

    (place / "images").mkdir()
    for k in range(4):
        Image.new("RGB", (32, 32), (60 * k, 100, 20)).save(place / "images" / f"{k:03}_a.png")
    for lr in (0.05, 0.1):
        with Run.open(place / "runs" / f"lr{lr}", {"model": "mlp", "lr": lr, "steps": 40}) as run:
            for step in range(0, 41, 10):
                run.append({"step": step, "sharpness": 1 + lr * step, "nmls": 2 - lr * step})
            run.finish()
    (place / "served").mkdir()
    numbers = np.random.default_rng(0)
    checksums = []
    with tarfile.open(place / "served" / "kill.tar.gz", "w:gz") as tar:
        for name in ("a.bin", "b.bin"):
            content = numbers.bytes(2_000_000)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            checksums.append(f"{name}=sha256:{hashlib.sha256(content).hexdigest()}")
    archive = hashlib.sha256((place / "served" / "kill.tar.gz").read_bytes()).hexdigest()
    return [f"sha256:{archive}", *checksums]


def import_everything() -> None:
    """Import what the commands import, so that a fork starts at once."""
    with contextlib.suppress(ImportError):
        from flatlens.training import timm_models

        timm_models.timm()
        import distributed  # noqa: F401
        import loky  # noqa: F401
        import plotly.offline  # noqa: F401


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a Markdown table, one row per command and target."""
    lines = [
        "| command | target | kills | same bytes | orphans | temporary files | tracebacks |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    pairs = dict.fromkeys((o.command, o.target) for o in sorted(outcomes, key=lambda o: o.command))
    for command, target in [*pairs, ("all", "")]:
        some = [
            o for o in outcomes if command == "all" or (o.command, o.target) == (command, target)
        ]
        counts = [
            len(some), *(sum(getattr(o, name) for o in some) for name in
            ("same", "orphans", "files", "tracebacks")),
        ]  # fmt: skip
        lines.append(f"| {command} | {target} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def plan(names: dict[str, Command], kills: int, draw: random.Random) -> list[str]:
    """Return the command of each case, in a random order, so that an early end is fair."""
    total = sum(command.share for command in names.values())
    chosen = [n for n, c in names.items() for _ in range(max(1, round(kills * c.share / total)))]
    draw.shuffle(chosen)
    return chosen


def main() -> int:
    """Run the test and return 0 if every case was good."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", type=float, default=0.2, help="share of new interpreters")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--only", nargs="*", help="names of commands")
    parser.add_argument("--log", type=Path, help="file that gets one JSON line per case")
    given = parser.parse_args()
    for name in ("SIGINT", "SIGHUP"):  # a run in the background starts with these ignored
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    draw, deadline = random.Random(given.seed), time.monotonic() + 60 * given.minutes
    sys.path.insert(0, str(SOURCE))
    place = Path(tempfile.mkdtemp(prefix="kill-"))
    outcomes: list[Outcome] = []
    note: Callable[[str], None] = functools.partial(print, flush=True)
    checksums = prepare(place)
    import_everything()
    with served(place / "served") as address:
        all_commands = commands(place, address, checksums)
        chosen = {n: c for n, c in all_commands.items() if not given.only or n in given.only}
        expected: dict[tuple[str, bool], tuple[dict[str, bytes], float]] = {}
        queue = plan(chosen, given.kills, draw)
        while queue and time.monotonic() < deadline:
            name, cold = queue[-1], draw.random() < given.cold
            if (name, cold) not in expected:
                expected[name, cold] = undisturbed(name, chosen[name], place, cold)
                note(f"{name}: {expected[name, cold][1]:.1f} s undisturbed, cold {cold}")
            files, duration = expected[name, cold]
            moment = draw.uniform(0.02, duration)
            outcome = kill_once(name, chosen[name], files, moment, draw, place, cold)
            if outcome is None:  # it ended before the kill
                continue
            queue.pop()
            outcomes.append(outcome)
            note(f"{len(outcomes)} {'good' if outcome.good else 'BAD'} {asdict(outcome)}")
            if given.log:
                with given.log.open("a") as log:
                    log.write(json.dumps(asdict(outcome)) + "\n")
    note(table(outcomes))
    bad = sum(not outcome.good for outcome in outcomes)
    note(
        f"{len(outcomes)} kills, {bad} bad" + (f"; their folders are below {place}" if bad else "")
    )
    if not bad:
        shutil.rmtree(place, ignore_errors=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
