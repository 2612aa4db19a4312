"""A sketch of networks that have no second derivative: forward mode, or differences of outputs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import oracle
from scipy.stats import t
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from traps import ZOO, Case, Net, Once, enter, made

import flatlens as fl
from flatlens.capture.inputs import select_output
from flatlens.passes import forward
from flatlens.passes.forward_products import Way
from flatlens.passes.kernels import choose_kernels
from flatlens.passes.sketch import SketchStrategy

NETWORKS: dict = {}
DIRECTIONS, FINE = 4, 1e-6
QUANTILE = t.ppf(1 - 0.5e-4, DIRECTIONS - 1)


def network(build):
    return enter(build, NETWORKS)


# -- functions that can be differentiated once ---------------------------------


class OnceWithForwardMode(Once):
    """tanh, differentiable once in either direction."""

    @staticmethod
    def jvp(ctx, tangent):
        (y,) = ctx.saved_tensors
        return tangent * (1 - y * y)


class WrongForwardMode(OnceWithForwardMode):
    """Its forward mode is wrong by a factor of two."""

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * OnceWithForwardMode.jvp(ctx, tangent)


class StraightThrough(torch.autograd.Function):
    """Rounds, and hands gradients on as if it did not."""

    @staticmethod
    def forward(ctx, x):
        return (8 * x).round() / 8

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g.clone()


def with_function(function, *sizes):
    a, b, c = sizes
    net = Net(lambda s, x: s.b(function(s.a(x))), a=nn.Linear(a, b), b=nn.Linear(b, c))
    return made(net, 3, a)


# -- networks, named after the trap --------------------------------------------


@network
def differentiable_once():
    return with_function(Once.apply, 4, 6, 7)


@network
def forward_mode_only():
    return with_function(OnceWithForwardMode.apply, 4, 6, 7)


@network
def forward_mode_is_wrong():
    return with_function(WrongForwardMode.apply, 4, 6, 7)


@network
def kinks():
    return with_function(lambda h: Once.apply(h).relu(), 4, 12, 7)


@network
def changed_in_place_before_a_layer():
    def run(s, x):
        h = s.a(x)
        h.relu_()
        return s.b(Once.apply(h)) + s.c(h)

    return made(Net(run, a=nn.Linear(6, 9), b=nn.Linear(9, 7), c=nn.Linear(9, 7)), 3, 6)


@network
def skip_beside_a_layer():
    """The input of each layer has other readers, one of them a function that no mode sees."""

    def run(s, x):
        h = x + Once.apply(s.a(x))
        h = h.sin() + s.b(h) + Once.apply(h)
        return s.c(torch.cat([h, h.square()], 1))

    parts = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "c": nn.Linear(12, 7)}
    return made(Net(run, **parts), 3, 6)


@network
def reads_before_the_layer_does():
    """A custom function reads the layer's input before the layer, and made it as well."""

    def run(s, x):
        h = Once.apply(s.a(x))
        before = Once.apply(h)
        return s.b(h) * before.sum(1, keepdim=True)

    return made(Net(run, a=nn.Linear(6, 9), b=nn.Linear(9, 7)), 3, 6)


@network
def convolution():
    def run(s, x):
        return s.b(Once.apply(s.a(x)).flatten(1))

    return made(Net(run, a=nn.Conv2d(2, 3, 3), b=nn.Linear(27, 7)), 3, 2, 5, 5)


@network
def recurrence():
    """Two steps: the state is made and read inside the recurrent layer."""

    def run(s, x):
        return s.out(Once.apply(s.rnn(x)[0]).flatten(1))

    return made(Net(run, rnn=nn.RNN(2, 3, batch_first=True), out=nn.Linear(6, 8)), 2, 2, 2)


@network
def tokens():
    def run(s, i):
        return s.a(Once.apply(s.table(i)).mean(1))

    model = Net(run, table=nn.Embedding(9, 6), a=nn.Linear(6, 7))
    return Case(model, torch.randint(0, 9, (3, 4)))


