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


# -- products of several numbers, and what float32 loses -----------------------


class Tokens(nn.Module):
    """A layer that shares its weights, a scale and a head: every way of adding squares."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.out = nn.Linear(4, 5), nn.Parameter(torch.rand(5)), nn.Linear(5, 3)

    def forward(self, x):
        return self.out((self.a(x) * self.scale).relu()).mean(1)


@pytest.mark.parametrize("scale", [1e-22, 1e-8, 1e8, 1e14, 1e22])
def test_products_of_numbers_that_are_in_range_themselves(scale):
    """J, u and W have squares of float32; the square of their product has none."""
    torch.manual_seed(0)
    net = Tokens()
    with torch.no_grad():
        for p in net.parameters():
            p *= scale**0.5
    names = ("sharpness", "adaptive_sharpness", "nmls", "input_invariant_mls", "sharpness_untied")
    compare(net, torch.randn(2, 6, 4), *names)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("what", ["input", "weight"])
def test_the_sharpness_alone(what, scale):
    torch.manual_seed(0)
    net, x = Tokens(), torch.randn(2, 6, 4)
    if what == "input":
        x = x * scale
    else:
        net.out.weight.data *= scale
    short = fl.measure(net, x, quantities="sharpness")["sharpness"]
    want = fl.measure(net.double(), x.double(), quantities="sharpness")["sharpness"]
    assert short == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("scale", [1e-22, 1e-12, 1e12, 1e18])
def test_norms_by_iteration(scale):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.AdaptiveAvgPool2d(1))
    net[0].weight.data *= scale
    norm = fl.probe(net, torch.randn(1, 3, 9, 9)).layers[0].norm
    want = fl.probe(net.double(), torch.randn(1, 3, 9, 9).double()).layers[0].norm
    assert norm == pytest.approx(want, rel=2e-3)


def test_lanczos_scales_each_sample():
    """One sample's derivative is 1e22 times that of the other."""

    class Scaled(Wide):
        def forward(self, x):
            return super().forward(x[:, 1:]) * x[:, :1].detach()

    net, x = Scaled(1.0), torch.randn(2, 6)
    x[:, 0] = torch.tensor([1e-11, 1e11])
    p, q = fl.sketch(net, x, directions=4), fl.probe(net.double(), x.double())
    assert p.input.singular[:, 0] == pytest.approx(q.input.singular[:, 0], rel=1e-2)


def confident_softmax() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Softmax(1))
    net[2].bias.data = torch.tensor([18.0, -18.0])
    return net


@pytest.mark.parametrize("quantities", ["default", "sharpness"])
def test_what_float32_loses_is_measured_in_float64(quantities):
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    m = fl.measure(confident_softmax(), x, quantities=quantities)
    want = fl.measure(confident_softmax().double(), x.double(), quantities=quantities)
    assert m["sharpness"] == pytest.approx(want["sharpness"], rel=1e-3)
    assert any("float64 copy" in note for note in m.probe.notes)


def test_what_float32_loses_in_a_later_batch_is_refused_by_name():
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Softmax(1)), torch.randn(3, 2)
    net[0].weight.data = torch.eye(2)
    far = torch.tensor([[0.0, 0.0], [40.0, 0.0]])
    with pytest.raises(fl.FlatlensError, match=r"sample 4 .* float64"):
        fl.probe(net, [x, far])


def test_a_rank_that_float32_decides_is_noted():
    net = nn.Linear(3, 3, bias=False)
    net.weight.data = torch.diag(torch.tensor([1.0, 1.0, 1e-9]))
    note = fl.probe(net, torch.ones(1, 3)).notes
    assert any("decides the rank at the input" in text for text in note)
    assert not fl.probe(net.double(), torch.ones(1, 3).double()).notes
