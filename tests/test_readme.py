"""The code of the README runs, and prints what the README says it prints."""

import contextlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest

from flatlens import cli

pytestmark = pytest.mark.slow

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```\n```text\n(.*?)```", re.S)
COMMAND = re.compile(r"```sh\nflatlens (.*?)\n```\n```text\n(.*?)```", re.S)
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]\d+)?")


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_python_blocks_print_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs flatlens[lightning]")
    namespace: dict = {}
    blocks = BLOCK.findall(README)
    assert len(blocks) == README.count("```python")
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        same(printed.getvalue(), shown)


def same(printed: str, shown: str) -> None:
    """The same words, and numbers up to rounding."""
    assert [NUMBER.sub("0", word) for word in printed.split()] == [
        NUMBER.sub("0", word) for word in shown.split()
    ]
    for a, b in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        assert float(a) == pytest.approx(float(b), rel=2e-3)


def test_the_sweep_prints_what_is_shown_and_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ((command, shown),) = COMMAND.findall(README)
    words = shlex.split(command)
    assert words[0] == "sweep"
    for _ in range(2):  # the second time nothing is left to do
        assert cli.main(words) == 0
        same(capsys.readouterr().out, shown)
    runs = list((tmp_path / "runs" / "digits").iterdir())
    assert len(runs) == len(list((tmp_path / "runs" / "digits").glob("*/done"))) == 4


def test_the_essentials_stand_in_the_first_forty_lines():
    top = "\n".join(README.splitlines()[:40])
    for needed in ("make demo", "make test", "pip install", "fl.measure", "```text", "demo.png"):
        assert needed in top
