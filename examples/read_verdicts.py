"""Eq. 12 as a theorem, as an observation that holds, and as one that fails."""

import torch
from torch import nn

import flatlens as fl


class MeanOfTokens(nn.Module):
    """The mean over tokens of one linear layer: gradients of opposite tokens cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.layer.weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean(1)


def main() -> dict[str, fl.Inequality]:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    conv = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    token = torch.tensor([1.0, 2.0])
    return {
        "mlp": fl.measure(mlp, torch.randn(50, 8))["eq12"],
        "conv": fl.measure(conv, torch.randn(50, 1, 8))["eq12"],
        "tokens": fl.measure(MeanOfTokens(), torch.stack([token, -token])[None])["eq12"],
    }


if __name__ == "__main__":
    for name, row in main().items():
        sign = "<=" if row.holds else ">"
        print(f"{name}: {row.lhs:.3f} {sign} {row.rhs:.3f} ({row.verdict}: {row.why})")
