"""Messages read as a person would write them: one thing is singular, types are plain words."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.arguments import typed_arguments
from flatlens.errors import counted


@pytest.mark.parametrize(
    ("hint", "sentence"),
    [
        (int | None, "value=... is not a whole number or None"),
        (int | float, "value=... is not a number"),
        (Sequence[str | int], "value=... is not a list of texts or whole numbers"),
        (Sequence[str | int] | None, "value=... is not a list of texts or whole numbers, or None"),
        (str | Path | None, "value=... is not a text, a path or None"),
        (Sequence[Sequence[float]], "value=... is not a list of lists of numbers"),
        (Mapping[str, int], "value=... is not a mapping"),
        (Callable[[], int], "value=... is not a function"),
        (fl.Inequality, "value=... is not an Inequality"),
    ],
)
def test_a_type_is_described_in_words(hint, sentence):
    def take(value):
        return value

    take.__annotations__["value"] = hint
    with pytest.raises(fl.FlatlensError) as error:
        typed_arguments(take)(...)
    assert str(error.value).replace("Ellipsis", "...") == sentence


def test_one_is_singular():
    assert [counted(n, "inequality") for n in (0, 1, 2)] == [
        "0 inequalities", "1 inequality", "2 inequalities",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def smallest():
    torch.manual_seed(0)
    return fl.measure(nn.Linear(1, 1), torch.ones(1, 1))


def test_the_smallest_network_is_printed_in_the_singular(smallest):
    first_line = str(smallest).splitlines()[0]
    assert first_line.startswith("1 sample, 1 input, 1 output, 1 layer, float32.")
    assert "<summary>1 layer</summary>" in smallest._repr_html_()


def test_a_sum_over_one_sample_says_so(smallest):
    m = fl.measure(nn.Linear(2, 1, bias=False), torch.zeros(1, 2))
    assert "gets a zero input in 1 sample" in m["eq11"].why
    assert "sample(s)" not in m.table() + smallest.table()