@network
def frozen_table():
    case = NETWORKS["tokens"]()
    case.model.table.weight.requires_grad_(False)
    return case


@network
def two_inputs():
    def run(s, x, z):
        return s.b(Once.apply(s.a(x)) * z)

    model = Net(run, a=nn.Linear(6, 9), b=nn.Linear(9, 7))
    return Case(model, (torch.randn(3, 6), torch.randn(3, 9)))


@network
def constant_feeds_a_layer():
    def run(s, x):
        return s.b(Once.apply(s.a(x) + s.q(torch.ones(len(x), 2, dtype=x.dtype))))

    parts = {"a": nn.Linear(6, 9), "q": nn.Linear(2, 9), "b": nn.Linear(9, 7)}
    return made(Net(run, **parts), 3, 6)


@network
def flash_attention():
    """The network insists on the fused kernel, which has no second derivative."""

    def run(s, x):
        q, k, v = (h.unflatten(-1, (2, 4)).transpose(1, 2) for h in s.qkv(x).chunk(3, -1))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            h = F.scaled_dot_product_attention(q, k, v)
        return s.out(x + h.transpose(1, 2).flatten(2)).flatten(1)

    return made(Net(run, qkv=nn.Linear(8, 24), out=nn.Linear(8, 3)), 3, 4, 8)


def truth(case) -> dict:
    """Every quantity from the oracle; it knows no derivative by tokens, which exact passes have."""
    if isinstance(case.x, tuple) or case.x.is_floating_point():
        return oracle(case.model, case.x).metrics()
    exact = fl.probe(case.model, case.x)
    return {name: metric(exact) for name, metric in fl.metrics.METRICS.items()}


def sketched(case, **options):
    options = {"directions": DIRECTIONS, "tolerance": FINE} | options
    p = fl.sketch(case.model, case.x, **options)
    assert p.sketch is not None
    return p


def assert_covers(p, exact: dict, tolerance=FINE):
    """Every interval covers, and largest singular values are right to the tolerance."""
    for name, error in p.sketch.errors.items():
        value, want = getattr(fl, name)(p), exact[name]
        assert abs(value - want) <= QUANTILE * error + tolerance * abs(want), name
    for name in ("mls", "nmls", "nmls_through", "normalized_mls"):
        value, want = getattr(fl, name)(p), exact[name]
        assert abs(value - want) <= 2 * p.sketch.errors[name] + 1e-12 * want, name
        np.testing.assert_allclose(getattr(fl, name)(p), exact[name], rtol=tolerance, err_msg=name)


# -- numbers -------------------------------------------------------------------


DAILY = {"differentiable_once", "forward_mode_only", "kinks", "flash_attention", "two_inputs"}


@pytest.mark.parametrize(
    "name",
    [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS],
)
def test_a_network_without_second_derivatives_is_measured(name):
    case = NETWORKS[name]()
    p = sketched(case)
    assert p.sketch.converged
    assert_covers(p, truth(case))
    assert 0 < p.sketch.errors["mls"] < FINE * fl.mls(p)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["differentiable_once", "kinks", "flash_attention"])
def test_float32_within_the_default_tolerance(name):
    case = NETWORKS[name]()
    exact = truth(case)
    p = sketched(case.float32(), tolerance=1e-2)
    assert p.dtype == torch.float32
    assert_covers(p, exact, 1e-3)
    error = p.sketch.errors["mls"]
    assert error < 1e-2 * fl.mls(p)
    assert abs(fl.mls(p) - exact["mls"]) <= error
    assert fl.mls(p) <= exact["mls"] * (1 + 1e-5)  # gradients give the value: never above


