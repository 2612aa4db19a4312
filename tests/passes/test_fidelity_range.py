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


def confident_segmentation(margin: float) -> nn.Sequential:
    """A softmax over two classes at every pixel, whose logits differ by about twice the margin."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1), nn.Softmax(1))
    net[2].bias.data = torch.tensor([margin, -margin])
    return net


@pytest.mark.parametrize("margin", [8.0, 10.0, 12.0])
def test_a_sketch_measures_in_float64_what_float32_loses(margin):
    x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    p = fl.sketch(confident_segmentation(margin), x, directions=4)
    q = fl.probe(confident_segmentation(margin).double(), x.double())
    assert p.input.singular[:, 0] == pytest.approx(q.input.singular[:, 0], rel=1e-2)
    assert any("float64 copy" in note for note in p.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_derivative_that_float64_loses_is_noted_and_no_sketch_is_taken(dtype):
    net = confident_segmentation(18.0).to(dtype)
    x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    with pytest.raises(fl.FlatlensError, match=r"sample 0 is mostly rounding.*logits"):
        fl.sketch(net, x, directions=4)
    assert any("mostly rounding, also in float64" in note for note in fl.probe(net, x).notes)


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


# -- what is exactly 0 in float32, and what leaves float64 -----------------------------------------


def chain(
    depth: int,
    scale: float,
    activation: type[nn.Module] = nn.Tanh,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """Bias-free layers of one scale."""
    torch.manual_seed(0)
    pairs = ((nn.Linear(3, 3, bias=False), activation()) for _ in range(depth))
    net = nn.Sequential(*(module for pair in pairs for module in pair))[:-1].to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p *= scale
    return net


@pytest.mark.parametrize("quantities", ["default", "sharpness"])
@pytest.mark.parametrize(
    ("depth", "scale", "activation"),
    [(2, 1e-30, nn.ReLU), (3, 1e-30, nn.Tanh), (6, 1e-12, nn.Tanh)],
)
def test_a_derivative_that_underflows_to_zero_is_measured_in_float64(
    depth, scale, activation, quantities
):
    net, x = chain(depth, scale, activation), torch.randn(3, 3)
    m = fl.measure(net, x, quantities=quantities)
    want = fl.measure(net.double(), x.double(), quantities=quantities)
    assert m["sharpness"] == pytest.approx(want["sharpness"], rel=1e-5, abs=0)
    assert m["sharpness"] > 0
    if quantities == "sharpness":  # it may need no product that underflows
        return
    for name in ("mls", "nmls", "local_dimension"):
        assert m[name] == pytest.approx(want[name], rel=1e-5, abs=0), name
        assert m[name] > 0
    assert any("float64 copy" in note for note in m.probe.notes)
    assert not failing(m)


def test_an_underflow_in_a_sketch_is_measured_in_float64():
    net, x = chain(2, 1e-30), torch.randn(2, 3)
    p = fl.sketch(net, x, directions=2)
    assert fl.mls(p) == pytest.approx(fl.mls(fl.probe(net.double(), x.double())), rel=1e-2)
    assert fl.mls(p) > 0


def test_a_dead_sample_stays_in_float32():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    net[0].bias.data.fill_(-50.0)
    p = fl.probe(net, torch.randn(3, 2))
    assert p.dtype == torch.float32
    assert fl.mls(p) == 0.0
    assert not p.notes


class OnlyFloat32(nn.Module):
    """A model that turns its input into float32, so that a float64 copy of it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x):
        return self.a(x.float()).clamp(min=1e6)


def test_a_zero_that_cannot_be_checked_is_noted():
    p = fl.probe(OnlyFloat32(), torch.randn(3, 2))
    assert any("not known whether float32 lost it" in note for note in p.notes)


@pytest.mark.parametrize(
    ("depth", "scale"), [(1, 1e-75), (2, 1e-75), (2, 1e-100), (3, 1e-100), (1, 1e-230), (3, 1e-230)]
)
def test_squares_too_small_for_float64_fail_no_theorem(depth, scale):
    m = fl.measure(chain(depth, scale, dtype=torch.float64), torch.randn(3, 3).double())
    assert not failing(m)
    if scale**depth < 1e-140:
        assert any("too small for float64" in note for note in m.probe.notes)
        assert m["eq12"].verdict == "not applicable"


def test_squares_too_large_for_float64_are_refused():
    net = nn.Linear(3, 3).double()
    net.weight.data *= 1e160
    with pytest.raises(fl.FlatlensError, match=r"for sample 0, .* too large for float64"):
        fl.measure(net, torch.randn(2, 3).double())


def test_the_dimension_of_a_derivative_whose_square_vanishes():
    net = nn.Linear(3, 3, bias=False).double()
    net.weight.data = torch.eye(3).double() * 1e-200
    assert fl.local_dimension(fl.probe(net, torch.ones(1, 3).double())) == pytest.approx(3.0)
