"""Strict JSON for any number: both directions give the same bits."""

import json
import math

import numpy as np
import pytest
import torch

from flatlens import FlatlensError
from flatlens.files.plain_json import dumps, from_plain, to_plain

NUMBERS = [0.1, 1e-310, -0.0, 2.0**70, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("form", [float, np.float64, lambda v: np.array([v])])
def test_numbers_come_back_bit_for_bit(number, form):
    text = dumps({"value": form(number)})
    value = from_plain(json.loads(text, parse_constant=pytest.fail))["value"]
    value = value[0] if isinstance(value, list) else value
    assert np.float64(value).tobytes() == np.float64(number).tobytes()


def test_containers_and_numpy_scalars():
    value = {"a": (1, np.int64(2), np.bool_(True)), "b": {"c": [None, "x", np.float32(0.5)]}}
    assert to_plain(value) == {"a": [1, 2, True], "b": {"c": [None, "x", 0.5]}}
    assert to_plain(np.zeros((2, 0))) == [[], []]
    with pytest.raises(FlatlensError, match="Tensor cannot be written"):
        to_plain(torch.ones(2))


@pytest.mark.parametrize(
    ("value", "words"),
    [({1: 2}, "key 1"), ({"a": {1, 2}}, "type set"), (1j, "type complex"), ([b""], "type bytes")],
)
def test_what_json_cannot_hold_is_refused(value, words):
    with pytest.raises(FlatlensError, match=words):
        dumps(value)
