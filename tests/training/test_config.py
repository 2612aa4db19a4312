"""The frozen config of a run: one plain form, refusals that name the field, stable names."""

import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from itertools import islice

import numpy as np
import pytest

from flatlens import FlatlensError
from flatlens.training.config import Config, due_steps
from flatlens.training.options import chosen, options
from flatlens.training.schedule import MeasureSchedule

DEEP: dict = {}
for _ in range(5_000):
    DEEP = {"a": DEEP}
BAD = {
    "model": [3, "", "a\0b"],
    "model_options": ["relu", {1: 2}, {"a": object()}, {"a": float("nan")}, DEEP, {"a": 10**400}],
    "data": [None],
    "data_options": [[1]],
    "classes": ["01", [], [0.5], [-1], 3],
    "train_size": [0, 1.0, "all"],
    "loss": ["mse"],
    "label_smoothing": [-0.1, 1.0, "much"],
    "optimizer": ["lion"],
    "lr": [10**400, 10**5000, 0, -1.0, float("nan"), float("inf"), 1e300, "fast", True],
    "lr_schedule": ["step", None, 3],
    "momentum": [1.0, -0.5],
    "rho": [0.0],
    "penalty": ["sharpness", "sharpness:0", "sharpness:-1", "flatness:1", "sensitivity:nan", 3],
    "weight_decay": [-0.1, float("nan"), "much"],
    "augment": ["rotate", True, ""],
    "batch_size": [0, 2.5, 10**23],
    "steps": [0, True, "many"],
    "seed": [-1, 10**23, 1.5, 2.0, "1.5", 10**5000],
    "measure": [
        "every:0",
        "sometimes",
        "log",
        "at:",
        0,
        [1, -2],
        2.5,
        "log:9999999999",
        "every:" + "9" * 400,
        "at:" + "9" * 5000,
        10**5000,
    ],
    "samples": [0],
    "quantities": [[], 3, ["mls", 3]],
    "evaluate": [0],
    "checkpoint_every": [0],
    "snapshots": ["yes", 1],
    "device": [0],
    "dtype": ["float16"],
    "threads": [0, 10**6],
}


def test_every_field_has_a_bad_value_here():
    assert list(BAD) == [f.name for f in fields(Config)]


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(k, v, id=f"{k}-{n}") for k, bad in BAD.items() for n, v in enumerate(bad)],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(FlatlensError, match=rf"The field {name} is .*must be"):
        Config.from_dict({name: value})


def test_a_bad_value_is_refused_by_the_constructor_too():
    with pytest.raises(FlatlensError, match=r"The field lr is -1.0, but it must be a positive"):
        Config(lr=-1.0)


def test_one_plain_form():
    config = Config.from_dict(
        {
            "model_options": {"widths": [64, 10]},
            "classes": np.array([1, 0]),
            "lr": 1,
            "seed": np.int64(3),
            "measure": [5, 0, 5],
            "quantities": "mls",
        }
    )
    assert config.model_options == {"widths": (64, 10)}
    assert (config.classes, config.lr, config.seed) == ((1, 0), 1.0, 3)
    assert (config.measure, config.quantities) == ("at:0,5", ("mls",))
    assert {Config.from_dict({"measure": m}).measure for m in (50, "50")} == {"every:50"}
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)
    with pytest.raises(FrozenInstanceError):
        config.lr = 2.0  # type: ignore[misc]


def test_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "vgg"\nclasses = [0, 1]\n[model_options]\nwidths = [1, 2]\n')
    assert Config.from_toml(path) == Config(
        model="vgg", classes=(0, 1), model_options={"widths": (1, 2)}
    )
    path.write_text("learning_rate = 1\n")
    with pytest.raises(FlatlensError, match=r"Unknown field 'learning_rate' in .*run.toml"):
        Config.from_toml(path)
    path.write_text("lr 1\n")
    with pytest.raises(FlatlensError, match=r"run.toml is not TOML"):
        Config.from_toml(path)
    with pytest.raises(FlatlensError, match=r"none.toml: No such file"):
        Config.from_toml(tmp_path / "none.toml")


HOSTILE_TOML = {
    "is not TOML": "lr = ",
    "nested too deeply": "model_options = " + "[" * 10_000 + "]" * 10_000,
    "levels": "model_options = " + "[" * 40 + "]" * 40,
    "beyond 64 bits": "seed = " + "9" * 400,
    "is not TOML: Exceeds": "seed = " + "9" * 5_000,
    "The field seed is 1.5": "seed = 1.5",
    "The field lr is '0.1'": 'lr = "0.1"',
}


