"""The tasks of a new user, each in the fewest lines; every line below runs.

The tenth task, `flatlens reproduce fig1 --scale smoke`, runs in tests/reproduction.

A task is what the user writes beside a network, data and a training loop of their own. Commands of
the shell begin with `$`.
"""

import shlex
import sys
from importlib.util import find_spec

import matplotlib as mpl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl
from flatlens import cli

mpl.use("Agg")
MODULE = """
from torch import nn
def build(): return nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))
"""
FAST = "--model-options.widths [64,4,10] --steps 4 --measure every:2 --samples 4 --train-size 20 \
--evaluate 10"
TASKS = {
    "own network": """
m = fl.measure(net, loader, n=20)
print(m)
""",
    "two checkpoints": """
$ flatlens compare sgd.pt sam.pt --model mine:build --data digits --n 5 --figure compare.png
""",
    "own training loop": """
tracker = fl.Tracker(net, loader, n=20, run="runs/mnist", config={"lr": 0.1})
for step, (xb, yb) in enumerate(loader):
    loss = train_step(xb, yb)
    tracker(step, train_loss=loss)
""",
    "Lightning": """
from flatlens.track.lightning import TrackerCallback
callbacks = [TrackerCallback(fl.Tracker(net, loader, n=20, run="runs/lightning"))]
""",
    "Transformers": """
from flatlens.track.transformers import TrackerCallback
callbacks = [TrackerCallback(fl.Tracker(net, loader, n=20, run="runs/transformers"))]
""",
    "loggers": """
from flatlens.track.sinks import MLflow, TensorBoard, WandB
tracker = fl.Tracker(net, loader, n=20, sinks=[TensorBoard("tb")])  # or WandB(), MLflow()
tracker(0)
""",
    "sweep": f"""
$ flatlens sweep {FAST} --lr 0.1 0.2 --seeds 1 --workers 1 --out runs/sweep --quiet
""",
    "zoo": f"""
$ flatlens train {FAST} --out runs/trained --quiet
$ flatlens zoo --models runs/trained --n 4 --perturbations 0 --out zoo
""",
    "report": f"""
$ flatlens train {FAST} --out runs/trained --quiet
$ flatlens report runs
""",
}
NEEDS = {
    "Lightning": "lightning", "Transformers": "transformers", "loggers": "tensorboard",
    "sweep": "loky", "report": "plotly",
}  # fmt: skip
SLOW = ("Lightning", "Transformers", "sweep", "report", "loggers", "zoo")


def names(folder):
    """What a user has: a network, samples, a loader, a step of training, two checkpoints."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))
    x, y = torch.randn(40, 64), torch.randint(10, (40,))
    for name in ("sgd.pt", "sam.pt"):
        torch.save(net.state_dict(), folder / name)
    (folder / "mine.py").write_text(MODULE)
    loader = DataLoader(TensorDataset(x, y), 8)
    return {
        "fl": fl, "net": net, "x": x, "y": y, "loader": loader,
        "train_step": lambda xb, yb: nn.functional.cross_entropy(net(xb), yb),
    }  # fmt: skip


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=pytest.mark.slow if t in SLOW else ()) for t in TASKS]
)
def test_every_line_of_the_task_runs(task, tmp_path, monkeypatch, capsys):
    # looked for and not imported: flatlens makes these importable beside any torchvision
    if task in NEEDS and find_spec(NEEDS[task]) is None:
        pytest.skip(f"needs {NEEDS[task]}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    given = names(tmp_path)
    lines = TASKS[task].strip().splitlines()
    assert len(lines) <= 4
    if lines[0].startswith("$"):
        for line in lines:
            words = shlex.split(line.removeprefix("$ flatlens "))
            assert cli.main(words) in (0, None), (line, capsys.readouterr().err)
        assert list(tmp_path.iterdir())
        return
    exec("\n".join(lines), given)
    if "tracker" in given:
        assert given["tracker"].records[0]["step"] == 0
        given["tracker"].close()
    elif "m" in given:
        assert "sharpness" in capsys.readouterr().out
    else:
        assert len(given["callbacks"]) == 1
