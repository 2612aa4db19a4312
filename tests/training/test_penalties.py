"""Penalties: unbiased, with the right gradient, and usable in a training that resumes."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatlens import penalties
from flatlens.curvature.squared_norm import squared_norm
from flatlens.data.datasets import load
from flatlens.errors import FlatlensError
from flatlens.penalties import (
    sensitivity_of_outputs,
    sensitivity_penalty,
    sharpness_of_outputs,
    sharpness_penalty,
    twice_differentiable,
)
from flatlens.training.config import Config
from flatlens.training.penalised_steps import (
    IMAGES,
    SIGNS,
    cropped,
    flipped,
    objective,
    step_generator,
)
from flatlens.training.state import TrainingState
from flatlens.training.steps import batches
from flatlens.training.train import train

KINDS = {"sharpness": sharpness_penalty, "sensitivity": sensitivity_penalty}


class Attention(nn.Module):
    """One head of attention through torch's fused function; outputs [n, tokens, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


class Named(nn.Module):
    """Two inputs by name, a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"other": left, "f": torch.tanh(self.a(left) + self.b(right))}


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 3)


def batch_norm() -> tuple[nn.Module, Tensor]:
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers), torch.randn(3, 3)


def batch_norm_eval() -> tuple[nn.Module, Tensor]:
    net, x = batch_norm()
    net(x)
    return net.eval(), x


def convolution() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(1, 2, 2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers), torch.randn(3, 1, 3, 3)


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(), torch.randn(2, 3, 3)


def weight_norm() -> tuple[nn.Module, Tensor]:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 3)


def frozen() -> tuple[nn.Module, Tensor]:
    net, x = mlp()
    net[0].weight.requires_grad_(False)
    return net, x


def unused() -> tuple[nn.Module, Tensor]:
    net, x = mlp()
    net.register_parameter("idle", nn.Parameter(torch.ones(3)))
    return net, x


CASES = (
    mlp, batch_norm, batch_norm_eval, convolution, attention, weight_norm, frozen, unused,
)  # fmt: skip


def built(case) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net, x = case()
    return net.double(), x.double()


def exact(net: nn.Module, x: Tensor, kind: str) -> Tensor:
    """The quantity itself, one output of one sample after another."""
    x = x.clone().requires_grad_()
    with twice_differentiable():
        f = torch.func.functional_call(
            net, {k: b.clone() for k, b in net.named_buffers()}, (x,)
        ).flatten(1)
    sources = [p for p in net.parameters() if p.requires_grad] if kind == "sharpness" else [x]
    total = 0
    for entry in f.flatten():
        grads = torch.autograd.grad(entry, sources, create_graph=True, allow_unused=True)
        total = total + sum(g.square().sum() for g in grads if g is not None)
    return total / len(x)


def every_sign(monkeypatch, net: nn.Module, x: Tensor, kind: str, **options) -> Tensor:
    """The mean of a penalty over all sign vectors that a sum over samples can tell apart."""
    with torch.no_grad():
        N = sum(t.numel() for t in [net(x)])
    values = []
    for rest in itertools.product((1.0, -1.0), repeat=N - 1):  # v and -v give the same
        signs = torch.tensor((1.0, *rest), dtype=x.dtype)
        monkeypatch.setattr(penalties, "random_signs", lambda f, _, s=signs: s.reshape(f.shape))
        values.append(KINDS[kind](net, x, **options))
    return torch.stack(values).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_mean_over_all_signs_is_the_exact_quantity_and_so_is_its_gradient(monkeypatch, case, kind):
    net, x = built(case)
    oracle, mean = exact(net, x, kind), every_sign(monkeypatch, net, x, kind)
    torch.testing.assert_close(mean, oracle, rtol=1e-12, atol=0)
    trained = [p for p in net.parameters() if p.requires_grad]
    found = torch.autograd.grad(mean, trained, allow_unused=True)
    wanted = torch.autograd.grad(oracle, trained, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None or not a.any()) if b is None else True
        if b is not None:
            zero = torch.zeros_like(b)
            torch.testing.assert_close(zero if a is None else a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [mlp, batch_norm, convolution], ids=lambda c: c.__name__)
def test_average_over_many_draws_comes_to_the_exact_quantity(case, kind):
    net, x = built(case)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([KINDS[kind](net, x, generator).detach() for _ in range(200)])
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - exact(net, x, kind)) < 3.5 * error
    assert error < 0.1 * draws.mean()


def test_clipping_by_a_hook_acts_on_the_gradient_of_the_penalty_and_not_on_its_value():
    net, x = built(mlp)
    generator = torch.Generator()
    plain = sharpness_penalty(net, x, generator.manual_seed(0))
    (wanted,) = torch.autograd.grad(plain, [net[0].weight])
    net[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    clipped = sharpness_penalty(net, x, generator.manual_seed(0))
    assert clipped.item() == plain.item()
    clipped.backward()
    torch.testing.assert_close(net[0].weight.grad, wanted.clamp(-0.01, 0.01))


def test_exact_sharpness_is_the_one_that_measure_reports():
    import flatlens as fl

    net, x = built(mlp)
    assert exact(net, x, "sharpness").item() == pytest.approx(fl.measure(net, x)["sharpness"])


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_agrees_with_finite_differences(kind):
    net, x = built(attention)
    weight = net.qkv.weight
    direction = torch.randn_like(weight)

    def value() -> Tensor:
        return KINDS[kind](net, x, torch.Generator().manual_seed(1))

    (gradient,) = torch.autograd.grad(value(), weight)
    with torch.no_grad():
        weight += 1e-5 * direction
        above = value()
        weight -= 2e-5 * direction
        slope = (above - value()) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_penalises_the_network_with_the_units_that_are_dropped(kind):
    net, x = built(mlp)
    dropped = nn.Sequential(net[0], nn.Dropout(0.5), *net[1:])
    torch.manual_seed(5)
    penalty = KINDS[kind](dropped, x, torch.Generator().manual_seed(0))
    torch.manual_seed(5)
    inputs = x.clone().requires_grad_()
    f, signs = dropped(inputs), torch.Generator().manual_seed(0)
    if kind == "sharpness":
        wanted = sharpness_of_outputs(f, dropped.parameters(), signs)
    else:
        wanted = sensitivity_of_outputs(f, inputs, signs)
    assert penalty.item() == wanted.item()


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_and_the_global_generator_stay(kind):
    net, x = built(batch_norm)
    before = {name: b.clone() for name, b in net.named_buffers()}
    state = torch.get_rng_state()
    KINDS[kind](net, x, torch.Generator().manual_seed(0)).backward()
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training


@pytest.mark.parametrize("kind", KINDS)
def test_named_inputs_and_one_output_of_a_dict(kind):
    torch.manual_seed(0)
    net = Named().double()
    x = {"left": torch.randn(4, 2).double(), "right": torch.randn(4, 3).double()}
    penalty = KINDS[kind](net, x, output="f")
    penalty.backward()
    assert penalty > 0
    assert net.b.weight.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_overwrites_its_input_leaves_the_users_tensor(kind):
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1)).double()
    x = -torch.ones(3, 2).double()
    KINDS[kind](net, x)
    assert torch.equal(x, -torch.ones(3, 2).double())
    assert not x.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_a_penalty_is_a_number(kind):
    net, x = built(mlp)
    with torch.no_grad():
        assert not KINDS[kind](net, x).requires_grad


def test_outputs_that_do_not_depend_on_the_input_have_no_sensitivity():
    class Constant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight.expand(len(x), -1)

    assert sensitivity_penalty(Constant(2, 1), torch.ones(3, 2)).item() == 0


def test_bad_input_is_refused_in_one_sentence():
    net = nn.Linear(2, 1)
    with pytest.raises(FlatlensError, match="no derivative with respect to it"):
        sensitivity_penalty(nn.Embedding(3, 2), torch.ones(2, dtype=torch.long))
    with pytest.raises(FlatlensError, match="first dimension must be the samples"):
        sharpness_penalty(
            nn.Sequential(net, nn.Flatten(0), nn.Unflatten(0, (1, 3))), torch.ones(3, 2)
        )
    with pytest.raises(FlatlensError, match="output="):
        sharpness_penalty(Named(), (torch.ones(3, 2), torch.ones(3, 3)))
    for p in net.parameters():
        p.requires_grad_(False)
    with pytest.raises(FlatlensError, match="no trainable parameters"):
        sharpness_penalty(net, torch.ones(3, 2))


# --- in a training run

SMALL = Config(
    model_options={"widths": (64, 8, 10)}, steps=12, measure="every:6", samples=5, train_size=50,
    checkpoint_every=4, dtype="float64",
)  # fmt: skip
IMAGES_CONFIG = Config(
    model="lenet", data="synthetic:gaussians",
    data_options={"n": 30, "shape": (3, 32, 32), "classes": 3}, samples=2, steps=6, measure="end",
    augment="flip+crop", checkpoint_every=2,
)  # fmt: skip


def test_fields_that_are_not_set_change_no_name():
    config = Config(model="vgg", data="cifar10", classes=(0, 1), lr=0.05, train_size=1_000)
    assert config.name == "vgg-cifar10-sgd-lr0.05-b20-seed0-ffa65bcd"


def test_one_strength_has_one_name():
    assert Config(penalty="sharpness:1e-2") == Config(penalty="sharpness:0.010")
    assert Config(penalty="sharpness:0.01").hash != Config(penalty="sensitivity:0.01").hash


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_follows_the_gradient_of_loss_and_penalty(kind):
    config = replace(SMALL, penalty=f"{kind}:0.02", steps=1)
    state = TrainingState.start(config)
    net, data = state.network, load("digits")
    index = next(batches(50, 20, 0, 0))
    x, eye = data.x_train[index].double(), torch.eye(10).double()
    loss = F.mse_loss(net(x), eye[data.y_train[index]])
    penalty = KINDS[kind](net, x, step_generator(0, 1, SIGNS))
    grads = torch.autograd.grad(loss + 0.02 * penalty, list(net.parameters()))
    wanted = [p - config.lr * g for p, g in zip(net.parameters(), grads, strict=True)]
    assert state.step_function()(index, 1).item() == pytest.approx(loss.item(), rel=1e-12)
    for p, w in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p, w, rtol=1e-10, atol=1e-14)


def test_weight_decay_is_l2_in_the_gradient():
    state = TrainingState.start(replace(SMALL, weight_decay=0.3))
    net, index = state.network, torch.arange(20)
    loss = F.mse_loss(net(state.train.x[index]), state.train.targets[index])
    grads = torch.autograd.grad(loss, list(net.parameters()))
    wanted = [p - 0.1 * (g + 0.3 * p) for p, g in zip(net.parameters(), grads, strict=True)]
    state.step_function()(index, 1)
    for p, w in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p, w, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, penalty="sharpness:0.01"),
        replace(SMALL, penalty="sensitivity:0.1", optimizer="asam"),
        replace(SMALL, optimizer="sam-adamw", lr=0.01, weight_decay=0.1),
        IMAGES_CONFIG,
        replace(SMALL, optimizer="adamw", lr=0.01, lr_schedule="cosine"),
    ],
    ids=["sharpness", "sensitivity", "sam-adamw", "augment", "cosine"],
)
def test_a_stopped_run_ends_bit_for_bit_as_one_that_was_not(tmp_path, monkeypatch, config):
    train(config, tmp_path / "whole", progress=False)
    go, calls = TrainingState.step_function, []

    def stopping(state):
        step_once = go(state)

        def step(index, step):
            calls.append(step)
            if len(calls) == 6:
                raise KeyboardInterrupt
            return step_once(index, step)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "step_function", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "stopped", progress=False)
    train(config, tmp_path / "stopped", progress=False)
    files = ("records.jsonl", "checkpoint.safetensors")
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (
            tmp_path / "stopped" / name
        ).read_bytes()


def test_signs_differ_from_step_to_step_and_seed_to_seed():
    draws = [
        torch.randint(2, (40,), generator=step_generator(*key)).tolist()
        for key in ((0, 1, SIGNS), (0, 2, SIGNS), (1, 1, SIGNS), (0, 1, IMAGES))
    ]
    assert len(set(map(tuple, draws))) == 4


def test_flips_and_crops_move_pixels_and_keep_the_rest():
    x = torch.arange(2 * 3 * 16 * 16, dtype=torch.float32).reshape(2, 3, 16, 16) + 1
    many = x[:1].expand(64, -1, -1, -1)
    mirrored = flipped(many, torch.Generator().manual_seed(0))
    same = (mirrored == x[0]).flatten(1).all(1)
    assert 0 < same.sum() < 64
    assert all(torch.equal(image, x[0].flip(-1)) for image in mirrored[~same])
    moved = cropped(many, torch.Generator().manual_seed(0))
    padded = F.pad(x[0], (2, 2, 2, 2))
    windows = {
        tuple(padded[:, i : i + 16, j : j + 16].flatten().tolist())
        for i in range(5)
        for j in range(5)
    }
    crops = {tuple(image.flatten().tolist()) for image in moved}
    assert crops <= windows
    assert len(crops) > 10


def test_augmentation_of_what_is_no_image_is_refused(tmp_path):
    with pytest.raises(FlatlensError, match="augment=flip needs images"):
        train(replace(SMALL, augment="flip"), tmp_path / "run", progress=False)


def test_without_options_the_objective_is_the_loss_itself():
    net, x = built(mlp)
    loss, total = objective(SMALL, net, F.mse_loss)(x, torch.zeros(3, 2).double(), 1)
    assert total is loss


# --- the squared norm


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 3, 2, 2)])
def test_the_squared_norm_has_every_derivative(shape):
    torch.manual_seed(0)
    g = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(squared_norm(g), g.square().sum(), rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(squared_norm, g, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(squared_norm, g)
    rows = torch.randn(3, *shape, dtype=torch.float64)
    each = torch.func.vmap(torch.func.grad(squared_norm))(rows)
    torch.testing.assert_close(each, 2 * rows)


def test_the_squared_norm_of_other_memory_formats_and_types():
    image = torch.randn(2, 3, 4, 4, dtype=torch.float64).contiguous(
        memory_format=torch.channels_last
    )
    torch.testing.assert_close(squared_norm(image), image.square().sum())
    torch.testing.assert_close(squared_norm(nn.Parameter(image)), image.square().sum())
    assert squared_norm(torch.ones(1000, dtype=torch.bfloat16)).item() == 1000
