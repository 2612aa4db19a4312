"""The scripts of examples/ run, and their numbers say what the tutorials say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_measure_network():
    m = example("measure_network").main(epochs=30)
    assert m["eq12"].verdict == "theorem"
    assert m["eq12"].holds


def test_sam_is_flatter_and_less_sensitive():
    table = example("compare_checkpoints").main(steps=200).to_pandas()
    for name in ("sharpness", "mls", "nmls"):
        assert table["sam"][name] < table["sgd"][name]


def test_follow_training(tmp_path):
    frame = example("follow_training").main(tmp_path / "run", steps=20)
    assert list(frame["step"]) == [0, 1, 2, 3, 6, 10, 18]
    assert frame["train_loss"].notna().all()


def test_read_verdicts():
    rows = example("read_verdicts").main()
    assert [row.verdict for row in rows.values()] == ["theorem", "observation", "observation"]
    assert [row.holds for row in rows.values()] == [True, True, False]


def test_own_quantity():
    values = example("own_quantity").main()
    assert 1 <= values["stable_rank"] <= values["local_dimension"] <= 10


def test_every_example_is_run_here():
    text = Path(__file__).read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f'example("{script.stem}")' in text


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_used_by_a_tutorial(script):
    assert len(script.read_text().splitlines()) <= 60
    pages = (EXAMPLES.parent / "docs" / "tutorials").glob("*.md")
    assert any(f"examples/{script.name}" in page.read_text() for page in pages)
