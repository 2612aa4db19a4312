"""Numbers are right in float32 at scales whose squares are no float32."""

import pytest
import torch
from torch import nn

import flatlens as fl

SCALES = [1e-18, 1e-14, 1e-9, 1e9, 1e14, 1e17]


def failing(m) -> list[str]:
    return [b.name for b in m.bounds if b.verdict == "theorem" and not b.holds]


def compare(net: nn.Module, x: torch.Tensor, *names: str) -> None:
    """Every metric in float32 against float64, and no theorem fails."""
    m = fl.measure(net, x)
    d = fl.measure(net.double(), x.double())
    net.float()
    for name in names:
        assert m[name] == pytest.approx(d[name], rel=1e-3, abs=0), name
    assert not failing(m)


@pytest.mark.parametrize("scale", [1e-30, 1e-24, 1e-22, *SCALES])
def test_small_or_large_inputs(scale):
    torch.manual_seed(0)
    compare(nn.Linear(3, 2, bias=False), scale * torch.randn(2, 3), "sharpness", "mls")


@pytest.mark.parametrize("scale", [1e-22, *SCALES, 1e20])
def test_small_or_large_weights(scale):
    torch.manual_seed(0)
    net = nn.Linear(3, 2, bias=False)
    net.weight.data *= scale
    compare(net, torch.randn(2, 3), "sharpness", "mls", "adaptive_sharpness")


class Pooled(nn.Module):
    """Products of two small branches: ordinary inputs, activations of 1e-24."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.a(x) * self.b(x))


def test_small_activations_inside():
    torch.manual_seed(0)
    compare(Pooled(), 1e-12 * torch.randn(3, 4), "sharpness", "mls")


class Wide(nn.Module):
    """Many outputs behind a layer of any scale, so that Lanczos finds the spectra."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 8, bias=False), nn.Linear(8, 80, bias=False)
        self.c = nn.Conv1d(1, 1, 1)
        self.b.weight.data *= scale

    def forward(self, x):
        return self.c(self.b(torch.tanh(0.1 * self.a(x))).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("scale", [1e-14, 1e-10, 1e6, 1e11, 1e14])
def test_sketched_spectra(scale):
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(3))
    p, q = fl.sketch(Wide(scale), x, directions=4), fl.probe(Wide(scale).double(), x.double())
    assert p.sketch is not None
    assert fl.mls(p) == pytest.approx(fl.mls(q), rel=1e-2)
    assert fl.nmls(p) == pytest.approx(fl.nmls(q), rel=1e-2)
