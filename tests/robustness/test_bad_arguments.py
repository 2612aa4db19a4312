"""Every argument of every public function: a wrong type is one sentence that names the argument."""

import inspect

import bad_values
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import flatlens as fl
from flatlens import figures, penalties, perturb
from flatlens.data.datasets import load
from flatlens.report import report
from flatlens.runs import Run
from flatlens.training.config import Config
from flatlens.training.measure_run import measure_run
from flatlens.training.train import train

NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
Y = torch.tensor([0, 1, 0, 1])
ON_DATA = {"model": NET, "x": X}
ON_LOSS = {**ON_DATA, "y": Y}
FRAME = pd.DataFrame({"run": ["a"], "step": [1]})


def of_module(module, name):
    """A function on a network, with as many arguments as it needs."""
    function = getattr(module, name)
    names = inspect.signature(function).parameters
    valid = ON_LOSS if "y" in names else ON_DATA
    return function, {"lr": 0.1, **valid} if next(iter(names)) == "lr" else valid


# The public functions, with arguments that they take.
FUNCTIONS = {
    "measure": (fl.measure, ON_DATA),
    "probe": (fl.probe, ON_DATA),
    "sketch": (fl.sketch, ON_DATA),
    **{name: of_module(perturb, name) for name in perturb.__all__ if name != "Estimate"},
    **{name: of_module(fl, name) for name in ("spectrum", "representations") if hasattr(fl, name)},
    "sharpness_penalty": (penalties.sharpness_penalty, ON_DATA),
    "sensitivity_penalty": (penalties.sensitivity_penalty, ON_DATA),
    "every": (fl.every, {"k": 2}),
    "log_spaced": (fl.log_spaced, {"per_decade": 2}),
    "at": (fl.at, {"steps": [1]}),
    "on_interpolation": (fl.on_interpolation, {"threshold": 0.1}),
    "Tracker": (fl.Tracker, {**ON_DATA, "when": fl.every(2)}),
    "read_runs": (fl.read_runs, {"folder": "nowhere"}),
    "Run.open": (Run.open, {"folder": "a"}),
    "sweep": (fl.sweep, {"base": {}, "grid": {"lr": [0.1]}, "out": "runs"}),
    "train": (train, {"config": Config(), "folder": "runs"}),
    "measure_run": (measure_run, {"folder": "nowhere"}),
    "report": (report, {"runs": "nowhere"}),
    "load": (load, {"name": "digits"}),
    "figures.trends": (figures.trends, {"df": FRAME}),
    "figures.tightness": (figures.tightness, {"df": FRAME}),
    "figures.correlations": (figures.correlations, {"df": FRAME}),
    "figures.zoo": (figures.zoo, {"df": FRAME}),
    "figures.save": (figures.save, {"figure": Figure(), "path": "a"}),
}
# Arguments with rows of their own, in tests/measurement/test_arguments.py.
ELSEWHERE = {("measure", "quantities"), ("measure", "loss")}
# Functions that do real work on a valid value: only wrong types are tried on them.
AT_WORK = {"sweep", "train", "Run.open", "figures.save"}


def parameters(name):
    function, _ = FUNCTIONS[name]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation is not parameter.empty and (name, parameter.name) not in ELSEWHERE:
            hint = parameter.annotation
            yield parameter.name, hint if isinstance(hint, str) else hint.__name__


def table(values_of, leave_out=()):
    return [
        pytest.param(name, argument, value, id=f"{name}-{argument}-{bad_values.label(value)}")
        for name in FUNCTIONS
        if name not in leave_out
        for argument, annotation in parameters(name)
        for value in values_of(annotation)
    ]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(error):
    """The message, which is one line of moderate length."""
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 2_000
    return str(error)


@pytest.mark.parametrize(("name", "argument", "value"), table(bad_values.wrong_values))
def test_a_wrong_type_names_the_argument(name, argument, value, folder):
    function, valid = FUNCTIONS[name]
    with pytest.raises(fl.FlatlensError) as error:
        function(**{**valid, argument: value})
    assert argument in refusal(error.value)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("name", "argument", "value"), table(bad_values.odd_values, AT_WORK))
def test_an_odd_value_works_or_is_one_sentence(name, argument, value, folder):
    function, valid = FUNCTIONS[name]
    try:
        function(**{**valid, argument: value})
    except fl.FlatlensError as error:
        refusal(error)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_missing_or_unknown_argument_is_one_sentence(name):
    function, valid = FUNCTIONS[name]
    with pytest.raises((fl.FlatlensError, TypeError), match="no_such_argument"):
        function(**valid, no_such_argument=1)


def test_every_public_function_is_in_the_table():
    functions = {n for n in fl.__all__ if inspect.isfunction(getattr(fl, n))}
    of_a_probe = {n for n in functions if "p" in inspect.signature(getattr(fl, n)).parameters}
    assert functions - of_a_probe - set(FUNCTIONS) == {"compare"}
