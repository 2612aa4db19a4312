"""Every tensor that flatlens makes is made on the device of the model.

The default device is set to "meta", whose tensors have no values, while model and samples are on
the CPU. A tensor that is made without a device then has no values either, and the number fails or
differs. The same mistake would fail on a GPU.
"""

import contextlib

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens import cli
from flatlens.passes.probing import refuse_without_float64


@contextlib.contextmanager
def meta_by_default():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Flatten(), nn.LazyLinear(4),
    ).double()  # fmt: skip


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(3, 1, 5, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 3)), layer, nn.Flatten(), nn.Linear(6, 4)).double()


NETWORKS = {"mlp": mlp, "conv": conv, "attention": attention}
MEASURED = {
    "exact": lambda net, x, y: fl.measure(net, x, y, method="exact").to_dict(),
    "sketch": lambda net, x, y: fl.measure(net, x, y, method="sketch", directions=4).to_dict(),
    "sharpness": lambda net, x, y: fl.measure(net, x, y, quantities="sharpness").to_dict(),
    "n": lambda net, x, y: fl.measure(net, x, y, n=3, seed=1).to_dict(),
    "cross entropy": lambda net, x, y: fl.measure(net, x, y, loss="cross_entropy").to_dict(),
    "all": lambda net, x, y: fl.measure(net, x, y, quantities="all").to_dict(),
    "tracker": lambda net, x, y: fl.Tracker(net, x, y, when=fl.every(1), n=4)(0).to_dict(),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, of vmap over attention
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("kind", NETWORKS)
def test_no_tensor_is_made_on_the_default_device(kind, name):
    torch.manual_seed(0)
    net = NETWORKS[kind]()
    x, y = torch.randn(6, 6).double(), torch.randint(4, (6,))
    net(x)  # gives lazy layers their shape
    net.eval()
    expected = MEASURED[name](net, x, y)
    with meta_by_default():
        got = MEASURED[name](net, x, y)
    assert got == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_a_device_without_float64_is_refused_in_one_sentence(capsys):
    with pytest.raises(fl.FlatlensError, match="the device mps has no float64"):
        refuse_without_float64(torch.device("mps"))
    assert cli.main(["measure", "mlp", "--data", "digits", "--device", "mps"]) == 2
    assert "mps has no float64" in capsys.readouterr().err
