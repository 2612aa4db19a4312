"""Try random command lines, records, configs, checkpoints and archives in this process.

    python tests/robustness/fuzz.py --cases 1000

A case is bad if a command does one of these:

- it prints a traceback;
- it ends with an unexpected error (exit code 1, with the hint to see the traceback);
- it prints more than one sentence of an error;
- it takes longer than 10 seconds of processor time, or a minute of wall time.

The table at the end has one row per kind of case.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SOURCE = Path(__file__).parents[2] / "src"
sys.path.insert(0, str(SOURCE))

import flatlens as fl  # noqa: E402
from flatlens import cli  # noqa: E402
from flatlens.cli.app import app  # noqa: E402
from flatlens.training import sweep as sweeps  # noqa: E402
from flatlens.training.config import Config  # noqa: E402
from flatlens.workers.engine import Engine  # noqa: E402

SECONDS = 10  # of processor time that a case may take
WALL = 60  # seconds that a case may take on a machine that is busy
HINT = "to see the traceback"  # part of the message of an unexpected error
TINY = {
    "model_options": {"widths": [64, 4, 10]}, "steps": 2, "measure": "end", "samples": 2,
    "train_size": 8, "evaluate": 4, "quantities": ["sharpness"], "checkpoint_every": 1,
}  # fmt: skip
WORDS = [
    *("--model-options.widths", "[64,4,10]", "--steps", "2", "--measure", "end", "--samples", "2"),
    *("--train-size", "8", "--evaluate", "4", "--quantities", "sharpness"),
]
COMMANDS = {
    "measure": ["torch.nn:Flatten", "--data", "digits", "--n", "2"],
    "train": ["--out", "run", *WORDS],
    "sweep": ["--out", "runs", *WORDS],
    "reproduce": ["--out", "results", "--no-train"],
    "report": ["stored"],
    "zoo": ["--models", "no_such_model", "--out", "zoo"],
}
# Options whose good values start long work.
LEFT_OUT = {"--engine", "--address", "--list", "--help", "--version", "--steps", "--threads"}

# -- values ----------------------------------------------------------------------------------

integers = st.one_of(st.integers(-3, 3), st.integers(), st.sampled_from([10**12, 2**63, 10**400]))
floats = st.floats(allow_nan=True, allow_infinity=True)
texts = st.one_of(
    st.text(max_size=12), st.sampled_from(["", "inf", "nan", "a\0b", "x" * 300, "../"])
)
scalars = st.one_of(st.none(), st.booleans(), integers, floats, texts)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
deep = st.integers(1, 60).map(lambda depth: json.loads("[" * depth + "]" * depth))
anything = values | deep


def word(hint: Any) -> st.SearchStrategy[str]:
    """Return words for an option: good ones, bad ones, and odd ones."""
    if get_args(hint) and all(isinstance(choice, str) for choice in get_args(hint)):
        return st.sampled_from(get_args(hint)) | texts
    good = st.integers(0, 3).map(str)
    return st.one_of(good, floats.map(str), texts, st.integers(-(10**30), 10**30).map(str))


def options(command: str) -> list[tuple[str, Any]]:
    """Return the options of a command with their types."""
    arguments = app[command].assemble_argument_collection()
    return [(a.name, a.hint) for a in arguments if a.parse and a.name.startswith("--")]


# -- kinds of cases --------------------------------------------------------------------------


@dataclass
class Bench:
    """The folder of a case, with a stored run, an archive and a measurement to damage."""

    stored: Path
    outcomes: dict[str, list[Any]] = field(default_factory=dict)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        before = Path.cwd()
        place = Path(tempfile.mkdtemp(dir=self.stored.parent))
        shutil.copytree(self.stored, place / "stored")
        os.chdir(place)
        try:
            yield place
        finally:
            os.chdir(before)
            shutil.rmtree(place, ignore_errors=True)


def command_line(draw: Any, _: Path) -> list[str]:
    """A command with a few options that hold anything."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    known = [(o, hint) for o, hint in options(command) if o not in LEFT_OUT]
    words = [command, *COMMANDS[command]]
    for option, hint in draw(st.lists(st.sampled_from(known), min_size=1, max_size=3)):
        words += [option] if hint is bool else [option, draw(word(hint)).replace("\0", "?")]
    return words


def records(draw: Any, place: Path) -> list[str]:
    """A run with a record that holds anything."""
    names = st.sampled_from(["step", "sharpness", "nmls", "train_loss", "eq12.lhs"]) | texts
    record = draw(st.dictionaries(names, anything, max_size=5))
    path = place / "stored/run/records.jsonl"
    line = json.dumps(record, default=str)
    path.write_text(path.read_text() + line + "\n")
    (place / "stored/run/done").unlink(missing_ok=True)
    return ["report", "stored", "-o", "page.html"]


def damaged_file(draw: Any, place: Path) -> list[str]:
    """A run, an archive or a checkpoint with flipped, cut or added bytes."""
    path = place / "stored" / draw(st.sampled_from(DAMAGED))
    content = bytearray(path.read_bytes())
    for _ in range(draw(st.integers(0, 4))):
        if content:
            content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    if draw(st.booleans()):
        del content[draw(st.integers(0, len(content))) :]
    content += draw(st.binary(max_size=20))
    path.write_bytes(content)
    if path.suffix == ".gz":
        return draw(st.sampled_from([["report", str(path)], ["reproduce", "--from", str(path)]]))
    if path.name == "measurement.json":
        return ["load", str(path)]
    train = ["train", "--config", "stored/config.toml", "--out", "stored/run"]
    return draw(st.sampled_from([train, ["report", "stored"], ["report", "stored", "--measure"]]))


