"""Training: the optimisers against loops written out, records, and what survives kill -9."""

import copy
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import flatlens as fl
from flatlens import FlatlensError, cli
from flatlens.data.datasets import load
from flatlens.runs import Run, read_runs
from flatlens.training.ascent import ascend
from flatlens.training.config import Config
from flatlens.training.direct_sgd import is_plain_chain
from flatlens.training.samples import Part
from flatlens.training.state import TrainingState
from flatlens.training.steps import batches, learning_rate, make_optimizer, make_step
from flatlens.training.train import train

KILLS = int(os.environ.get("FLATLENS_KILLS", "20")) * 4 // 5  # the other fifth: test_sweep
SMALL = Config(
    model_options={"widths": (64, 12, 10)},
    steps=60,
    measure="every:20",
    samples=10,
    train_size=130,  # no multiple of the batch: the last one of an epoch is smaller
    checkpoint_every=7,
)


class Noisy(nn.Module):
    """Everything with a state of its own: BatchNorm buffers, random numbers, tied weights."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.3)
        self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.drop(torch.relu(self.norm(self.first(x))))))


NOISY = replace(SMALL, model="test_train:Noisy", model_options={}, optimizer="adam", lr=0.01)


def content(folder: Path) -> tuple[bytes, dict[str, torch.Tensor]]:
    return (folder / "records.jsonl").read_bytes(), load_file(folder / "checkpoint.safetensors")


def assert_same(a: Path, b: Path) -> None:
    """The same records byte for byte, the same final state bit for bit."""
    (records, state), (records_b, state_b) = content(a), content(b)
    assert records == records_b
    assert state.keys() == state_b.keys()
    assert all(torch.equal(state[key], state_b[key]) for key in state)


# --- the order of the data


def test_an_epoch_is_a_permutation_and_any_step_can_be_the_first():
    whole = batches(130, 20, seed=3, start=0)
    order = [next(whole) for _ in range(21)]
    assert [len(b) for b in order[:7]] == [20] * 6 + [10]
    epochs = [torch.cat(order[k : k + 7]) for k in (0, 7, 14)]
    assert all(torch.equal(epoch.sort().values, torch.arange(130)) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    for start in (1, 6, 7, 20):
        assert torch.equal(next(batches(130, 20, seed=3, start=start)), order[start])
    assert not torch.equal(next(batches(130, 20, seed=4, start=0)), order[0])


# --- what a step does, against loops written out


def by_hand(config: Config, rule) -> list[torch.Tensor]:
    """The weights after a loop over single parameters; `rule` makes one step of all of them."""
    data = load("digits")
    torch.manual_seed(config.seed)
    widths = config.model_options["widths"]
    net = nn.Sequential(nn.Linear(*widths[:2]), nn.ReLU(), nn.Linear(*widths[1:])).double()
    weights = [p.detach().clone().requires_grad_() for p in net.parameters()]
    order = batches(config.train_size, config.batch_size, config.seed, 0)
    eye = torch.eye(10, dtype=torch.float64)

    def gradient(w, index):
        x, t = data.x_train[index].double(), eye[data.y_train[index]]
        f = torch.relu(x @ w[0].T + w[1]) @ w[2].T + w[3]
        return torch.autograd.grad(((f - t) ** 2).sum() / (10 * len(index)), w)

    state: dict = {}
    for t in range(1, config.steps + 1):
        index = next(order)
        weights = [
            w.detach().requires_grad_()
            for w in rule(config, weights, lambda w, i=index: gradient(w, i), state, t)
        ]
    return weights


def sgd(config, weights, gradient, state, t):
    return [w - config.lr * g for w, g in zip(weights, gradient(weights), strict=True)]


def momentum(config, weights, gradient, state, t):
    speed = state.setdefault("v", [0.0] * len(weights))
    for k, g in enumerate(gradient(weights)):
        speed[k] = 0.9 * speed[k] + g
    return [w - config.lr * v for w, v in zip(weights, speed, strict=True)]


def adam(config, weights, gradient, state, t):
    m, v = (state.setdefault(key, [0.0] * len(weights)) for key in "mv")
    new = []
    for k, (w, g) in enumerate(zip(weights, gradient(weights), strict=True)):
        m[k], v[k] = 0.9 * m[k] + 0.1 * g, 0.999 * v[k] + 0.001 * g**2
        root = (v[k] / (1 - 0.999**t)).sqrt()
        new.append(w - config.lr * m[k] / (1 - 0.9**t) / (root + 1e-8))
    return new


def sam(config, weights, gradient, state, t, scale=torch.ones_like):
    g = gradient(weights)
    T = [scale(w.detach()) for w in weights]
    norm = sum(((a * b) ** 2).sum() for a, b in zip(T, g, strict=True)).sqrt()
    worst = [
        (w + config.radius * a**2 * b / norm).detach().requires_grad_()
        for w, a, b in zip(weights, T, g, strict=True)
    ]
    return [w - config.lr * g for w, g in zip(weights, gradient(worst), strict=True)]


def asam(config, weights, gradient, state, t):
    return sam(config, weights, gradient, state, t, scale=lambda w: w.abs() + 0.01)


@pytest.mark.parametrize("rule", [sgd, momentum, adam, sam, asam])
def test_optimisers_do_what_their_papers_say(tmp_path, rule):
    config = replace(SMALL, optimizer=rule.__name__, dtype="float64", steps=25, measure="end")
    train(config, tmp_path / "run")
    state = load_file(tmp_path / "run" / "checkpoint.safetensors")
    names = ("1.weight", "1.bias", "3.weight", "3.bias")
    expected = by_hand(config, rule)
    for name, w in zip(names, expected, strict=True):
        torch.testing.assert_close(state[f"network.{name}"], w.detach(), rtol=1e-9, atol=1e-11)


def chain_with_image_inputs():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))


def chain_of_every_activation():
    kinds = nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.Identity
    layers = [module for kind in kinds for module in (nn.Linear(12, 12), kind())]
    return nn.Sequential(nn.Flatten(), nn.Tanh(), *layers, nn.Linear(12, 3), nn.Sigmoid())


def chain_without_biases():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))


def chain_whose_linear_layers_see_three_axes():
    return nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(24, 3), nn.Identity())


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(
    "build",
    [
        chain_with_image_inputs,
        chain_of_every_activation,
        chain_without_biases,
        chain_whose_linear_layers_see_three_axes,
    ],
)
def test_sgd_on_a_chain_makes_the_steps_of_torchs_sgd(build, schedule, decay):
    torch.manual_seed(0)
    network = build().double()
    assert is_plain_chain(network)
    other = copy.deepcopy(network)
    part = Part(torch.randn(20, 6, 2).double(), torch.zeros(20), torch.randn(20, 3).double())
    config = Config(lr=0.2, lr_schedule=schedule, weight_decay=decay, steps=10)
    step = make_step(network, make_optimizer(network, config), part, config)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.2, weight_decay=decay)
    for number, index in enumerate(torch.arange(20).split(4), 1):
        loss = nn.functional.mse_loss(other(part.x[index]), part.targets[index])
        optimizer.param_groups[0]["lr"] = learning_rate(config, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(index, number), loss.detach(), rtol=1e-12, atol=0)
    assert all(p.grad is None for p in network.parameters())
    for a, b in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", ["sam", "asam"])
def test_sam_on_a_chain_makes_the_steps_of_an_optimiser(rule):
    torch.manual_seed(0)
    network = chain_without_biases().double()
    hooked = copy.deepcopy(network)
    hooked[1].register_forward_hook(lambda *_: None)  # changes nothing, and leaves it to torch
    part = Part(torch.randn(20, 6, 2).double(), torch.zeros(20), torch.randn(20, 3).double())
    config = Config(optimizer=rule, lr=0.2, weight_decay=0.3, rho=0.4, steps=10)
    for number, index in enumerate(torch.arange(20).split(4), 1):
        losses = [
            make_step(net, make_optimizer(net, config), part, config)(index, number)
            for net in (network, hooked)
        ]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for a, b in zip(network.parameters(), hooked.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def with_a_hook():
    network = chain_with_image_inputs()
    network[1].register_forward_hook(lambda *_: None)
    return network


def with_weight_norm():
    network = chain_with_image_inputs()
    nn.utils.parametrizations.weight_norm(network[1])
    return network


def with_one_layer_twice():
    layer = nn.Linear(12, 12)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer)


def with_tied_weights():
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.Linear(12, 12))
    network[2].weight = network[1].weight
    return network


def with_a_frozen_layer():
    network = chain_with_image_inputs()
    network[1].requires_grad_(False)
    return network


def with_an_activation_in_place():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.SiLU(inplace=True), nn.Linear(5, 3))


def with_an_approximate_gelu():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.GELU("tanh"), nn.Linear(5, 3))


def with_batch_norm():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5))


@pytest.mark.parametrize(
    "build",
    [
        with_a_hook,
        with_weight_norm,
        with_one_layer_twice,
        with_tied_weights,
        with_a_frozen_layer,
        with_an_activation_in_place,
        with_an_approximate_gelu,
        with_batch_norm,
        nn.Sequential,
        Noisy,
    ],
)
def test_other_networks_are_left_to_the_optimiser(build):
    assert not is_plain_chain(build())


@pytest.mark.parametrize("adaptive", [False, True], ids=["sam", "asam"])
def test_the_ascent_is_the_same_in_pieces(adaptive):
    """Large tensors in two memory formats, a single number, and one without a gradient."""
    torch.manual_seed(0)
    shapes = [(300, 500), (1, 70_000), (700, 16, 3, 3), (), (5,)]
    weights = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    weights[2].data = weights[2].data.contiguous(memory_format=torch.channels_last)
    for w in weights[:-1]:
        w.grad = torch.randn_like(w)
    before = [w.detach().clone() for w in weights]
    T = [w.abs() + 0.01 if adaptive else torch.ones_like(w) for w in before[:-1]]
    g = [w.grad for w in weights[:-1]]
    norm = torch.cat([(a * b).flatten() for a, b in zip(T, g, strict=True)]).norm()
    worst = [torch.empty_like(w) for w in before]
    ascend(weights, worst, 0.3, adaptive)
    for w, old, a, b in zip(worst, before, T, g, strict=False):
        torch.testing.assert_close(w, old + 0.3 * a**2 * b / norm, rtol=1e-12, atol=1e-14)
    assert torch.equal(worst[-1], before[-1])
    assert all(torch.equal(w, old) for w, old in zip(weights, before, strict=True))


def test_a_step_that_fails_at_the_worst_point_leaves_the_weights():
    state = TrainingState.start(replace(SMALL, optimizer="sam"))
    before = [p.detach().clone() for p in state.network.parameters()]
    passes = itertools.count()

    def fail_at_the_second_pass(*_):
        if next(passes) == 1:
            raise RuntimeError("out of memory")

    state.network.register_forward_pre_hook(fail_at_the_second_pass)
    with pytest.raises(RuntimeError, match="out of memory"):
        state.step_function()(torch.arange(5), 1)
    assert all(
        torch.equal(p, old) for p, old in zip(state.network.parameters(), before, strict=True)
    )


def test_a_cosine_schedule_sets_the_rate_of_every_step():
    config = replace(
        SMALL, optimizer="momentum", lr=0.2, lr_schedule="cosine", steps=20, dtype="float64"
    )
    by_config = TrainingState.start(config)
    by_torch = TrainingState.start(replace(config, lr_schedule="constant"))
    rise = [min(1.0, k / 2) for k in range(1, 21)]  # a tenth of 20 steps
    fall = [0.5 * (1 + math.cos(math.pi * max(0, k - 2) / 19)) for k in range(1, 21)]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        by_torch.optimizer, lambda k: rise[min(k, 19)] * fall[min(k, 19)]
    )
    index = torch.arange(10)
    optimizer_step = by_torch.optimizer.step
    rates, one = [], by_config.step_function()
    net = by_torch.network
    for k in range(1, 21):
        one(index, k)
        rates.append(by_config.optimizer.param_groups[0]["lr"])
        by_torch.optimizer.zero_grad()
        F.mse_loss(net(by_torch.train.x[index]), by_torch.train.targets[index]).backward()
        optimizer_step()
        schedule.step()
    assert rates == pytest.approx([0.2 * a * b for a, b in zip(rise, fall, strict=True)])
    assert rates[-1] > 0
    for p, q in zip(by_config.network.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)


# --- losses


@pytest.mark.parametrize(
    ("loss", "smoothing", "expected"),
    [
        ("mean_squared", 0.0, lambda f, y: ((f - F.one_hot(y, 10)) ** 2).sum() / (10 * len(y))),
        ("half_squared", 0.0, lambda f, y: ((f - F.one_hot(y, 10)) ** 2).sum() / (2 * len(y))),
        ("cross_entropy", 0.0, lambda f, y: -f.log_softmax(1)[range(len(y)), y].mean()),
        ("half_squared", 0.2, lambda f, y: ((f - soft(y)) ** 2).sum() / (2 * len(y))),
        ("cross_entropy", 0.2, lambda f, y: -(soft(y) * f.log_softmax(1)).sum(1).mean()),
    ],
)
def test_losses_and_their_averages(loss, smoothing, expected):
    config = replace(SMALL, loss=loss, label_smoothing=smoothing, dtype="float64")
    state = TrainingState.start(config)
    index = torch.arange(9)
    f = state.network(state.train.x[index])
    wanted = expected(f, state.train.y[index])
    torch.testing.assert_close(state.step_function()(index, 1), wanted.detach(), rtol=1e-12, atol=0)


def soft(y):
    return 0.8 * F.one_hot(y, 10).double() + 0.02


def test_targets_stay_ten_dimensional_with_two_classes(tmp_path):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 64)).astype(np.float32), np.arange(40) % 2
    np.savez(tmp_path / "two.npz", x=x, y=y)
    config = replace(SMALL, data=f"npz:{tmp_path}/two.npz", train_size=None, steps=1)
    records = train(config, tmp_path / "run")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    target = F.one_hot(torch.from_numpy(y), 10).float()
    expected = (net(torch.from_numpy(x)) - target).square().mean().item()
    assert records["train_loss"][0] == pytest.approx(expected, rel=1e-6)
    assert "test_loss" not in records  # there is no test part
    assert "generalization_gap" not in records


@pytest.mark.slow
def test_float_targets_have_losses_and_no_accuracy(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {k: generator.normal(size=(30, 64 if k[0] == "x" else 10)) for k in ("x", "y")}
    arrays |= {f"{k}_test": v[:7] for k, v in arrays.items()}
    np.savez(tmp_path / "floats.npz", **arrays)
    config = replace(SMALL, data=f"npz:{tmp_path}/floats.npz", train_size=None)
    records = train(config, tmp_path / "run")
    smoothed = train(replace(config, label_smoothing=0.5), tmp_path / "smoothed")
    assert smoothed.equals(records)  # there are no labels to smooth
    assert records["train_loss"].iloc[-1] < records["train_loss"].iloc[0]
    assert "loss_gap" in records
    assert "train_accuracy" not in records


@pytest.mark.slow
def test_float_targets_without_a_test_part(tmp_path):
    generator = np.random.default_rng(0)
    for name, y in (("column", (30,)), ("table", (30, 1))):
        arrays = {"x": generator.normal(size=(30, 64)), "y": generator.normal(size=y)}
        np.savez(tmp_path / f"{name}.npz", **arrays)
        config = replace(
            SMALL,
            data=f"npz:{tmp_path}/{name}.npz",
            model_options={"widths": (64, 12, 1)},
            train_size=None,
        )
        records = train(config, tmp_path / name)
        assert records["train_loss"].iloc[-1] < records["train_loss"].iloc[0]
        assert "test_loss" not in records


class Complex(nn.Module):
    """Complex weights, real outputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 10, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