def test_a_loss():
    case = NETWORKS["differentiable_once"]()
    y = torch.randint(0, 7, (3,), generator=torch.Generator().manual_seed(0))
    options = {"loss": "cross_entropy", "quantities": ["mls"]}
    exact = fl.measure(case.model, case.x, y, method="exact", **options)
    m = fl.measure(case.model, case.x, y, method="sketch", directions=DIRECTIONS, **options)
    assert m["loss_mls"] == pytest.approx(exact["loss_mls"], rel=1e-4)
    assert m["mls"] == pytest.approx(exact["mls"], rel=1e-4)
    assert m["mls_se"] > 0


@pytest.mark.slow
def test_chunks_change_nothing():
    case = NETWORKS["reads_before_the_layer_does"]()
    whole, single = sketched(case), sketched(case, chunk=1)
    for name in ("mls", "nmls", "local_dimension", "sharpness"):
        np.testing.assert_allclose(getattr(fl, name)(single), getattr(fl, name)(whole), rtol=1e-6)


def test_the_same_intervals_as_by_second_derivatives():
    """The same network with torch's own tanh: the same directions, and the same error bars."""
    case = NETWORKS["differentiable_once"]()
    p = sketched(case)
    twice = Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=case.model.a, b=case.model.b)
    want = sketched(Case(twice, case.x))
    assert "mls" not in want.sketch.errors
    for name, error in want.sketch.errors.items():
        assert p.sketch.errors[name] == pytest.approx(error, rel=1e-6), name
        assert getattr(fl, name)(p) == pytest.approx(getattr(fl, name)(want), rel=1e-6), name


# -- which way -----------------------------------------------------------------


def notes_of_lanczos(p):
    return [note for note in p.notes if note.startswith("products of Lanczos")]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("differentiable_once", "differences"),
        ("flash_attention", "differences"),
        ("forward_mode_is_wrong", "differences"),
        ("forward_mode_only", "forward mode"),
    ],
)
def test_the_way_is_noted_with_its_reason(name, way):
    (note,) = notes_of_lanczos(sketched(NETWORKS[name]()))
    assert note.startswith(f"products of Lanczos by {way}")
    assert "no second derivative: " in note


def test_forward_mode_is_right_to_rounding():
    case = NETWORKS["forward_mode_only"]()
    twice = Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=case.model.a, b=case.model.b)
    p, want = sketched(case), sketched(Case(twice, case.x))
    for name in ("mls", "nmls", "local_dimension"):
        assert getattr(fl, name)(p) == pytest.approx(getattr(fl, name)(want), rel=1e-11), name


def test_a_network_with_second_derivatives_says_nothing():
    assert Way().note == ""
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7)).double()
    p = sketched(Case(model, torch.randn(3, 6, dtype=torch.float64)))
    assert not notes_of_lanczos(p)
    assert not {"mls", "nmls"} & set(p.sketch.errors)


TRAPS = [
    "inplace_scale_of_tokens_that_a_frozen_layer_read",
    "weight_that_is_also_the_input_of_a_layer",
    "attention_self_fused",
]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["forward mode", "differences"])
@pytest.mark.parametrize("name", TRAPS)
def test_every_way_gives_the_numbers_of_second_derivatives(monkeypatch, name, way):
    case = ZOO[name]()

    def output(result):
        f = select_output(result, case.output).flatten(1)
        return torch.cat([f, f.sin(), f.square()], 1)

    options = {"directions": 2, "tolerance": FINE, "output": output}
    want = sketched(case, **options)
    monkeypatch.setattr("flatlens.passes.sketch.Way", lambda: Way(way, "forced"))
    p = sketched(case, **options)
    assert p.sketch.converged
    (note,) = notes_of_lanczos(p)
    assert note.startswith(f"products of Lanczos by {way}")
    for name in ("mls", "nmls", "nmls_through"):
        assert getattr(fl, name)(p) == pytest.approx(getattr(fl, name)(want), rel=FINE), name


# -- derivatives that differences do not see -----------------------------------


def detached(h):
    return Once.apply(h) * h.detach()


