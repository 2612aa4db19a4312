"""The benchmark of large networks runs on tiny ones, and states its aims. Nothing here is timed."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
if not FOLDER.exists():
    pytest.skip("benchmarks are not part of the package", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import large  # noqa: E402


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the imports
def test_both_estimates_of_a_tiny_gpt2_agree_within_their_errors():
    pytest.importorskip("transformers")
    pytest.importorskip("curvlinops")
    ours, theirs = (large.measured("gpt2", s, 8, True) for s in ("flatlens", "curvlinops"))
    error = abs(ours["value"] - theirs["value"])
    assert error < 5 * (ours["error"] + theirs["error"])
    assert theirs["value"] > 0
    assert ours["model"] == theirs["model"] > 0


def record(side, **values):
    numbers = {"seconds": 2.0, "peak": 100, "model": 50, "value": 1.0, "error": 0.1}
    return {"network": "gpt2", "side": side, **numbers, **values}


def test_aims_compare_at_the_same_standard_error():
    ours = record("flatlens", seconds=1.0, error=0.2, peak=50)
    assert large.aims([ours, record("curvlinops")]) == [
        "gpt2: trace at the error of curvlinops: time 2.00, memory 0.50 of curvlinops"
    ]


def test_a_side_that_failed_is_a_line_of_text():
    failed = {"network": "gpt2", "side": "curvlinops", "failure": "MemoryError"}
    assert large.line(failed).endswith("MemoryError")
    assert large.aims([failed, record("flatlens")]) == []
