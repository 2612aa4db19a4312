"""Measuring leaves no trace: modes, buffers, gradients and RNG are as before, come what may."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator

import torch
from torch import nn

from flatlens.errors import FlatlensError

HALF = (torch.float16, torch.bfloat16)


def original(model: nn.Module) -> nn.Module:
    """The module a user wrote, out of torch.compile, DataParallel or DistributedDataParallel."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = model.module
    return model if inner is None else original(inner)


def in_float(model: nn.Module) -> tuple[nn.Module, torch.dtype, list[str]]:
    """The model to measure and its precision; a half-precision one is copied to float32."""
    own = {p.dtype for p in model.parameters()}
    dtypes = own | {b.dtype for b in model.buffers() if b.is_floating_point() or b.is_complex()}
    if any(d.is_complex for d in dtypes):
        raise FlatlensError("the model has complex parameters; only real networks are measured")
    if any(d in HALF for d in dtypes):
        note = "half-precision parameters: measured on a float32 copy of the model"
        return copy.deepcopy(model).float(), torch.float32, [note]
    double = (own or dtypes) == {torch.float64}  # what is coarsest limits the digits
    return model, torch.float64 if double else torch.float32, []


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients on; everything is put back at the end."""
    training = [(m, m.training) for m in model.modules()]
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    changing = [m.weight for m in embeddings if m.max_norm is not None]
    values = [(t, t.detach().clone()) for t in [*model.buffers(), *changing]]
    buffers = [(m, dict(m._buffers)) for m in model.modules()]
    hooked = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in {p.device.type for p in model.parameters()} | {"cpu"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_eager())
        try:
            for module, _ in training:
                module.training = False
            for p, _ in hooked:  # they would change the gradient
                p._backward_hooks = None
            yield
        finally:
            for module, flag in training:
                module.training = flag
            for p, hooks in hooked:
                p._backward_hooks = hooks
            for module, known in buffers:  # a forward pass may put others in their place
                module._buffers.clear()
                module._buffers.update(known)
            with torch.no_grad():
                for tensor, value in values:
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled parts of a model run as they were written, so that their calls can be seen."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled yet
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
