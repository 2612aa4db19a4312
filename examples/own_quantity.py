"""A quantity of your own: the stable rank of the input Jacobian, beside the others."""

import numpy as np
import torch
from torch import nn

import flatlens as fl
from flatlens.data import load


def stable_rank(probe: fl.Probe) -> float:
    """Average of the squared Frobenius norm over the squared spectral norm."""
    squares = probe.input.singular**2
    return float(np.mean(squares.sum(1) / squares.max(1)))


def main() -> fl.Measurement:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    x = load("digits").x_train[:100]
    return fl.measure(net, x, quantities=["local_dimension", stable_rank])


if __name__ == "__main__":
    print(main())
