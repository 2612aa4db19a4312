"""The code of the README runs, and prints what the README says it prints."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```\n```text\n(.*?)```", re.S)
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
        got, want = printed.getvalue().split(), shown.split()
        assert [NUMBER.sub("0", word) for word in got] == [NUMBER.sub("0", word) for word in want]
        for a, b in zip(NUMBER.findall(" ".join(got)), NUMBER.findall(shown), strict=True):
            assert float(a) == pytest.approx(float(b), rel=2e-3)


def test_the_essentials_stand_in_the_first_forty_lines():
    top = "\n".join(README.splitlines()[:40])
    for needed in ("make demo", "make test", "pip install", "fl.measure", "```text", "demo.png"):
        assert needed in top
