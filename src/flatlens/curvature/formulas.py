"""Formulas in place of kernels whose derivatives are wrong or missing (torch 2.13 on the CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flatlens.capture.kinds.normalisation import channel_view, standardised
from flatlens.capture.no_trace import ignore_hook


class RightFormulas(TorchFunctionMode):
    """A mode that runs formulas in place of kernels whose derivatives are wrong.

    Args:
        ignore_hooks: also ignore hooks that the model puts on its own tensors. A measurement must
            not be changed by them; a training keeps them.
    """

    def __init__(self, ignore_hooks: bool = False) -> None:
        super().__init__()
        self.formulas: dict[Any, Callable[..., Any]] = dict(FORMULAS)
        if ignore_hooks:
            self.formulas[Tensor.register_hook] = ignore_hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.formulas.get(func, func)(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch norm in evaluation mode (see ``standardised``)."""
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    view = channel_view(input)
    z = standardised(input, running_mean, running_var, eps)
    z = z if weight is None else z * weight.reshape(view)
    return z if bias is None else z + bias.reshape(view)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return v g / ||v||, with a norm for each index of ``dim``, or one norm for dim = -1."""
    over = [i for i in range(v.dim()) if dim == -1 or i != dim % v.dim()]
    norm = torch.linalg.vector_norm(v.unsqueeze(-1), dim=[*over, -1], keepdim=True).squeeze(-1)
    return v * (g / norm)


FORMULAS: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: _batch_norm,
    torch._weight_norm: _weight_norm,
    torch.ops.aten._weight_norm: _weight_norm,
    torch.ops.aten._weight_norm.default: _weight_norm,
}
