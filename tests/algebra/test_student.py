"""Standard errors of means of squares, from few values."""

import sys
from pathlib import Path

import pytest

from flatlens.algebra.student import log_scale_error

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from coverage_of_intervals import coverage


@pytest.mark.slow
@pytest.mark.parametrize("directions", [2, 3, 4, 6, 8, 16, 32])
@pytest.mark.parametrize("dimensions", [1, 2, 10])
def test_intervals_cover_93_to_97_per_cent(directions, dimensions):
    assert 0.93 <= coverage(directions, dimensions, 8_000)[1] <= 0.97


def test_the_plain_error_covers_too_little_where_all_outputs_move_together():
    assert coverage(8, 1, 4_000)[0] < 0.88


def test_small_relative_errors_stay_as_they_are():
    assert log_scale_error(5.0, 5e-4, 32) == pytest.approx(5e-4, rel=2e-4)


@pytest.mark.parametrize(("value", "error"), [(0.0, 0.0), (2.0, 0.0), (0.0, 1.0)])
def test_nothing_to_correct(value, error):
    assert log_scale_error(value, error, 8) == error


def test_an_error_is_finite_for_two_very_different_values():
    assert log_scale_error(1.0, 1.0, 2) < float("inf")
