"""Follow sharpness and compression through a training loop and print the records."""

from pathlib import Path

import pandas as pd
import torch
from torch import nn

import flatlens as fl
from flatlens.data import load


def main(folder: str | Path = "runs/follow", steps: int = 1000) -> pd.DataFrame:
    data = load("digits")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    x, y = data.x_train[:100], data.y_train[:100]
    tracker = fl.Tracker(net, x, y, when=fl.log_spaced(4), run=folder)
    for step in range(steps + 1):
        batch = torch.randint(len(data.x_train), (50,))
        loss = nn.functional.cross_entropy(net(data.x_train[batch]), data.y_train[batch])
        tracker(step, train_loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tracker.close()
    return fl.read_runs(folder)


if __name__ == "__main__":
    print(main()[["step", "train_loss", "sharpness", "nmls"]].round(3))
