"""The mode that sees every layer call of a forward pass.

A :class:`Recorder` is a ``TorchFunctionMode``. It sees every function that a kind of layer handles
(``capture/kinds``), with its real arguments. It does not matter who calls the function: a module, a
module that runs three times, or ``F.linear`` on another module's weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

from flatlens.capture.injection import InjectionMode
from flatlens.capture.kinds import BY_NAME, HANDLERS
from flatlens.capture.kinds.attention import REENTERED, note_scores, reenter
from flatlens.capture.kinds.embedding import note_derived
from flatlens.capture.no_trace import ignore_hook
from flatlens.capture.recording import Recording


class Recorder(TorchFunctionMode):
    """Record the forward pass that runs inside this mode.

    Args:
        recording: collects the calls of the pass, and holds the changes to make in it.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        injection = self.recording.injection
        if injection is None:
            return self._call(func, args, kwargs)
        args, kwargs = injection.arguments((args, kwargs))
        return injection.result(self._call(func, args, kwargs))

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Without grad mode there are no derivatives. Inside torch.vmap or torch.func.grad the
        # tensors belong to the transform; the graph outside of it shows which parameters they use.
        if not torch.is_grad_enabled() or peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        if func is Tensor.register_hook:  # derivatives are those of the function itself
            return ignore_hook()
        if func in REENTERED:
            return reenter(self, func, args, kwargs)
        note_scores(self.recording, func, args, kwargs)
        handler = HANDLERS.get(func) or BY_NAME.get(getattr(func, "__name__", ""))
        if handler is None:
            result = func(*args, **kwargs)
        else:
            result = self._handled(handler, func, args, kwargs)
        if self.recording.tokens:
            note_derived(self.recording, result, args)
        return _cut_if_empty(result)

    def _handled(self, handler: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Let a kind of layer run a function; an injection also sees the calls inside."""
        injection = self.recording.injection
        if injection is None:
            return handler(self.recording, func, args, kwargs)
        with InjectionMode(injection):
            return handler(self.recording, func, args, kwargs)


def _cut_if_empty(result: Any) -> Any:
    """Cut results without entries off from the graph: no derivative passes through them.

    An expert that gets no token returns such a result. To autograd its weights would look used.
    """
    if isinstance(result, Tensor):
        return result.detach() if result.requires_grad and not result.numel() else result
    if type(result) in (tuple, list):
        return type(result)(_cut_if_empty(part) for part in result)
    return result
