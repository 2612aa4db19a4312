"""Weights as people save them are found, and nothing else of a file is ever used."""

import argparse
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flatlens.errors import FlatlensError
from flatlens.training.weight_files import load_weights


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def state():
    torch.manual_seed(3)
    return network().state_dict()


def prefixed(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.items()}


FORMS = {
    "plain": lambda s: s,
    "net": lambda s: {"net": s, "acc": 91.5, "epoch": 3},
    "model": lambda s: {"model": s, "optimizer": {"state": {}, "lr": 0.1}},
    "model_state_dict": lambda s: {"model_state_dict": s, "epoch": 3},
    "nested": lambda s: {"checkpoint": 1, "model": {"state_dict": s}},
    "the_only_one": lambda s: {"my_weights": s, "epoch": 3},
    "data_parallel": lambda s: {"net": prefixed(s, "module.")},
    "compiled_parallel": lambda s: prefixed(s, "module._orig_mod."),
    "lightning": lambda s: {
        "state_dict": {**prefixed(s, "model."), "loss.weight": torch.ones(2)},
        "hyper_parameters": argparse.Namespace(lr=0.1),
        "pytorch-lightning_version": "2.5",
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_found_as_people_save_them(tmp_path, state, form):
    torch.save(FORMS[form](state), tmp_path / "weights.pt")
    net = network()
    load_weights(net, tmp_path / "weights.pt")
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("key", ["ema", "state_dict.teacher"])
def test_a_key_chooses_among_several(tmp_path, state, key):
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    both = {**prefixed(zeros, "student."), **prefixed(state, "teacher.")}
    torch.save({"state_dict": both, "ema": state}, tmp_path / "weights.ckpt")
    net = network()
    load_weights(net, tmp_path / "weights.ckpt", key)
    assert torch.equal(net[0].weight, state["0.weight"])
    with pytest.raises(FlatlensError, match=r"several networks \(student, teacher\); name one"):
        load_weights(net, tmp_path / "weights.ckpt")
    with pytest.raises(FlatlensError, match="has no key 'nobody'"):
        load_weights(net, tmp_path / "weights.ckpt", "nobody")


def test_a_key_of_a_safetensors_file_is_a_prefix(tmp_path, state):
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    save_file({**prefixed(zeros, "a."), **prefixed(state, "b.")}, tmp_path / "w.safetensors")
    net = network()
    load_weights(net, tmp_path / "w.safetensors", "b")
    assert torch.equal(net[2].bias, state["2.bias"])


class Hostile:
    def __init__(self, function, argument):
        self.call = function, (argument,)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [eval, exec])
def test_code_in_a_file_is_never_run(tmp_path, state, function):
    mark = tmp_path / "ran"
    note = Hostile(function, f"open({str(mark)!r}, 'w')")
    torch.save({"state_dict": state, "note": note}, tmp_path / "weights.pt")
    net = network()
    load_weights(net, tmp_path / "weights.pt")
    assert torch.equal(net[0].weight, state["0.weight"])
    assert not mark.exists()


def test_a_command_in_a_file_is_refused(tmp_path, state):
    mark = tmp_path / "ran"
    torch.save({"net": state, "note": Hostile(os.system, f"touch {mark}")}, tmp_path / "weights.pt")
    with pytest.raises(FlatlensError, match="may run code"):
        load_weights(network(), tmp_path / "weights.pt")
    assert not mark.exists()


def test_a_placeholder_is_no_weight(tmp_path, state):
    broken = {**state, "0.bias": argparse.Namespace()}
    torch.save(broken, tmp_path / "weights.pt")
    with pytest.raises(FlatlensError, match=r"not a tensor: 0\.bias"):
        load_weights(network(), tmp_path / "weights.pt")


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "weights.pt")
    with pytest.raises(FlatlensError, match="not a regular file"):
        load_weights(network(), tmp_path / "weights.pt")


@pytest.mark.slow
def test_timm_is_never_given_a_file(tmp_path, monkeypatch):
    """Old versions of timm unpickle files; they get tensors instead."""
    timm_models = pytest.importorskip("flatlens.training.timm_models")
    try:
        timm = timm_models.timm()
    except FlatlensError:
        pytest.skip("needs timm")
    real, seen = timm.create_model, {}

    def create(name, **options):
        seen.update(options["pretrained_cfg_overlay"])
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
        return real(name, **options)

    state = real("test_vit").state_dict()
    torch.save({"state_dict": prefixed(state, "module.")}, tmp_path / "test_vit.pth")
    monkeypatch.setattr(timm, "create_model", create)
    model = timm_models.build("test_vit", str(tmp_path))
    assert list(seen) == ["state_dict"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