DAMAGED = [
    *("run/records.jsonl", "run/config.json", "run/done", "run/checkpoint.safetensors"),
    *("records.jsonl.gz", "config.toml", "measurement.json"),
]


def config(draw: Any, place: Path) -> list[str]:
    """A config whose fields hold anything, as TOML or in a run folder."""
    names = st.sampled_from([f.name for f in fields(Config)]) | texts
    changes = draw(st.dictionaries(names, anything, min_size=1, max_size=3))
    changes.pop("threads", None)
    if draw(st.booleans()):
        lines = [
            f"{json.dumps(k)} = {json.dumps(v, default=str)}" for k, v in (TINY | changes).items()
        ]
        (place / "c.toml").write_text("\n".join(lines).replace("null", '"null"'))
        return ["train", "--config", "c.toml", "--out", "run", "--steps", "1"]
    path = place / "stored/run/config.json"
    content = json.loads(path.read_text())
    content["config"] |= changes
    path.write_text(json.dumps(content, default=str))
    return ["report", "stored", *draw(st.sampled_from([[], ["--measure"]]))]


def archive(draw: Any, place: Path) -> list[str]:
    """An archive of records with a record that holds anything."""
    path = place / "stored/records.jsonl.gz"
    names = st.sampled_from(["recipe", "run", "step", "steps", "lr", "model", "nmls"]) | texts
    line = json.dumps(RECORD | draw(st.dictionaries(names, anything, max_size=3)), default=str)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + line.encode() + b"\n"))
    return draw(st.sampled_from([["report", str(path)], ["reproduce", "--from", str(path)]]))


RECORD = {
    "recipe": "mlp",
    "run": "a",
    "step": 0,
    "steps": 5,
    "lr": 0.1,
    "model": "mlp",
    "nmls": 1.0,
}
KINDS: dict[str, Callable[[Any, Path], list[str]]] = {
    "command line": command_line,
    "records": records,
    "damaged file": damaged_file,
    "config": config,
    "archive": archive,
}

# -- running ---------------------------------------------------------------------------------


class HangError(BaseException):
    """The case took too long."""


def stop(*_: Any) -> None:
    raise HangError


def run(words: list[str]) -> str:
    """Run a command and return what is wrong with how it ended, or an empty text."""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            if words[0] == "load":
                with contextlib.suppress(fl.FlatlensError):
                    fl.Measurement.load(words[1])
                return ""
            code = cli.main(words)
    except HangError:
        return "hang"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    text = err.getvalue()
    if "Traceback" in text or HINT in text:
        return text
    if code == 2 and (text.count("\n") != 1 or not text.startswith("flatlens: ")):
        return f"exit code 2 with {text!r}"
    return "" if code in (0, 1, 2, 3) else f"exit code {code}"


@contextlib.contextmanager
def in_this_process(*_: Any, **__: Any) -> Iterator[Engine]:
    """An engine that runs each task at once."""

    def submit(function: Callable[..., Any], *words: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*words))
        return future

    yield Engine(submit, lambda futures: list(futures), 1, 0)


def prepare(place: Path) -> Path:
    """Write a run, an archive, a config and a measurement, which cases damage."""
    import torch

    stored = place / "prepared"
    stored.mkdir()
    lines = [
        f"{name} = {json.dumps(value)}" for name, value in TINY.items() if name != "model_options"
    ]
    (stored / "config.toml").write_text(
        "\n".join([*lines, "[model_options]", "widths = [64, 4, 10]"])
    )
    words = ["train", "--config", str(stored / "config.toml"), "--out", str(stored / "run"), "-q"]
    if cli.main(words) != 0:
        raise SystemExit("the prepared run cannot be trained")
    content = "".join(json.dumps(RECORD | {"step": k}) + "\n" for k in range(3))
    (stored / "records.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    fl.measure(torch.nn.Linear(3, 2), torch.ones(2, 3)).save(stored / "measurement.json")
    return stored


def main() -> int:
    """Run the cases and return 0 if all of them were good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9)
    given_words = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    sweeps.open_engine = in_this_process  # type: ignore[assignment]
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    bench = Bench(prepare(place))
    deadline = time.monotonic() + 60 * given_words.minutes
    counts = {kind: [0, 0, 0.0] for kind in KINDS}

    @seed(given_words.seed)
    @settings(
        max_examples=given_words.cases, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def attempt(data: Any) -> None:
        if time.monotonic() > deadline:
            return
        kind = data.draw(st.sampled_from(sorted(KINDS)))
        with bench.folder() as folder:
            words = KINDS[kind](data.draw, folder)
            before = time.process_time()
            fault = run(words)
        count = counts[kind]
        count[0] += 1
        count[2] = max(count[2], time.process_time() - before)
        if fault:
            count[1] += 1
            print(f"BAD {kind}: {words}\n{fault}", flush=True)

    attempt()
    print(
        "| kind of case | cases | bad | longest, seconds of processor time |\n|---|---:|---:|---:|"
    )
    for kind, (cases, bad, longest) in counts.items():
        print(f"| {kind} | {cases} | {bad} | {longest:.1f} |")
    total, wrong = (sum(count[k] for count in counts.values()) for k in (0, 1))
    print(f"{total} cases, {wrong} bad")
    shutil.rmtree(place, ignore_errors=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