@pytest.mark.parametrize("words", HOSTILE_TOML)
def test_hostile_toml_is_refused_in_one_sentence(tmp_path, words):
    (tmp_path / "run.toml").write_text(HOSTILE_TOML[words])
    with pytest.raises(FlatlensError) as caught:
        Config.from_toml(tmp_path / "run.toml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_toml_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "run.toml")
    with pytest.raises(FlatlensError, match="not a regular file"):
        Config.from_toml(tmp_path / "run.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(FlatlensError, match="is not TOML"):
        Config.from_toml(tmp_path / "bytes.toml")


ARCHIVED = {
    "mlp-fashion-mnist-sgd-lr0.05-b20-seed0-0f42aa88": Config(
        data="fashion-mnist",
        train_size=1_000,
        lr=0.05,
        steps=50_000,
        measure="every:1000",
        quantities=("default", "relative_flatness", "bound_authors", "d_authors"),
    ),
    "vgg-cifar10-sgd-lr0.05-b20-seed0-48ba550c": Config(
        model="vgg",
        data="cifar10",
        classes=(0, 1),
        lr=0.05,
        steps=200_000,
        measure="every:2000",
    ),
}


@pytest.mark.parametrize("name", ARCHIVED)
def test_names_of_published_runs_stay(name):
    """As in docs/reproduction/records.jsonl.gz."""
    assert ARCHIVED[name].name == name


def test_the_name_stands_for_what_records_depend_on():
    config = Config(model="pkg.nets:Wide", data="npz:/some/file.npz", lr=0.25)
    assert config.name.startswith("Wide-npz-sgd-lr0.25-b20-seed0-")
    assert replace(config, checkpoint_every=7).name == config.name
    for changed in ({"steps": 3}, {"data": "npz:/other.npz"}, {"loss": "half_squared"}):
        assert replace(config, **changed).name != config.name


def test_the_name_is_the_same_in_every_process():
    code = (
        "from flatlens.training.config import Config;"
        "print(Config(model_options=dict(a=1, b=[2])).name)"
    )
    command = [sys.executable, "-c", code]
    names = {
        subprocess.run(
            command,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert names == {Config(model_options={"b": (2,), "a": 1}).name}


@pytest.mark.parametrize(
    ("measure", "steps", "due"),
    [
        ("every:4", 10, [0, 4, 8, 10]),
        ("every:5", 10, [0, 5, 10]),
        ("every:99", 10, [0, 10]),
        ("log:1", 1_000, [0, 1, 10, 100, 1_000]),
        ("log:1", 999, [0, 1, 10, 100, 999]),
        ("log:3", 1, [0, 1]),
        ("at:2,3,11", 10, [2, 3, 10]),
        ("end", 10, [10]),
    ],
)
def test_schedules(measure, steps, due):
    assert due_steps(measure, steps) == due


@pytest.mark.slow
def test_log_spaced_steps_are_those_of_the_tracker():
    from flatlens.track.schedules import log_spaced

    when = log_spaced(7)
    assert due_steps("log:7", 3_000)[:-1] == [s for s in range(3_000) if when(s)]


@pytest.mark.parametrize("measure", ["every:7", "log:1", "log:3", "log:50", "log:1000", "at:0,3,9"])
def test_a_schedule_decides_each_step_as_its_list_does(measure):
    schedule = MeasureSchedule(measure, 3_000)
    assert [step for step in range(3_001) if step in schedule] == list(schedule)


def test_a_schedule_of_a_trillion_steps_is_lazy():
    for measure in ("every:1", "log:1000"):
        schedule = MeasureSchedule(measure, 10**12)
        assert list(islice(schedule, 3)) == [0, 1, 2]
        assert 10**12 in schedule
        assert 10**12 + 1 not in schedule


@pytest.mark.parametrize("many", [False, True])
def test_every_field_is_an_option_with_its_help(many):
    made = options("Options", many)
    assert [f.name for f in fields(made)] == [f.name for f in fields(Config)]
    assert all(f.type.__metadata__[0].help for f in fields(made))
    assert chosen(made()) == {}
    assert chosen(made(model_options={"widths": "[3, 2]", "activation": "tanh"})) == {
        "model_options": {"widths": [3, 2], "activation": "tanh"}
    }
