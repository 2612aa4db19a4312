"""Networks that recompute activations give the numbers of the same networks without it."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import flatlens as fl
from flatlens.capture.recomputation import without_recomputation
from flatlens.compat import make_torchvision_importable


class Checkpointed(nn.Module):
    """Layers of several kinds, run by ``run``."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.5)
        )
        self.head = nn.Linear(8, 3)
        self.run = run
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.body, x))


def wrapped_by_distributed(body: nn.Module, x: Tensor) -> Tensor:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(body)(x)


def composed(body: nn.Module, x: Tensor) -> Tensor:
    from torch.distributed._composable.checkpoint_activation import checkpoint as compose

    if not hasattr(body, "is_composed"):
        compose(body)
        body.is_composed = True
    return body(x)


def selective(body: nn.Module, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

    keep = [torch.ops.aten.addmm.default]
    return checkpoint(body, x, use_reentrant=False, context_fn=lambda: contexts(keep))


KINDS = {
    "reentrant": lambda body, x: checkpoint(body, x, use_reentrant=True),
    "not reentrant": lambda body, x: checkpoint(body, x, use_reentrant=False),
    "nested": lambda body, x: checkpoint(
        lambda h: body[2:](checkpoint(body[:2], h, use_reentrant=True)), x, use_reentrant=False
    ),
    "sequential": lambda body, x: checkpoint_sequential(body, 2, x, use_reentrant=True),
    "wrapper": wrapped_by_distributed,
    "composable": composed,
    "selective": selective,
}


@pytest.fixture
def importable() -> None:
    """Let timm and Transformers import a torchvision of another torch."""
    make_torchvision_importable()


def samples() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same_numbers(m: fl.Measurement, plain: fl.Measurement) -> None:
    assert m.coverage == plain.coverage
    for name, value in plain.to_dict().items():
        if isinstance(value, float):
            assert m.to_dict()[name] == pytest.approx(value, rel=1e-10, abs=1e-300, nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["exact", "sketch"])
def test_every_kind_of_checkpoint_is_measured(kind, method):
    plain = fl.measure(Checkpointed(lambda body, x: body(x)), samples(), method=method)
    same_numbers(fl.measure(Checkpointed(KINDS[kind]), samples(), method=method), plain)


def test_the_hessian_of_a_checkpointed_network():
    y = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    nets = [Checkpointed(run) for run in (lambda body, x: body(x), KINDS["reentrant"])]
    plain, m = (fl.measure(net, samples(), y, quantities=["hessian_trace"]) for net in nets)
    assert m["hessian_trace"] == pytest.approx(plain["hessian_trace"], rel=1e-10)


def test_checkpointing_is_on_again_after_a_measurement_that_failed():
    before = vars(torch.utils.checkpoint).copy()
    model = Checkpointed(KINDS["reentrant"])
    with pytest.raises(fl.FlatlensError):
        fl.measure(model, torch.full_like(samples(), float("nan")))
    assert vars(torch.utils.checkpoint) == before
    x = samples().requires_grad_()
    assert "CheckpointFunction" in model.run(model.body, x).grad_fn.name()


def test_two_threads_switch_it_off_and_on_in_any_order():
    original = torch.utils.checkpoint.CheckpointFunction
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with without_recomputation():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with without_recomputation():
        thread.start()
        assert entered.wait(10)
    assert torch.utils.checkpoint.CheckpointFunction is not original
    leave.set()
    thread.join()
    assert torch.utils.checkpoint.CheckpointFunction is original


class ByHand(torch.autograd.Function):
    """Recompute in the backward pass, as older code does; parameters are no inputs of it."""

    @staticmethod
    def forward(ctx, body, refuses_inputs, x):
        ctx.body, ctx.refuses_inputs, ctx.x = body, refuses_inputs, x.detach()
        with torch.no_grad():
            return body(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.refuses_inputs and not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Checkpointing is not compatible with .grad(), use .backward()")
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.body(x), grad)
        return None, None, x.grad


@pytest.mark.parametrize("refuses_inputs", [False, True])
def test_a_checkpoint_written_by_hand_is_refused_and_leaves_the_gradient_of_training(
    refuses_inputs,
):
    model = Checkpointed(lambda body, x: ByHand.apply(body, refuses_inputs, x))
    weight = model.body[0].weight
    weight.grad = gradient = torch.ones_like(weight)
    with pytest.raises(fl.FlatlensError, match="checkpointing"):
        fl.measure(model, samples())
    assert weight.grad is gradient
    assert bool((gradient == 1).all())
    assert model.body[3].weight.grad is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the imports
def test_grad_checkpointing_of_timm(importable):
    timm = pytest.importorskip("timm")

    def vit(checkpointing: bool) -> nn.Module:
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, num_classes=3, depth=2, embed_dim=12, num_heads=2
        )
        model.set_grad_checkpointing(checkpointing)
        return model.double()

    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    plain, m = (fl.measure(vit(on), images, method="exact") for on in (False, True))
    same_numbers(m, plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the imports
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_transformers(reentrant, importable):
    transformers = pytest.importorskip("transformers")

    def gpt(checkpointing: bool) -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False
        )
        model = transformers.GPT2Model(config).double().train()
        if checkpointing:
            options = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        return model

    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))

    def output(result):
        return result.last_hidden_state[:, -1, :3]

    plain, m = (
        fl.measure(gpt(on), {"input_ids": ids}, output=output, method="exact")
        for on in (False, True)
    )
    same_numbers(m, plain)