class ComplexBuffer(nn.Module):
    """Real weights, a complex table."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.register_buffer("turns", torch.ones(10, dtype=torch.complex64))

    def forward(self, x):
        return (self.linear(x) * self.turns).abs()


@pytest.mark.parametrize("name", ["Complex", "ComplexBuffer"])
def test_a_complex_network_is_refused(tmp_path, name):
    config = replace(SMALL, model=f"test_train:{name}", model_options={})
    with pytest.raises(FlatlensError, match=r"has complex numbers \(torch.complex64\)"):
        train(config, tmp_path / "run")


# --- records


@pytest.mark.slow
def test_records_say_what_measure_and_a_plain_evaluation_say(tmp_path):
    config = replace(SMALL, steps=40, measure="at:0,30", evaluate=50)
    records = train(config, tmp_path / "run").to_dict("records")
    assert [r["step"] for r in records] == [0, 30, 40]
    data = load("digits")
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    state = load_file(tmp_path / "run" / "checkpoint.safetensors")
    net.load_state_dict({name: state[f"network.{name}"] for name in net.state_dict()})
    m = fl.measure(net, data.x_train[:10], data.y_train[:10]).to_dict()
    last = records[-1]
    assert {name: last[name] for name in m} == m
    loss, right = {}, {}
    for part, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        f = net(x[:50])
        loss[part] = (f - F.one_hot(y[:50], 10)).square().mean().item()
        right[part] = 100 * (f.argmax(1) == y[:50]).double().mean().item()
        assert last[f"{part}_loss"] == pytest.approx(loss[part], rel=1e-6)
        assert last[f"{part}_accuracy"] == pytest.approx(right[part], abs=1e-9)
    assert last["generalization_gap"] == pytest.approx(right["train"] - right["test"])
    assert last["loss_gap"] == pytest.approx(loss["test"] - loss["train"], rel=1e-4)
    frame = read_runs(tmp_path)
    assert frame["step"].tolist() == [0, 30, 40]
    assert set(frame["lr"]) == {0.1}


def test_quantities_can_be_chosen(tmp_path):
    records = train(replace(SMALL, steps=1, quantities=("mls", "nmls")), tmp_path / "run")
    assert {"mls", "nmls", "train_loss"} <= set(records)
    assert "sharpness" not in records


def test_variants_of_the_authors_bring_what_they_need(tmp_path):
    settings = replace(SMALL, steps=1, quantities=("mls", "bound_authors"))
    few = train(settings, tmp_path / "few")
    settings = replace(settings, quantities=("default", "bound_authors"))
    whole = train(settings, tmp_path / "whole")
    got, want = few["bound_authors"].tolist(), whole["bound_authors"].tolist()
    assert got == pytest.approx(want, rel=1e-6)
    assert min(got) > 0
    assert {"eq12.rhs", "eq37.lhs", "sharpness_untied"} <= set(whole)
    assert "eq12.rhs" not in few


@pytest.mark.slow
def test_measuring_and_checkpoints_change_nothing(tmp_path):
    train(replace(NOISY, measure="end"), tmp_path / "a")
    train(replace(NOISY, measure="every:3", checkpoint_every=2), tmp_path / "b")
    a, b = content(tmp_path / "a"), content(tmp_path / "b")
    assert all(torch.equal(a[1][key], b[1][key]) for key in a[1])
    assert a[0].splitlines()[-1] == b[0].splitlines()[-1]


def test_the_callers_threads_and_random_numbers_stay(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    train(replace(NOISY, steps=1, measure="end", threads=2), tmp_path / "run")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_num_threads(), signal.getsignal(signal.SIGINT))


# --- stopped and started again


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    train(NOISY, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", ["append", "checkpoint"])
@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_failure_while_writing_loses_nothing(tmp_path, monkeypatch, unbroken, method, when):
    real, calls = getattr(Run, method), []

    def failing(*arguments):
        calls.append(0)
        if len(calls) == when:
            raise OSError("no space left")
        real(*arguments)

    monkeypatch.setattr(Run, method, failing)
    with pytest.raises(OSError, match="no space"):
        train(NOISY, tmp_path / "run")
    train(NOISY, tmp_path / "run")
    assert_same(tmp_path / "run", unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["all", "last", "changed", "file"])
def test_a_finished_run_that_lost_records_is_trained_again(tmp_path, unbroken, lost):
    shutil.copytree(unbroken, tmp_path / "run")
    records = tmp_path / "run" / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    contents = {"last": lines[:-1], "changed": [lines[0].replace(b"1", b"2"), *lines[1:]]}
    records.write_bytes(b"".join(contents.get(lost, [])))
    if lost == "file":
        records.unlink()
    with pytest.warns(UserWarning, match=r"records.jsonl is damaged: .*trained again"):
        train(NOISY, tmp_path / "run")
    assert_same(tmp_path / "run", unbroken)
    train(NOISY, tmp_path / "run")  # without a warning


@pytest.mark.slow
def test_a_torn_line_is_computed_again(tmp_path, unbroken):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "finish", lambda _: os.kill(os.getpid(), 0))
        train(NOISY, tmp_path / "run")
    assert not (tmp_path / "run" / "done").exists()
    (tmp_path / "run" / "checkpoint.safetensors").unlink()  # so that all is repeated
    records = tmp_path / "run" / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-40])
    train(NOISY, tmp_path / "run")
    assert_same(tmp_path / "run", unbroken)


@pytest.mark.slow
def test_control_c_finishes_the_step_and_keeps_it(tmp_path, monkeypatch, unbroken):
    real = TrainingState.record

    def interrupted(self, step):
        if step == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, step)

    monkeypatch.setattr(TrainingState, "record", interrupted)
    config = replace(NOISY, checkpoint_every=1_000)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run")
    with Run.open(tmp_path / "run") as run:
        assert [r["step"] for r in run.records] == [0, 20]
        assert run.restore()[1] == {"step": 20}
    train(config, tmp_path / "run")
    assert_same(tmp_path / "run", unbroken)


def test_a_finished_run_is_read_not_repeated(tmp_path, monkeypatch):
    first = train(SMALL, tmp_path / "run")
    monkeypatch.setattr(TrainingState, "start", None)
    assert train(SMALL, tmp_path / "run").equals(first)


def test_another_config_is_refused_and_changes_nothing(tmp_path):
    train(SMALL, tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(FlatlensError, match=r"lr=0.1, not 0.2"):
        train(replace(SMALL, lr=0.2), tmp_path / "run")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def slow_enough(folder: Path) -> None:
    """What the killed processes run: half a second of training, with much writing."""
    train(replace(NOISY, steps=100, measure="every:5", checkpoint_every=7), folder)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_records(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    context = multiprocessing.get_context("forkserver")  # imports torch once, not at every start
    context.set_forkserver_preload(["test_train", "pandas", "flatlens.measurement"])
    duration = -1.0
    for _ in range(2):  # the second time the server is there
        began = time.monotonic()
        process = context.Process(target=slow_enough, args=(tmp_path / f"whole{duration}",))
        process.start()
        process.join()
        assert process.exitcode == 0
        whole, duration = tmp_path / f"whole{duration}", time.monotonic() - began
    broken, moments, stops = tmp_path / "broken0", random.Random(0), 0
    for k in range(KILLS):
        process = context.Process(target=slow_enough, args=(broken,))
        process.start()
        process.join(moments.uniform(0, duration))
        if process.exitcode is None:
            stops += 1
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        if (broken / "done").exists():  # as far as it can go: killed enough, the next one
            assert_same(broken, whole)
            broken = tmp_path / f"broken{k + 1}"
    slow_enough(broken)
    assert_same(broken, whole)
    assert stops > 0  # how many depends on the machine


# --- refusals and the command line

REFUSED = {
    "Unknown model 'nosuch'": {"model": "nosuch"},
    "Unknown data 'nosuch'": {"data": "nosuch"},
    "train_size is 1001, but digits has only 1,000": {"train_size": 1001},
    "samples is 200, but there are only 130": {"samples": 200},
    "input of shape [1, 64]": {"model": "lenet", "model_options": {}},
    "the class 9, but the network only the outputs 0 to 4": {"model_options": {"widths": (64, 5)}},
    "outputs of shape [n, N]": {
        "model": "torch.nn:Unflatten",
        "model_options": {"dim": 1, "unflattened_size": (8, 8)},
    },
    "no parameters to train": {"model": "torch.nn:Identity", "model_options": {}},
    "diverged: its loss is": {"lr": 1e6},
    "quantities has the unknown name 'love'": {"quantities": ("love",)},
    "device 'abacus'": {"device": "abacus"},
    "device 'meta'": {"device": "meta"},
    "1.weight of the model mlp has shape [0, 64]": {"model_options": {"widths": (64, 0, 10)}},
    "classes takes a whole number, not (0, 1)": {
        "data": "synthetic:gaussians",
        "classes": (0, 1),
    },
    "mlp needs a depth from 1 to 10,000, got 100000000": {
        "model_options": {"widths": (64, 12, 10), "depth": 10**8}
    },
    "mlp with these options would need about": {"model_options": {"widths": (64, 10**9, 10**9)}},
    "data would need about": {"data": "synthetic:teacher", "data_options": {"n": 10**12}},
    "given classes twice": {"classes": (0, 1), "data_options": {"classes": 2}},
    "batch of one sample (Expected more than 1 value per channel": {
        "model": "test_train:Noisy",
        "model_options": {},
        "train_size": 121,
    },
}
if not torch.cuda.is_available():
    REFUSED["device 'cuda'"] = {"device": "cuda"}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(tmp_path, reason):
    with pytest.raises(FlatlensError) as caught:
        train(replace(SMALL, **REFUSED[reason]), tmp_path / "run")
    assert reason in str(caught.value)


def test_a_refused_run_leaves_its_folder_to_the_corrected_one(tmp_path):
    options = {"widths": (64, 12, 10), "activation": "foo"}
    with pytest.raises(FlatlensError, match="Unknown activation 'foo'"):
        train(replace(SMALL, model_options=options), tmp_path / "run")
    train(SMALL, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"] == SMALL.identity


def test_a_run_made_before_a_field_was_added_has_its_default(tmp_path):
    train(SMALL, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    content = json.loads(path.read_text())
    del content["config"]["evaluate"]
    path.write_text(json.dumps(content))
    assert len(train(SMALL, tmp_path / "run")) == 4
    with pytest.raises(FlatlensError, match="evaluate=None, not 50"):
        train(replace(SMALL, evaluate=50), tmp_path / "run")


def test_a_done_run_of_0_1_0_without_records_is_refused(tmp_path):
    train(SMALL, tmp_path / "run")
    (tmp_path / "run" / "records.jsonl").write_bytes(b"")
    (tmp_path / "run" / "done").write_bytes(b"")
    with pytest.raises(FlatlensError, match="is done but has no records; delete it"):
        train(SMALL, tmp_path / "run")


@pytest.mark.parametrize(
    ("tensors", "meta"),
    [({"network.weight": torch.ones(2)}, {"step": 1}), ({}, {}), (None, {"epoch": 1})],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, tensors, meta):
    with Run.open(tmp_path / "run", SMALL.identity) as run:
        own = TrainingState.start(SMALL).tensors()
        run.checkpoint(own if tensors is None else tensors, meta)
    with pytest.raises(FlatlensError, match=r"is not of this run .*; delete it"):
        train(SMALL, tmp_path / "run")


def test_a_trillion_steps_start_at_once(tmp_path, monkeypatch):
    config = replace(SMALL, steps=10**12, measure="every:5")
    real = TrainingState.record

    def stop(self, step):
        if step == 10:
            raise KeyboardInterrupt
        return real(self, step)

    monkeypatch.setattr(TrainingState, "record", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run")
    assert (tmp_path / "run" / "records.jsonl").read_bytes().count(b"\n") == 2


WORDS = "--model-options.widths [64,12,10] --steps 60 --train-size 130 --samples 10 --measure 20"


@pytest.mark.slow
def test_the_command_is_the_function(tmp_path, capsys):
    train(SMALL, tmp_path / "a")
    words = ["train", *WORDS.split(), "--checkpoint-every", "7", "--out", str(tmp_path / "b")]
    assert cli.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert_same(tmp_path / "a", tmp_path / "b")
    assert told == json.loads(content(tmp_path / "a")[0].splitlines()[-1])
    assert cli.main(words) == 0  # done already
    assert "sharpness" in capsys.readouterr().out


def test_options_come_before_the_file_and_the_folder_is_named_after_both(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("lr = 0.5\nsteps = 3\n[model_options]\nwidths = [64, 5, 10]\n")
    assert cli.main(["train", "--config", "run.toml", "--lr", "0.25", "--measure", "end"]) == 0
    config = Config(model_options={"widths": (64, 5, 10)}, lr=0.25, steps=3, measure="end")
    assert (tmp_path / "runs" / config.name / "done").exists()
    assert f"Run: {Path('runs') / config.name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--lr -1", "The field lr is -1.0"),
        ("--optimizer lion", "one of sgd, momentum, adam, sam, asam"),
        ("--measure never", "The field measure is 'never'"),
        ("--steps some", "--steps"),
        ("--config none.toml", "none.toml: No such file"),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path, monkeypatch, capsys, words, reason):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *words.split()]) == 2
    told = capsys.readouterr()
    assert reason in told.err
    assert told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_shows_an_example_and_every_field(capsys):
    assert cli.main(["train", "--help"]) == 0
    told = capsys.readouterr().out
    assert "flatlens train" in told.split("Example")[1]
    assert all(f"--{name.replace('_', '-')}" in told for name in Config().to_dict())


@pytest.mark.slow
def test_snapshots_hold_the_weights_of_every_record(tmp_path: Path) -> None:
    config = replace(SMALL, snapshots=True)
    train(config, tmp_path / "a")
    train(SMALL, tmp_path / "b")
    records = [(tmp_path / run / "records.jsonl").read_bytes() for run in "ab"]
    assert records[0] == records[1]
    assert config.name == SMALL.name
    steps = [json.loads(line)["step"] for line in records[0].splitlines()]
    files = sorted((tmp_path / "a" / "snapshots").iterdir())
    assert [int(file.stem) for file in files] == steps
    last, checkpoint = load_file(files[-1]), load_file(tmp_path / "a" / "checkpoint.safetensors")
    assert all(torch.equal(value, checkpoint[f"network.{key}"]) for key, value in last.items())
    assert not (tmp_path / "b" / "snapshots").exists()
