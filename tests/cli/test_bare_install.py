"""The wheel without extras: every command works, or names the extra that it needs."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]
TINY = "--steps 2 --measure end --samples 3 --train-size 20 --evaluate 10 --quantities sharpness"
# command, exit code, words in the output or in the one sentence on standard error
COMMANDS = [
    ("demo --steps 3 --out figures --quiet", 0, ""),
    ("measure net:build --data digits --n 3", 0, "sharpness"),
    ("compare missing.json other.json", 2, "There is no file or folder missing.json"),
    (f"train --model-options.widths [64,4,10] {TINY} --out runs/a", 0, "sharpness"),
    ("sweep --seeds 2 --out runs/b", 2, "pip install 'flatlens[sweep]'"),
    ("sweep --seeds 2 --engine dask --out runs/c", 2, "pip install 'flatlens[dask]'"),
    ("reproduce fig1 --scale smoke --out smoke", 2, "pip install 'flatlens[sweep]'"),
    ("reproduce --from nothing.jsonl.gz --out redrawn", 2, "nothing.jsonl.gz"),
    ("zoo --models test_vit --random --images . --n 1", 2, "pip install"),
    ("report runs/a", 2, "pip install"),
    ("compare runs/a runs/a/config.json", 2, "is not a saved measurement"),
    ("data list", 0, "fashion-mnist"),
]
SCRIPT = """
import contextlib, io, json, sys
from flatlens.cli import main
results = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words.split())
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps([results, [name for name in ("loky", "distributed", "timm", "plotly")
                            if name in sys.modules]]))
"""


def core_distributions() -> list[str]:
    """List the distributions that an installation without extras brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names, todo = set(), list(project["dependencies"])
    while todo:
        need = Requirement(todo.pop())
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if name not in names:
            names.add(name)
            todo += distribution(name).requires or []
    return sorted(names)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the unpacked wheel and links to the core dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    build = "from hatchling.build import build_wheel; print(build_wheel('{}'))"
    done = subprocess.run(
        [sys.executable, "-c", build.format(folder)], cwd=ROOT, check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(folder)
    for name in core_distributions():
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            source, link = Path(str(package.locate_file(top))), folder / top
            if source.exists() and not link.exists():
                link.symlink_to(source)
    return folder


@pytest.mark.slow
def test_every_command_works_or_names_the_extra(site, tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(64, 10)\n"
    )
    words = json.dumps([command for command, _, _ in COMMANDS])
    done = subprocess.run(
        # no site-packages but ours: -S leaves out those of this environment
        [sys.executable, "-S", "-c", SCRIPT, words], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(site), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results, extras = json.loads(done.stdout.splitlines()[-1])
    assert extras == []
    for (command, code, expected), (got, out, err) in zip(COMMANDS, results, strict=True):
        assert got == code, (command, err)
        assert expected in (out if code == 0 else err), (command, out, err)
        assert err == "" if code == 0 else err.count("\n") == 1, (command, err)


@pytest.mark.slow
def test_the_wheel_installed_without_extras_runs_every_command(tmp_path):
    """As above, but with pip and an environment of its own."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "-c", ROOT / "constraints.txt", ROOT], capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("pip cannot reach an index with the pinned versions")
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(64, 10)\n"
    )
    variables = {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for command, code, expected in COMMANDS:
        done = subprocess.run(
            [environment / "bin" / "flatlens", *command.split()], cwd=tmp_path, env=variables,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == code, (command, done.stderr)
        assert expected in (done.stdout if code == 0 else done.stderr), command
        assert code == 0 or done.stderr.count("\n") == 1, (command, done.stderr)
