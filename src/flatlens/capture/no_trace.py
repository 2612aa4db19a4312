"""Measuring leaves no trace: modes, parameters, buffers, hooks and RNG states are put back."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from flatlens.algebra.wide_tensor import HALF, WideTensor, stored
from flatlens.capture.recomputation import without_recomputation
from flatlens.errors import FlatlensError, first_line

# The classes of torch.nn itself. Their forward passes in evaluation mode write to no parameter.
BUILT_IN = frozenset(c for c in vars(nn).values() if isinstance(c, type))


def original(model: nn.Module) -> nn.Module:
    """Unwrap a module from torch.compile, DataParallel or DistributedDataParallel."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = model.module
    return model if inner is None else original(inner)


def in_float(model: nn.Module) -> tuple[nn.Module, torch.dtype, list[str]]:
    """Return the model to measure and its precision; a half-precision model is copied to float32.

    Raises:
        FlatlensError: if parameters are complex or have no values, or a copy cannot be made.
    """
    own, dtypes = precisions(model)
    if any(d in HALF for d in dtypes):
        note = "half-precision parameters: measured on a float32 copy of the model"
        return float_copy(model, torch.float32), torch.float32, [note]
    double = (own or dtypes) == {torch.float64}  # the coarsest precision limits the digits
    return model, torch.float64 if double else torch.float32, []


