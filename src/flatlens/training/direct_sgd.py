"""Plain SGD on a chain of linear layers, which changes the weights while it goes backwards.

A step of SGD on a linear layer with inputs h and output gradients d is

    W <- (1 - lr decay) W - lr d^T h,    b <- (1 - lr decay) b - lr sum_i d_i

One matrix product does the whole step for W. An optimiser first writes the gradient, reads it again
and adds it. With small batches these passes over the weights and the bookkeeping of autograd take
about a fifth of the step. The result equals that of `torch.optim.SGD` up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# (gradient at an activation's output, its input, its output) -> gradient at its input.
Backward = Callable[[Tensor, Tensor, Tensor], Tensor]
aten = torch.ops.aten
BACKWARD: dict[type[nn.Module], Backward] = {
    nn.Flatten: lambda d, x, y: d.reshape(x.shape),
    nn.Identity: lambda d, x, y: d,
    nn.ReLU: lambda d, x, y: aten.threshold_backward(d, y, 0),
    nn.Tanh: lambda d, x, y: aten.tanh_backward(d, y),
    nn.Sigmoid: lambda d, x, y: aten.sigmoid_backward(d, y),
    nn.SiLU: lambda d, x, y: aten.silu_backward(d, x),
    nn.GELU: lambda d, x, y: aten.gelu_backward(d, x),
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class DirectSGD:
    """Steps of plain SGD with the parameters of a chain.

    The steps change the present tensors of the parameters. If the parameters have other values
    during a step, the gradient is taken at these values and the step starts from the old values, as
    in SAM.

    Args:
        network: the chain, one for which `is_plain_chain` is true.
        weight_decay: L2 weight decay, as in `torch.optim.SGD`.
    """

    def __init__(self, network: nn.Module, weight_decay: float) -> None:
        self.layers = list(network.children())
        self.weight_decay = weight_decay
        self._changed = {
            k: (layer.weight.data, None if layer.bias is None else layer.bias.data)
            for k, layer in enumerate(self.layers)
            if isinstance(layer, nn.Linear)
        }

    def step(self, x: Tensor, loss_of: Callable[[Tensor], Tensor], lr: float) -> Tensor:
        """Make one step.

        Args:
            x: inputs of a batch.
            loss_of: the loss of the outputs.
            lr: learning rate.

        Returns:
            The loss of the batch before the step.
        """
        with torch.no_grad():
            values = [x]  # the inputs of every layer, and the outputs
            for layer in self.layers:
                values.append(layer(values[-1]))
        outputs = values[-1].detach().requires_grad_()
        loss = loss_of(outputs)
        (d,) = torch.autograd.grad(loss, outputs)
        lowest = min(self._changed)
        with torch.no_grad():
            for k in range(len(self.layers) - 1, lowest - 1, -1):
                layer, h = self.layers[k], values[k]
                if not isinstance(layer, nn.Linear):
                    d = BACKWARD[type(layer)](d, h, values[k + 1])
                    continue
                # the layers below need the weight of the forward pass
                below = d @ layer.weight if k > lowest else d
                self._change(k, d.reshape(-1, d.shape[-1]), h.reshape(-1, h.shape[-1]), lr)
                d = below
        return loss.detach()

    def _change(self, k: int, d: Tensor, h: Tensor, lr: float) -> None:
        """Change weight and bias of one layer, from its inputs and output gradients."""
        weight, bias = self._changed[k]
        shrink = 1 - lr * self.weight_decay
        weight.addmm_(d.t(), h, beta=shrink, alpha=-lr)
        if bias is not None:
            if self.weight_decay:
                bias.mul_(shrink)
            bias.sub_(d.sum(0), alpha=lr)


def is_plain_chain(network: nn.Module) -> bool:
    """Return whether a network is a sequence of linear layers and activations, each used once.

    Networks for which the result could differ are excluded: those with hooks, frozen parameters,
    parameters that two layers share, activations that overwrite their input, and subclasses of the
    modules.

    >>> is_plain_chain(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), is_plain_chain(nn.Linear(2, 2))
    (True, False)
    """
    if type(network) is not nn.Sequential or _is_special(network):
        return False
    layers = list(network)
    parameters = [p for layer in layers for p in layer.parameters()]
    return (
        all(type(layer) in (nn.Linear, *BACKWARD) for layer in layers)
        and not any(map(_is_special, layers))
        and len({id(p) for p in parameters}) == len(parameters)
        and all(p.requires_grad for p in parameters)
        and any(type(layer) is nn.Linear for layer in layers)
    )


def _is_special(module: nn.Module) -> bool:
    """Whether a module has hooks, overwrites its input, or has a GELU of another formula."""
    hooked = any(getattr(module, name) for name in HOOKS)
    approximate = getattr(module, "approximate", "none") != "none"
    return hooked or approximate or getattr(module, "inplace", False)