@pytest.mark.parametrize("function", [detached, StraightThrough.apply])
def test_differences_that_disagree_with_gradients_are_refused(function):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = with_function(function, 4, 6, 7)
    with pytest.raises(fl.FlatlensError, match=r'do not agree with its gradients; use method="ex'):
        sketched(Case(case.model.double(), case.x.double()))


def test_errors_above_the_tolerance_are_flagged(monkeypatch):
    """Coarse steps: the values are lower ends, and the errors say how far they may be off."""
    monkeypatch.setattr("flatlens.passes.difference_steps.STEP_FACTORS", (4096.0,))
    case = NETWORKS["differentiable_once"]()
    p, exact = sketched(case, tolerance=1e-9), truth(case)
    assert not p.sketch.converged
    assert any("largest singular values are lower bounds" in note for note in p.notes)
    assert_covers(p, exact, 1e-3)
    assert fl.mls(p) <= exact["mls"] * (1 + 1e-12)


# -- passes --------------------------------------------------------------------


def passes(monkeypatch, model, x, **options) -> int:
    """Count forward and backward passes of a sketch."""
    count = 0

    def counting(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", counting(torch.autograd.grad))
        patch.setattr(forward.Subject, "run", counting(forward.Subject.run))
        fl.sketch(model, x, **options)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("function", [Once, OnceWithForwardMode])
def test_at_most_1_3_times_the_passes(monkeypatch, function):
    torch.manual_seed(0)
    a, b, x = nn.Linear(20, 30), nn.Linear(30, 36), torch.randn(2, 20)

    def run(tanh):
        return passes(monkeypatch, Net(lambda s, x: s.b(tanh(s.a(x))), a=a, b=b), x)

    assert run(function.apply) <= 1.3 * run(torch.tanh)


# -- kernels of attention ------------------------------------------------------


def by_flex(s, x):
    q, k, v = (h.unflatten(-1, (2, 4)).transpose(1, 2) for h in s.qkv(x).chunk(3, -1))
    return s.out(flex_attention(q, k, v).transpose(1, 2).flatten(2)).flatten(1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("method", ["exact", "sketch"])
def test_flex_attention_has_no_backward_pass_on_a_cpu(method):
    model = Net(by_flex, qkv=nn.Linear(8, 24), out=nn.Linear(8, 3))
    with pytest.raises(fl.FlatlensError, match="does not support backward on CPU"):
        fl.measure(model, torch.randn(3, 4, 8), method=method, directions=DIRECTIONS)


class Attention(nn.Module):
    """Attention by whichever kernel torch takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = (h.unflatten(-1, (2, 4)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v)
        return self.out(x + h.transpose(1, 2).flatten(2)).flatten(1)


def kernels_of(monkeypatch, **options):
    """The names of the nodes of attention in the passes of a sketch."""
    names, run = set(), SketchStrategy.run

    def spy(self, *args):
        result = run(self, *args)
        names.update(n.name() for n in result.graph.nodes if "Attention" in n.name())
        return result

    monkeypatch.setattr(SketchStrategy, "run", spy)
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    p = fl.sketch(Attention(), x, directions=DIRECTIONS, **options)
    return names, p


def test_few_scores_take_the_plain_kernel(monkeypatch):
    names, p = kernels_of(monkeypatch)
    assert not names
    assert p.notes == []


def test_many_scores_keep_the_fused_kernel(monkeypatch):
    monkeypatch.setattr("flatlens.passes.kernels.MOST_SCORE_BYTES", 100)
    names, p = kernels_of(monkeypatch)
    assert any("FlashAttention" in name for name in names)
    assert any(note.startswith("attention keeps its own kernel") for note in p.notes)
    assert len(notes_of_lanczos(p)) == 1


def test_a_switched_off_plain_kernel_stays_off(monkeypatch):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        names, p = kernels_of(monkeypatch)
        assert not choose_kernels(1, torch.float32, 1).plain
    assert any("FlashAttention" in name for name in names)
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    exact = fl.probe(Attention().double(), x.double())
    assert fl.mls(p) == pytest.approx(fl.mls(exact), rel=1e-3)