def precisions(model: nn.Module) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Return the precisions of a model's parameters, and those of its buffers as well.

    Raises:
        FlatlensError: if parameters are complex or have no values.
    """
    without = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if without:
        raise FlatlensError(
            f"{', '.join(without[:3])}{', ...' if len(without) > 3 else ''} on the meta device "
            "have no values; load the weights (model.to_empty, load_state_dict) before measuring"
        )
    own = {p.dtype for p in model.parameters()}
    dtypes = own | {b.dtype for b in model.buffers() if b.is_floating_point() or b.is_complex()}
    if any(d.is_complex for d in dtypes):
        raise FlatlensError("the model has complex parameters; only real networks are measured")
    return own, dtypes


def float_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model in another precision, including tensors that are plain attributes of a module.

    Pruning and the older weight norm keep the last computed weight as an attribute. ``deepcopy``
    refuses a tensor with a graph, so the copy gets the attribute's values.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in _plain_tensors(module).values():
            if not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        duplicate = copy.deepcopy(model, memo).to(dtype)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise FlatlensError(
            f"the model cannot be copied to {name_of(dtype)} ({first_line(error)}); convert it "
            f"yourself with model.{'float' if dtype == torch.float32 else 'double'}()"
        ) from error
    for module in duplicate.modules():
        for name, value in _plain_tensors(module).items():
            if value.is_floating_point() and value.dtype != dtype:
                module.__dict__[name] = value.to(dtype)
    return duplicate


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a precision, such as "float64"."""
    return str(dtype).removeprefix("torch.")


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the plain tensor attributes of a module, neither parameters nor buffers."""
    return {k: v for k, v in module.__dict__.items() if isinstance(v, Tensor)}


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode with gradients on, and restore everything at the end.

    Modes, parameters, buffers, plain attributes of modules and random generators are restored.
    Backward hooks of modules and parameters are off, because they would change the gradients.
    Forward hooks stay on, because their changes are part of the model. Gradient checkpointing is
    off.

    Raises:
        FlatlensError: if the model wrote to the ``.grad`` of a parameter. Hand-written
            checkpointing does so, and it hides its parameters from autograd.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in {p.device.type for p in model.parameters()} | {"cpu"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_eager())
        stack.enter_context(without_recomputation())
        modules = [_ModuleState(module) for module in model.modules()]
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [t for state in modules for t in _plain_tensors(state.module).values()]
        unique = [t for t in {id(t): t for t in tensors}.values() if not is_lazy(t)]
        copied = not _only_reads(model)
        values = [_Values(t, copied) for t in unique]
        stack.enter_context(_no_global_hooks())
        try:
            for state in modules:
                state.prepare()
            for value in values:
                value.prepare()
            yield
            _check_gradients(model)
        finally:
            for state in modules:
                state.restore()
            for value in values:
                value.restore()


def _check_gradients(model: nn.Module) -> None:
    """Raise if the model accumulated gradients, all of which were None before it ran."""
    written = [n for n, p in model.named_parameters() if p.is_leaf and p.grad is not None]
    if written:
        raise FlatlensError(
            f"the model calls backward() itself and writes to the gradient of {written[0]}, which "
            "hides its layers (gradient checkpointing written by hand?); switch that off while "
            "measuring, or use torch.utils.checkpoint"
        )


def _only_reads(model: nn.Module) -> bool:
    """Whether no forward pass of this model can write to its parameters and buffers.

    This is certain for networks of `torch.nn` classes alone, without forward hooks and without a
    `max_norm`. Instance norms with running statistics are excluded, because PyTorch 2.6 rounds
    these statistics anew in every forward pass. The check saves a copy of all parameters and a
    comparison at the end: 7 % of the time that the sharpness of an MLP takes.
    """
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return False
    return all(
        type(module) in BUILT_IN
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in module.__dict__
        and getattr(module, "max_norm", None) is None
        and not (isinstance(module, _InstanceNorm) and module.track_running_stats)
        for module in model.modules()
    )


class _ModuleState:
    """The attributes of one module, saved so that they can be restored.

    A scripted module keeps its parameters and buffers outside of Python.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = module, module.training
        self.attributes, self.members = dict(module.__dict__), self._members()
        self.scripted = isinstance(module, torch.jit.ScriptModule)
        self.own = list(module.named_buffers(recurse=False)) if self.scripted else []
        self.registered = (
            {}
            if self.scripted
            else {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers")}
        )

    def prepare(self) -> None:
        """Switch to evaluation mode, without backward hooks."""
        self.module.training = False
        for hooks in ("_backward_hooks", "_backward_pre_hooks"):
            if self.attributes.get(hooks):
                self.module.__dict__[hooks] = OrderedDict()

    def restore(self) -> None:
        """Restore everything, including attributes that a forward pass replaced."""
        attributes = self.module.__dict__
        self.module.training = self.training
        if self._members() != self.members:  # built by its first forward pass, and stays so
            for name in ("_backward_hooks", "_backward_pre_hooks"):
                attributes[name] = self.attributes[name]
            return
        for name in attributes.keys() - self.attributes.keys():
            del attributes[name]
        attributes.update(self.attributes)
        for name, known in self.registered.items():
            attributes[name].clear()
            attributes[name].update(known)
        for name, buffer in self.own:
            if getattr(self.module, name).data_ptr() != buffer.data_ptr():
                setattr(self.module, name, buffer)

    def _members(self) -> list[str]:
        """Return the names of the module's own parameters and of its children."""
        own = [name for name, _ in self.module.named_parameters(recurse=False)]
        return own + [name for name, _ in self.module.named_children()]


class _Values:
    """The values of one tensor, saved because a forward pass may constrain its weights.

    Values are copied, because a change through ``.data`` cannot be detected.

    Args:
        tensor: a parameter, buffer or plain attribute of a module.
        copied: whether a forward pass could write to it.
    """

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self.tensor, self.storage = tensor, tensor.detach()
        # A WideTensor refuses to be written to.
        copied = copied and not isinstance(tensor, WideTensor)
        self.copy = self.storage.clone() if copied else None
        self.needs_gradient, self.hooks = tensor.requires_grad, tensor._backward_hooks
        self.grad = tensor.grad if tensor.is_leaf else None

    def prepare(self) -> None:
        """Remove the hooks, which would change derivatives, and the gradient of training."""
        if self.hooks:
            self.tensor._backward_hooks = None
        if self.grad is not None:
            self.tensor.grad = None

    def restore(self) -> None:
        """Restore values, storage, gradient and hooks."""
        if self.hooks:
            self.tensor._backward_hooks = self.hooks
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad
        if self.tensor.is_leaf and self.tensor.requires_grad != self.needs_gradient:
            self.tensor.requires_grad_(self.needs_gradient)
        if self.tensor.layout != torch.strided:  # a sparse tensor has no memory to compare
            return
        with torch.no_grad():
            if not _same_memory(self.tensor, self.storage):
                self.tensor.data = self.storage
            if self.copy is not None and not torch.equal(self.storage, self.copy):
                self.tensor.detach().copy_(self.copy)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    a, b = stored(a), stored(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.data_ptr() == b.data_ptr()


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Switch off backward hooks that were registered for all modules."""
    registries = module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks
    known = [(registry, dict(registry)) for registry in registries]
    try:
        for registry, _ in known:
            registry.clear()
        yield
    finally:
        for registry, hooks in known:
            registry.clear()
            registry.update(hooks)


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Take the hooks of tensors off: gradient clipping, for example, would change derivatives."""
    known = [(t, t._backward_hooks) for t in tensors if t._backward_hooks]
    try:
        for t, _ in known:
            t._backward_hooks = None
        yield
    finally:
        for t, hooks in known:
            t._backward_hooks = hooks


def ignore_hook(*_: Any) -> RemovableHandle:
    """Stand in for ``Tensor.register_hook``: a hook could change what autograd delivers."""
    return RemovableHandle(OrderedDict())


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Run compiled parts of a model uncompiled, so that their calls can be seen."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled yet
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
