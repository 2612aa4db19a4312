"""Train a small network on the embedded digits and print everything about it."""

import torch
from torch import nn

import flatlens as fl
from flatlens.data import load


def main(epochs: int = 300) -> fl.Measurement:
    data = load("digits")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for _ in range(epochs):
        loss = nn.functional.cross_entropy(net(data.x_train), data.y_train)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fl.measure(net, data.x_train[:100], data.y_train[:100])


if __name__ == "__main__":
    print(main())
