"""Every number of every network of the zoo against the oracle: 1e-10 (float32: 1e-4)."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from oracles import Truth, local_dimension, log_volume, oracle
from torch import nn
from torch.utils import _pytree as pytree
from traps import UNEVEN, ZOO
from traps.everyday import mostly_slow

import flatlens as fl
from flatlens import tuning
from flatlens.algebra.operator_norms import norm_by_products
from flatlens.inequalities.verdicts import NOT_ADAPTIVE
from flatlens.metrics import METRICS

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch about even kernels
every_case = pytest.mark.parametrize("name", mostly_slow(ZOO))

RTOL = 1e-10
# Gradients that vanish by symmetry (the key bias of attention, tokens that cancel) are rounding
# errors of size eps against the network's own scale: their squares are zero at 1e-20 of it.
ZERO = 1e-20
FLOAT32 = 1e-4


@functools.cache
def truth(name: str) -> Truth:
    case = ZOO[name]()
    return oracle(case.model, case.x, case.output)


@functools.cache
def probed(name: str):
    case = ZOO[name]()
    return fl.probe(case.model, case.x, output=case.output)


@functools.cache
def measured(name: str):
    case = ZOO[name]()
    return fl.measure(case.model, case.x, output=case.output)


def close(got, want, what: str, scale=0.0, rtol: float = RTOL) -> None:
    """Relative; `scale` is the absolute part, for what is exactly zero in theory."""
    agree = np.isclose(got, want, rtol=rtol, atol=scale)  # equal infinities agree
    assert np.shape(got) == np.shape(want), what
    assert agree.all(), f"{what}: {got} is not {want}"


def spectrum_close(got, want, scale, what: str, rtol: float = RTOL) -> None:
    """Singular values are defined up to eps of the largest, so that is their scale."""
    close(got, want, what, scale=rtol * scale[:, None], rtol=rtol)


def log_volume_tolerance(singular: np.ndarray, top: int | None = None) -> float:
    """1e-10, plus what rounding does to the smallest singular values, with a safety factor of 4.

    δσ_j is about eps σ_1 times the length of the sums behind an entry (about fifty: 1e-14 σ_1),
    hence δ Σ log σ_j ~ 1e-14 Σ σ_1/σ_j, which the condition number dominates.
    """
    good = singular[:, :top][singular[:, 0] > 0]
    with np.errstate(divide="ignore"):
        ratios = np.where(good > 1e-12 * good[:, :1], good[:, :1] / good, 0.0)
    return RTOL + 4 * 1e-14 * float(ratios.sum(1).max(initial=0.0))


def volume_tolerance(spectra: list) -> float:
    return max(log_volume_tolerance(one.singular) for one in spectra)


def gradient_scale(name: str) -> float:
    """The largest squared gradient of the network: nothing is zero except against this."""
    sizes = [0.0, *(p.grad.max() for p in truth(name).parameters)]
    sizes += [layer.untied.max() for layer in truth(name).layers or []]
    return ZERO * max(sizes)


# -- probe ---------------------------------------------------------------------


@every_case
def test_input(name):
    p, t = probed(name), truth(name)
    assert (p.n, p.N, p.M, p.dtype) == (t.n, t.N, t.M, torch.float64)
    close(p.output, t.output, "output", scale=1e-14)
    spectrum_close(p.input.singular, t.input.singular, t.input.singular[:, 0], "singular")
    np.testing.assert_array_equal(p.input.rank, t.input.rank)
    close(p.input.x_norm, t.input.x_norm, "x_norm")
    close(p.input.invariant, t.input.invariant, "invariant")


@every_case
def test_layers_are_named_and_shaped(name):
    for got, want in zip(probed(name).layers, truth(name).layers, strict=True):
        fields = [
            "kind",
            "weight",
            "bias",
            "has_bias",
            "positions",
            "in_features",
            "out_features",
            "M",
        ]
        if want.name is not None:
            # A product inside a parametrization has the name of the module that it belongs to.
            owner = want.name.split(".parametrizations")[0]
            assert got.name in (owner, f"{owner}#2")
        assert {f: getattr(got, f) for f in fields} == {f: getattr(want, f) for f in fields}


@every_case
def test_layer_numbers(name):
    zero = gradient_scale(name)
    for got, want in zip(probed(name).layers, truth(name).layers, strict=True):
        scale = np.maximum(want.singular[:, 0], want.singular_through[:, 0])
        for spectrum in ("singular", "singular_through"):
            spectrum_close(
                getattr(got, spectrum), getattr(want, spectrum), scale, f"{want.name} {spectrum}"
            )
        for rank in ("rank", "rank_through"):
            np.testing.assert_array_equal(
                getattr(got, rank), getattr(want, rank), f"{want.name} {rank}"
            )
        close(got.bypass, want.bypass, f"{want.name} bypass", scale=RTOL)
        close(got.gap_norm, want.gap_norm, f"{want.name} gap_norm", scale=RTOL * scale)
        for one in ("x_norm", "patch_min"):
            close(getattr(got, one), getattr(want, one), f"{want.name} {one}")
        for one in ("grad_weight", "grad_bias", "untied", "untied_bias", "adaptive"):
            close(getattr(got, one), getattr(want, one), f"{want.name} {one}", scale=zero)


def within(low: float, true: float, slack: float) -> bool:
    """Whether a norm lies between what an iteration found and its upper end, up to rounding."""
    return low * (1 - 1e-13) <= true <= low * (1 + slack) * (1 + 1e-13)


@every_case
def test_weight_norms(name):
    for got, want in zip(probed(name).layers, truth(name).layers, strict=True):
        close(got.norms.kernel, want.kernel, f"{want.name} kernel")
        close(got.norms.frobenius, want.frobenius, f"{want.name} frobenius")
        assert got.norm == got.norms.operator
        assert within(got.norms.operator, want.operator, got.norms.slack), want.name
        assert got.norms.slack <= 1e-6


LARGE = {  # too large to be decomposed: an iteration, and its upper end
    "padded": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 9, 8)),
    "strided": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=(1, 0)), (2, 9, 8)),
    "circular": (lambda: nn.Conv1d(3, 2, 5, padding=2, padding_mode="circular"), (3, 30)),
    "same": (lambda: nn.Conv1d(3, 2, 4, padding="same", dilation=2), (3, 30)),
    "grouped": (lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 6, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1), (2, 7, 6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_norms_by_iteration(name):
    build, shape = LARGE[name]
    torch.manual_seed(0)
    net = nn.Sequential(build(), nn.Flatten()).double()
    x = torch.zeros(1, *shape, dtype=torch.float64)
    dense = torch.autograd.functional.jacobian(net, x).flatten(2).squeeze(0)
    layer = fl.probe(net, x, output=lambda z: z[:, :1]).layers[0]
    true = float(torch.linalg.svdvals(dense)[0])
    assert within(layer.norms.operator, true, 1e-6)
    assert within(layer.norms.operator, true, layer.norms.slack)
    assert 0 < layer.norms.slack <= 0.05
    assert layer.norms.risk == 1e-9


def test_norms_by_iteration_of_a_few_distinct_values():
    """The iteration has seen all after as many steps; what it would add then is rounding."""
    for seed in range(250):
        g = torch.Generator().manual_seed(seed)
        n, k = (int(torch.randint(*ends, (1,), generator=g)) for ends in ((3, 40), (1, 5)))
        values = torch.rand(k, generator=g, dtype=torch.float64)
        values[0] *= (seed + 1) % 2
        d = values[torch.randint(k, (n,), generator=g)]
        norm = norm_by_products(lambda v, d=d: d * d * v, d)
        assert within(norm.value, float(d.max()), norm.slack), seed
        assert norm.slack <= 1e-6


@every_case
def test_parameters(name):
    p, t = probed(name), truth(name)
    assert [(q.name, q.numel) for q in p.parameters] == [(q.name, q.numel) for q in t.parameters]
    for got, want in zip(p.parameters, t.parameters, strict=True):
        close(got.grad, want.grad, want.name, scale=gradient_scale(name))
        close(got.adaptive, want.adaptive, want.name, scale=gradient_scale(name))
        if want.frozen or not want.used:
            assert got.path == ("frozen" if want.frozen else "unused"), want.name
            assert not got.grad.any()
            assert not got.adaptive.any()
        else:
            assert got.path in {"layer", "rule", "slow"}, want.name


@pytest.mark.parametrize("name", mostly_slow(UNEVEN))
def test_samples_that_make_different_calls_are_measured(name):
    case = UNEVEN[name]()
    t = oracle(case.model, case.x)
    for chunk in (None, 1, 2):
        try:
            p = fl.probe(case.model, case.x, chunk=chunk)
        except fl.FlatlensError as error:  # a batch decides for all of its samples
            if chunk == 1 or "other samples" not in str(error):
                raise
            continue
        close(p.input.singular, t.input.singular, "singular")
        for got, want in zip(p.parameters, t.parameters, strict=True):
            close(got.grad, want.grad, want.name)
        theorems = [b for b in fl.bounds(p) if b.verdict == "theorem"]
        assert all(b.holds for b in theorems)


@pytest.mark.slow
@every_case
def test_chunks_change_nothing(name):
    for chunk in (1, 2):
        same_numbers(name, chunk)


@pytest.mark.slow
@every_case
def test_products_in_batches_change_nothing(name, monkeypatch):
    monkeypatch.setattr(tuning, "MANY_PRODUCTS", 1)
    monkeypatch.setattr(tuning, "BATCHED_ROWS", 6)
    same_numbers(name)


class Peeking(torch.autograd.Function):
    """Its derivative looks at a value, which no batch of derivatives has."""

    @staticmethod
    def forward(_, x):
        return 2 * x

    @staticmethod
    def backward(_, g):
        return 2 * g if float(g.sum()) >= 0 else 2 * g.clone()


class Peeks(nn.Module):
    def forward(self, x):
        return Peeking.apply(x)


@pytest.mark.slow
@pytest.mark.parametrize("peeks", [False, True])
def test_many_outputs_of_few_samples_go_in_batches_where_that_can_be(peeks, monkeypatch):
    batched, calls = [], torch.autograd.grad

    def counted(*args, is_grads_batched=False, **options):
        batched.append(is_grads_batched)
        return calls(*args, is_grads_batched=is_grads_batched, **options)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 90), Peeks() if peeks else nn.Tanh(), nn.Linear(90, 80))
    net, x = net.double(), torch.randn(3, 5, dtype=torch.float64)
    t = oracle(net, x)
    monkeypatch.setattr(torch.autograd, "grad", counted)
    p = fl.probe(net, x)
    assert (sum(batched), len(batched) - sum(batched) >= 80) == ((1, True) if peeks else (1, False))
    close(p.input.singular, t.input.singular, "singular")
    for got, want in zip(p.parameters, t.parameters, strict=True):
        close(got.grad, want.grad, want.name)


def same_numbers(name, chunk=None):
    case, whole = ZOO[name](), numbers(probed(name))
    found = numbers(fl.probe(case.model, case.x, output=case.output, chunk=chunk))
    assert found.keys() == whole.keys()
    for key, value in found.items():
        # What vanishes by symmetry is other rounding noise each time; bypass is relative.
        scale = 1e-12 if key.endswith(("bypass", "chain")) else gradient_scale(name)
        close(value, whole[key], f"{chunk} {key}", scale=scale + spread(whole, key))


def numbers(p) -> dict[str, np.ndarray]:
    """Every array of a probe by a name of its own."""
    found = {f"input.{key}": value for key, value in vars(p.input).items()}
    for i, part in enumerate([*p.layers, *p.parameters]):
        found |= {f"{i}.{part.name}.{key}": value for key, value in vars(part).items()}
    found = {key: value for key, value in found.items() if isinstance(value, np.ndarray)}
    return {"output": p.output, **found}


def spread(found: dict[str, np.ndarray], key: str) -> float:
    """Spectra and the norm of a difference are judged against the largest singular value."""
    stem, _, last = key.rpartition(".")
    spectral = last.startswith("singular") or last == "gap_norm"
    return RTOL * float(found[f"{stem}.singular"].max()) if spectral else 0.0


# -- metrics -------------------------------------------------------------------


@every_case
def test_metrics(name):
    p, t = probed(name), truth(name)
    wanted = t.metrics()
    volumes = {
        "volume": [t.input],
        "network_volume": [t.input, *(t.layers or [])],
        "log_volume": [t.input],
    }
    for metric, want in wanted.items():
        got = getattr(fl, metric)(p)
        assert isinstance(got, float), metric
        if metric in volumes:
            tolerance = volume_tolerance(volumes[metric])
            close(
                got,
                want,
                metric,
                rtol=tolerance,
                scale=tolerance if metric == "log_volume" else 0.0,
            )
        elif metric == "matrix_normalized_sharpness" and any(q.norms.slack for q in p.layers):
            assert got * (1 - RTOL) <= want <= got * (1 + 1e-6)
        else:
            close(
                got,
                want,
                metric,
                scale=math.sqrt(gradient_scale(name))
                if "normalized_sharp" in metric
                else gradient_scale(name),
            )
    for top in range(1, t.input.singular.shape[1] + 1):
        want = float(np.mean(log_volume(t.input.singular, t.input.rank, top)))
        close(
            fl.log_volume(p, top=top),
            want,
            f"top {top}",
            scale=log_volume_tolerance(t.input.singular, top),
        )


@every_case
def test_measurement_repeats_the_probe(name):
    m, p, t = measured(name), probed(name), truth(name)
    for metric in t.metrics():
        np.testing.assert_array_equal(m[metric], getattr(fl, metric)(p), metric)
    assert list(m.coverage) == [q.name for q in t.parameters]
    assert m.coverage == {q.name: q.path for q in p.parameters}
    assert len(m.layers) == len(p.layers)
    assert set(t.per_sample()) <= set(m.samples)
    for key in t.per_sample():
        assert m.samples[key].shape == (t.n,), key
        close(np.mean(m.samples[key]), m[key], key, rtol=1e-12)


@every_case
def test_measurement_samples(name):
    m, t = measured(name), truth(name)
    volumes = volume_tolerance([t.input, *(t.layers or [])])
    for key, want in t.per_sample().items():
        rtol = volumes if "volume" in key else RTOL
        scale = volumes if key == "log_volume" else gradient_scale(name)
        close(m.samples[key], want, key, rtol=rtol, scale=scale)


@every_case
def test_measurement_layers(name):
    table = measured(name).layers
    for row, want in zip(table.to_dict("records"), truth(name).layers, strict=True):
        values = {
            "positions": want.positions,
            "in_features": want.in_features,
            "out_features": want.out_features,
            "x_norm": np.mean(want.x_norm),
            "mls": np.mean(want.singular[:, 0]),
            "mls_through": np.mean(want.singular_through[:, 0]),
            "local_dimension": np.mean(local_dimension(want.singular)),
            "sharpness": np.mean(want.grad_weight + want.grad_bias),
            "adaptive_sharpness": np.mean(want.adaptive),
            "sharpness_untied": np.mean(want.untied + want.untied_bias),
        }
        for column, value in values.items():
            close(row[column], value, f"{want.name} {column}", scale=gradient_scale(name))
        assert row["kind"] == want.kind
        close(row["bypass"], np.max(want.bypass), f"{want.name} bypass", scale=RTOL)
        tolerance = log_volume_tolerance(want.singular)
        mean = np.mean(log_volume(want.singular, want.rank))
        close(row["log_volume"], mean, f"{want.name} log_volume", rtol=tolerance, scale=tolerance)


@pytest.mark.parametrize("choice", ["operator", "kernel", "frobenius"])
@pytest.mark.parametrize(
    "name", ["plain_mlp", "conv_grouped", "conv_circular", "transposed_conv2d_overlapping"]
)
def test_weight_norm_selects(name, choice):
    case = ZOO[name]()
    p = fl.probe(case.model, case.x, weight_norm=choice)
    assert [layer.norm for layer in p.layers] == [
        getattr(layer.norms, choice) for layer in p.layers
    ]
    want = truth(name).metrics(choice)["matrix_normalized_sharpness"]
    got = fl.matrix_normalized_sharpness(p)
    assert got * (1 - RTOL) <= want <= got * (1 + 1e-6)


# -- sharpness alone -----------------------------------------------------------


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("at_once", [1, 10])
def test_sharpness_alone(name, at_once, monkeypatch):
    monkeypatch.setattr(tuning, "PRODUCTS_AT_ONCE", at_once)
    case, t = ZOO[name](), truth(name)
    m = fl.measure(case.model, case.x, output=case.output, quantities=["sharpness"])
    assert list(m.values) == ["sharpness"]
    assert (m.probe.layers, m.bounds) == ([], ())
    assert m.coverage == measured(name).coverage
    for got, want in zip(m.probe.parameters, t.parameters, strict=True):
        close(got.grad, want.grad, want.name, scale=gradient_scale(name))
    close(m["sharpness"], t.metrics()["sharpness"], "sharpness")


@pytest.mark.slow
@every_case
def test_without_adaptive_sharpness(name):
    """All else is as in the whole pass; what needs it is said to be missing."""
    case, t, whole = ZOO[name](), truth(name), measured(name)
    rest = [metric for metric in METRICS if metric != "adaptive_sharpness"]
    names = [
        b.name for b in whole.bounds if b.name not in METRICS and not b.name.startswith("eq44")
    ]
    asked = [*rest, *names]
    m = fl.measure(case.model, case.x, output=case.output, quantities=asked, method="exact")
    assert list(m.values) == rest
    for got, want in zip(m.probe.parameters, t.parameters, strict=True):
        close(got.grad, want.grad, want.name, scale=gradient_scale(name))
        assert np.isnan(got.adaptive).all()
    for metric in rest:
        assert m[metric] == pytest.approx(whole[metric], rel=1e-9, abs=1e-300, nan_ok=True), metric
    for got in fl.bounds(m.probe):
        want = whole.bound(got.name)
        if got.name == "eq44":
            assert (got.verdict, got.why) == ("not applicable", NOT_ADAPTIVE)
        elif got.name != "eq44_shared":
            assert (got.verdict, got.holds) == (want.verdict, want.holds), got.name
    assert [b.name for b in m.bounds] == names


# -- precision -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    sorted(
        set(ZOO)
        - {"ill_conditioned_jacobian", "tiny_and_huge_scales"}
        - {"samples_that_are_dead_but_for_the_tail_of_gelu"}  # measured in float64
    ),
)
def test_float32(name):
    case = ZOO[name]().float32()
    p = fl.probe(case.model, case.x, output=case.output)
    t = oracle(case.model, case.x, case.output, dtype=torch.float32)
    assert p.dtype == torch.float32
    assert p.output.dtype == np.float64
    spectrum_close(
        p.input.singular, t.input.singular, t.input.singular[:, 0], "singular", rtol=FLOAT32
    )
    total = sum(q.grad.max() for q in t.parameters)
    alone = fl.measure(case.model, case.x, output=case.output, quantities=["sharpness"]).probe
    for short, got, want in zip(alone.parameters, p.parameters, t.parameters, strict=True):
        close(got.grad, want.grad, want.name, rtol=FLOAT32, scale=1e-9 * total)
        close(short.grad, want.grad, want.name, rtol=FLOAT32, scale=1e-9 * total)
    for metric in (
        "sharpness",
        "mls",
        "nmls",
        "nmls_through",
        "normalized_mls",
        "sharpness_untied",
    ):
        if metric in t.metrics():
            close(getattr(fl, metric)(p), t.metrics()[metric], metric, rtol=FLOAT32)


# -- no trace ------------------------------------------------------------------


def snapshot(case) -> dict:
    """All that a measurement could leave behind."""
    model, seen = case.model, {}
    for path, module in model.named_modules():
        hooks = [key for key in vars(module) if key.endswith("hooks")]
        seen[path] = (
            module.training,
            {key: dict(getattr(module, key)) for key in hooks},
            sorted(vars(module)),
        )
    for path, p in model.named_parameters():
        seen[path, "p"] = (id(p), p.requires_grad, id(p.grad), p._version, p._backward_hooks)
        seen[path, "g"] = None if p.grad is None else p.grad.numpy().tobytes()
    seen["state"] = {key: value.numpy().tobytes() for key, value in model.state_dict().items()}
    seen["x"] = [t.numpy().tobytes() for t in pytree.tree_leaves(case.x)]
    seen["modes"] = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled(),
    )
    seen["rng"] = torch.get_rng_state().numpy().tobytes()
    return seen


@every_case
def test_the_model_is_left_as_found(name):
    case = ZOO[name]()
    for p in list(case.model.parameters())[::2]:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    case.model.train()
    next(
        iter(case.model.children()), case.model
    ).eval()  # a mixture of modes comes back as a mixture
    before = snapshot(case)
    fl.measure(case.model, case.x, output=case.output)
    assert snapshot(case) == before


AROUND = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["lenet", "cls_token_position_and_layerscale", "gru"])
def test_the_mode_around_the_call_changes_nothing(name, around):
    case = ZOO[name]().float32()
    want = fl.probe(case.model, case.x)
    with AROUND[around]():
        p = fl.probe(case.model, case.x)
    np.testing.assert_array_equal(p.output, want.output)
    close(fl.nmls(p), fl.nmls(want), "nmls", rtol=1e-6)
    close(fl.sharpness(p), fl.sharpness(want), "sharpness", rtol=1e-6)


def test_an_input_that_requires_grad_is_left_alone():
    case = ZOO["inplace_change_of_the_models_input"]()
    x = case.x.clone().requires_grad_()
    p = fl.probe(case.model, x)
    assert x.grad is None
    assert x.is_leaf
    assert torch.equal(x, case.x)
    close(fl.sharpness(p), truth("inplace_change_of_the_models_input").metrics()["sharpness"], "S")


def test_weights_that_the_forward_itself_changes_are_put_back():
    case = ZOO["embedding_by_internal_indices"]()
    case.model.emb.max_norm = 0.1  # looked-up rows are renormalised in place, in eval mode too
    before = case.model.emb.weight.detach().clone()
    fl.probe(case.model, case.x)
    assert torch.equal(case.model.emb.weight, before)


def test_buffers_that_the_forward_replaces_are_put_back():
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("last", None)

        def forward(self, x):
            self.count, self.last = self.count + 1, x.detach()
            return super().forward(x)

    net = Counts()
    fl.measure(net, torch.ones(2, 3))
    assert (float(net.count), net.last) == (0.0, None)
    assert set(net.state_dict()) == {"weight", "bias", "count"}


def test_hooks_on_a_parameter_neither_run_nor_count():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.p = nn.Linear(3, 3), nn.Parameter(torch.ones(3, 2))

        def forward(self, x):
            return self.a(x) @ self.p

    net, x, seen = Product(), torch.ones(2, 3), []
    plain = fl.measure(net, x)["sharpness"]
    net.p.register_hook(lambda g: seen.append(1) or 0.1 * g)
    assert fl.measure(net, x)["sharpness"] == plain
    assert not seen
    net(x).sum().backward()
    assert seen == [1]


def test_digits_are_those_of_the_parameters():
    net = nn.Linear(6, 1)
    net.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    m = fl.measure(net, torch.rand(1, 6))
    assert m.probe.dtype == torch.float32
    assert all(row.holds for row in m.bounds if row.verdict == "theorem")


def test_half_precision_is_measured_in_float32_and_says_so():
    case = ZOO["plain_mlp"]()
    model, x = case.model.bfloat16(), case.x.bfloat16()
    p = fl.probe(model, x)
    t = oracle(model, x, dtype=torch.float32)
    assert p.dtype == torch.float32
    assert "float32" in " ".join(p.notes)
    assert {q.dtype for q in model.parameters()} == {torch.bfloat16}
    close(fl.sharpness(p), t.metrics()["sharpness"], "sharpness", rtol=FLOAT32)


# -- ways to give x and y ------------------------------------------------------


def test_batches_and_loaders_give_the_same_samples():
    case, whole = ZOO["plain_mlp"](), probed("plain_mlp")
    labels = torch.tensor([0, 1, 2, 0])
    pairs = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(case.x, labels), batch_size=3
    )
    for x in ([case.x[:1], case.x[1:]], (row[None] for row in case.x), pairs):
        p = fl.probe(case.model, x)
        assert p.n == 4
        close(p.input.singular, whole.input.singular, "singular")
        close([q.grad for q in p.parameters], [q.grad for q in whole.parameters], "grad")


def test_a_memory_budget_changes_no_number():
    case, whole = ZOO["lenet"](), probed("lenet")
    p = fl.probe(case.model, case.x, memory=100_000)
    close(p.input.singular, whole.input.singular, "singular")
    close([q.grad for q in p.parameters], [q.grad for q in whole.parameters], "grad")


def test_a_measurement_can_be_read_in_every_form():
    m = measured("bottleneck_makes_rank_deficient")  # log_volume is -inf
    record = m.to_dict()
    assert record["log_volume"] == -math.inf
    assert m.to_pandas().shape == (1, len(record))
    assert json.loads(m.to_json(), parse_constant=pytest.fail)["coverage"] == m.coverage
    assert all(metric in m.table() for metric in truth("plain_mlp").metrics())
    assert all(name in m.table() for name in m.layers["name"])


def test_loss_and_accuracy():
    case, out = ZOO["plain_mlp"](), truth("plain_mlp").output
    labels = torch.tensor([0, 1, 2, 0])
    m = fl.measure(case.model, case.x, labels)
    assert m["loss"] == pytest.approx(((out - np.eye(3)[labels]) ** 2).sum(1).mean() / 2, rel=1e-12)
    assert m["accuracy"] == pytest.approx(100 * np.mean(out.argmax(1) == labels.numpy()))
    targets = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    m = fl.measure(case.model, case.x, targets)
    assert m["loss"] == pytest.approx(((out - targets.numpy()) ** 2).sum(1).mean() / 2, rel=1e-12)


# -- the test itself can fail --------------------------------------------------


def test_a_forgotten_bias_would_be_seen():
    t = truth("plain_mlp")
    without = sum(p.grad for p in t.parameters if not p.name.endswith("bias"))
    assert abs(without.mean() / t.metrics()["sharpness"] - 1) > 1e-3


def test_added_norms_on_reuse_would_be_seen():
    calls = [layer for layer in truth("module_called_twice").layers if layer.weight == "a.weight"]
    assert abs(sum(c.untied for c in calls).mean() / calls[0].grad_weight.mean() - 1) > 1e-3


def test_the_zoo_is_large_and_deterministic():
    assert len(ZOO) >= 65
    first, second = ZOO["lenet"](), ZOO["lenet"]()
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.model[0].weight, second.model[0].weight)


def test_norms_follow_a_weight_that_is_written_past_autograd():
    """Norms are remembered; what changes a weight must change them, however it is done."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    x = torch.rand(2, 2, 8, 8)
    net(x)
    other = {name: 3 * value for name, value in net.state_dict().items()}

    def doubled_in_place():
        with torch.no_grad():
            net[0].weight.mul_(2)

    def swapped():  # the same entries in another order: the same Frobenius norm
        net[0].weight.data = net[0].weight.data.flip(2).contiguous()
        net[0].weight.data[0], net[0].weight.data[1] = (
            net[0].weight.data[1].clone(),
            net[0].weight.data[0].clone(),
        )

    changes = [
        lambda: None,
        lambda: net[0].weight.data.mul_(2),
        doubled_in_place,
        swapped,
        lambda: net.load_state_dict(other),
    ]
    for change in changes:
        change()
        layer = fl.probe(net, x).layers[0]
        basis = torch.eye(128).reshape(128, 2, 8, 8)
        C = torch.nn.functional.conv2d(basis, net[0].weight).flatten(1)
        want = float(torch.linalg.matrix_norm(C.double().detach(), 2))
        assert want <= layer.norms.operator * (1 + layer.norms.slack)
        assert layer.norms.operator == pytest.approx(want, rel=2e-3)
        assert fl.probe(net, x).layers[0].norms == layer.norms
