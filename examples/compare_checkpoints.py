"""Train one network with plain gradient descent and one with SAM, and compare the two."""

import torch
from torch import nn

import flatlens as fl
from flatlens.data import load


def train(radius: float, steps: int, lr: float = 0.2) -> nn.Module:
    """Train with SAM of this radius; radius 0 is plain gradient descent."""
    data = load("digits")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    parameters = list(net.parameters())

    def gradients() -> tuple[torch.Tensor, ...]:
        loss = nn.functional.cross_entropy(net(data.x_train), data.y_train)
        return torch.autograd.grad(loss, parameters)

    for _ in range(steps):
        ascent = gradients()
        length = torch.sqrt(sum((g**2).sum() for g in ascent))
        shifts = [radius * g / length for g in ascent]
        with torch.no_grad():
            for p, shift in zip(parameters, shifts, strict=True):
                p += shift
        descent = gradients()
        with torch.no_grad():
            for p, g, shift in zip(parameters, descent, shifts, strict=True):
                p -= shift + lr * g
    return net


def main(steps: int = 400) -> fl.Comparison:
    data = load("digits")
    x, y = data.x_train[:100], data.y_train[:100]
    networks = {"sgd": train(0.0, steps), "sam": train(0.5, steps)}
    return fl.compare({name: fl.measure(net, x, y) for name, net in networks.items()})


if __name__ == "__main__":
    print(main())
