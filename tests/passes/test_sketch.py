"""The sketched probe against the exact one: within its error bars, as often as they say."""

import copy
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binomtest, t
from torch import nn
from traps import ZOO, Case, Net, Once, enter, made, parameter, shaken
from traps.everyday import mostly_slow

import flatlens as fl
from flatlens.capture.inputs import select_output
from flatlens.measurement.layer_rows import layer_row
from flatlens.passes.sketch import MAX_DIRECTIONS, SketchStrategy
from flatlens.probes import Probe

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
LAYER_COLUMNS = ("sharpness", "adaptive_sharpness", "sharpness_untied")
EXACTLY = 1e-9  # what random signs leave alone (a diagonal Gram matrix) is right to rounding
NEEDS_ALL = {"eq8", "eq9", "eq10", "log_volume"}
FINE = 1e-8  # tolerance of Lanczos where values are compared to six digits


def widened(case: Case) -> Case:
    """The same network with three times its outputs, so that two directions are fewer than they."""

    def output(result):
        f = select_output(result, case.output)
        f = f.reshape(len(f), -1)
        return torch.cat([f, f.sin(), f.square()], 1)

    return Case(case.model, case.x, output)


@functools.cache
def both(name: str, float32: bool = False) -> tuple[Probe, Probe]:
    """Exact and sketched, from two directions."""
    case = widened(ZOO[name]())
    case = case.float32() if float32 else case
    exact = fl.probe(case.model, case.x, output=case.output)
    tolerance = 1e-4 if float32 else FINE
    p = fl.sketch(case.model, case.x, directions=2, output=case.output, tolerance=tolerance)
    assert p.sketch is not None
    return exact, p


CASES = [
    "inplace_relu",
    "inplace_bias_add_on_a_layers_output",
    "residual",
    "residual_added_in_place",
    "dense_skip",
    "qkv_on_one_tensor",
    "skip_that_takes_half_of_the_layer_away",
    "module_called_twice",
    "module_called_on_different_position_counts",
    "conv_called_twice",
    "tied_linear_linear",
    "tied_transposed",
    "shared_bias",
    "weight_used_in_a_linear_and_elsewhere",
    "frozen_weight",
    "frozen_bias",
    "frozen_everything",
    "unused_parameters",
    "detached_branch",
    "free_scale_and_shift",
    "parameter_used_by_matmul",
    "bare_parameter_in_functional_linear",
    "conv2d_plain",
    "conv_grouped",
    "conv_circular",
    "conv_strided_with_unread_border",
    "conv1d_strided",
    "conv3d_grouped",
    "transposed_conv2d_overlapping",
    "batchnorm2d_eval",
    "layernorm_on_tokens",
    "groupnorm",
    "rmsnorm",
    "prelu_per_channel",
    "embedding_by_internal_indices",
    "cls_token_position_and_layerscale",
    "attention_self_batch_first",
    "attention_self_fused",
    "attention_cross_with_other_widths",
    "transformer_encoder_layer",
    "transformer_decoder_layer",
    "tokens_with_two_leading_axes",
    "tokens_folded_into_the_batch",
    "tokens_time_first",
    "tokens_that_cancel",
    "experts_with_as_many_tokens_of_each_sample",
    "gru",
    "weight_norm",
    "low_rank_adapter_on_a_frozen_layer",
    "one_output",
    "one_sample",
    "more_outputs_than_inputs",
    "bottleneck_in_the_middle",
    "dead_relu",
    "relu_dead_at_one_sample",
    "zero_sample",
    "zero_sample_without_bias",
    "ill_conditioned_jacobian",
    "tiny_and_huge_scales",
    "output_of_two_axes",
    "tuple_of_inputs",
    "dict_of_inputs_with_token_ids",
    "input_that_the_output_ignores",
    "boolean_mask_among_the_inputs",
    "dropout_left_in_training_mode",
    "softmax_head",
    "sigmoid_head",
    "max_pool",
    "lenet",
    "unet",
    "narrow_head",
    "narrow_head_beside_a_skip_from_the_input",
]
every_case = pytest.mark.parametrize("name", mostly_slow(CASES))


def close(got, want, what, rtol=1e-6):
    size = np.abs(np.asarray(want)).max(initial=0.0)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-5 * size, err_msg=what)


# -- what is no estimate -------------------------------------------------------


@pytest.mark.slow
@every_case
def test_largest_singular_values_are_the_exact_ones(name):
    exact, p = both(name)
    assert p.sketch.converged
    close(fl.mls(p), fl.mls(exact), "mls")
    close(fl.nmls(p), fl.nmls(exact), "nmls")
    close(fl.nmls_through(p), fl.nmls_through(exact), "nmls_through")
    close(fl.weighted_nmls(p), fl.weighted_nmls(exact), "weighted_nmls")
    for got, want in zip([p.input, *p.layers], [exact.input, *exact.layers], strict=True):
        top = min(3, want.singular.shape[1])
        assert got.singular.shape == want.singular.shape
        close(got.singular[:, :top], want.singular[:, :top], "singular")
        assert np.isnan(got.singular[:, top:]).all()
        assert (got.rank == -1).all()


@pytest.mark.slow
@every_case
def test_what_needs_no_direction_is_the_same(name):
    exact, p = both(name)
    np.testing.assert_allclose(p.output, exact.output, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(p.input.x_norm, exact.input.x_norm, rtol=1e-12)
    for got, want in zip(p.layers, exact.layers, strict=True):
        for same in ("name", "kind", "weight", "bias", "positions", "M", "kappa", "reads_input"):
            assert getattr(got, same) == getattr(want, same)
        for same in ("x_norm", "patch_min", "patch_rank"):
            np.testing.assert_allclose(getattr(got, same), getattr(want, same), rtol=1e-10)
        # Zero is seen as zero, else "theorem" could be said of a layer with a bypass.
        assert ((got.bypass > 1e-12) == (want.bypass > 1e-12)).all()
    for got, want in zip(p.parameters, exact.parameters, strict=True):
        assert (got.name, got.path) == (want.name, want.path)
        assert got.grad.any() == want.grad.any()


# -- estimates -----------------------------------------------------------------


def estimates(p: Probe) -> dict:
    """(value, standard error) of all that has one."""
    found = {name: (getattr(fl, name)(p), error) for name, error in p.sketch.errors.items()}
    for i, (layer, errors) in enumerate(zip(p.layers, p.sketch.layer_errors, strict=True)):
        row = layer_row(p, layer)
        found |= {(i, name): (row[name], errors[name]) for name in LAYER_COLUMNS}
    return found


def truths(p: Probe, keys) -> dict:
    rows = [layer_row(p, layer) for layer in p.layers]
    return {k: rows[k[0]][k[1]] if isinstance(k, tuple) else getattr(fl, k)(p) for k in keys}


REPEATS, DIRECTIONS = {"dense": 400, "conv_residual": 60}, 6


@functools.cache
def exactly(name: str) -> Probe:
    case = NETWORKS[name]()
    return fl.probe(case.model, case.x)


@functools.cache
def repeated(name: str) -> list[tuple[dict, list[float]]]:
    """Of each seed, what has an error, and the layers' dimensions, which have none."""
    case, found = NETWORKS[name](), []
    for seed in range(REPEATS[name]):
        # Lanczos is not what is looked at here: its first step will do
        p = fl.sketch(case.model, case.x, directions=DIRECTIONS, seed=seed, top=1, tolerance=10.0)
        found.append((estimates(p), [float(q.dimension.mean()) for q in p.layers]))
    return found


def many(name: str) -> dict:
    """{what: (exact value, estimates, their errors)}."""
    found = [pairs for pairs, _ in repeated(name)]
    exact = truths(exactly(name), found[0])
    return {key: (want, *np.array([f[key] for f in found]).T) for key, want in exact.items()}


@pytest.mark.slow
@every_case
def test_estimates_lie_within_a_few_errors(name):
    """Two directions: the quantile of one degree of freedom that fails once in 10,000 times."""
    exact, p = both(name)
    found = estimates(p)
    quantile = t.ppf(1 - 0.5e-4, 1)
    for key, want in truths(exact, found).items():
        value, error = found[key]
        assert error >= 0
        assert abs(value - want) <= quantile * error + EXACTLY * max(abs(want), 1e-3), key


NETWORKS: dict = {}
network = functools.partial(enter, into=NETWORKS)


@network
def dense():
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 16), "scale": parameter(16)}
    return made(Net(lambda s, x: s.b(torch.tanh(s.a(x))) * s.scale, **parts), 10, 8)


@network
def wide():
    """The same with more outputs than directions will be taken."""
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 600), "scale": parameter(600)}
    return made(Net(lambda s, x: s.b(torch.tanh(s.a(x))) * s.scale, **parts), 10, 8)


@network
def two_tokens():
    """Equal tokens, each with outputs of its own: every singular value occurs twice."""
    parts = {"a": nn.Linear(5, 5), "b": nn.Linear(5, 8)}
    case = made(Net(lambda s, x: s.b(torch.tanh(s.a(x))).flatten(1), **parts), 3, 1, 5)
    return Case(case.model, case.x.repeat(1, 2, 1))


@network
def conv_residual():
    parts = {"a": nn.Conv1d(2, 2, 3, padding=1), "b": nn.Conv1d(2, 4, 3, padding=1)}
    return made(Net(lambda s, x: s.b(x + torch.tanh(s.a(x))).flatten(1).square(), **parts), 2, 2, 6)


@network
def default_attention():
    def run(s, x):
        q, k, v = s.qkv(x).chunk(3, -1)
        h = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return s.out(x + h).flatten(1)

    return made(Net(run, qkv=nn.Linear(8, 24), out=nn.Linear(8, 3)), 3, 4, 8)


@network
def differentiable_once():
    return made(
        Net(lambda s, x: s.b(Once.apply(s.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6)), 3, 6
    )


@network
def equality():
    """One linear layer whose outputs all move together: Eq. 11 is an equality."""
    model = Net(lambda s, x: s.a(x) * s.gain, a=nn.Linear(40, 1, bias=False))
    model.register_buffer("gain", torch.randn(40))
    return made(model, 1, 40)


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say():
    """400 repeats, 95 % Student intervals, a binomial test at 1 %."""
    quantile = t.ppf(0.975, DIRECTIONS - 1)
    for key, (want, value, error) in many("dense").items():
        hits = int((np.abs(value - want) <= quantile * error + EXACTLY * want).sum())
        if (error <= EXACTLY * want).all():  # no noise at all: always right
            assert hits == len(value), key
        elif key == "local_dimension":
            # Jackknife errors of samples are summed, so that they have more degrees of freedom
            # than directions, and the interval is too wide rather than too narrow.
            assert binomtest(hits, len(value), 0.95, alternative="less").pvalue > 0.01, key
        else:
            assert binomtest(hits, len(value), 0.95).pvalue > 0.01, (key, hits)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATS)
def test_unbiased(name):
    """The mean over seeds is the exact value within four of its own errors."""
    for key, (want, value, _) in many(name).items():
        error = value.std(ddof=1) / len(value) ** 0.5
        # A root of an estimate is low by a share of its variance; a ratio by less.
        curved = key in ("matrix_normalized_sharpness", "local_dimension")
        room = 0.5 * value.var() / want if curved else 0.0
        assert abs(value.mean() - want) <= 4 * error + room + EXACTLY * want, key


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATS)
def test_errors_are_the_spread_over_seeds(name):
    for key, (want, value, error) in many(name).items():
        if value.std() > EXACTLY * want:
            plain = error if key == "local_dimension" else plain_error(value, error)
            assert np.sqrt(np.mean(plain**2)) == pytest.approx(value.std(), rel=0.3), key


def plain_error(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """The standard deviation over the root of the directions, from the error on the log scale."""
    quantile = t.ppf(0.975, DIRECTIONS - 1)
    squared = (np.log1p(quantile * error / value) / quantile) ** 2  # a^2 + 2 a^4
    return value * np.sqrt((np.sqrt(1 + 8 * squared) - 1) / 4)


@pytest.mark.slow
def test_error_falls_with_the_root_of_the_directions():
    case = NETWORKS["wide"]()
    few, lots = (
        fl.sketch(case.model, case.x, directions=directions, top=1, tolerance=10.0)
        for directions in (8, 512)
    )
    exact = fl.probe(case.model, case.x)
    close(fl.sharpness(lots), fl.sharpness(exact), "sharpness", rtol=0.01)
    for name in ("sharpness", "adaptive_sharpness", "input_invariant_mls", "sharpness_untied"):
        ratio = few.sketch.errors[name] / lots.sketch.errors[name]
        assert 2 < ratio < 32, name  # √64 = 8, from eight directions


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATS)
def test_local_dimension_of_layers_converges(name):
    """From a few directions each, without an error of its own."""
    found = np.array([dimensions for _, dimensions in repeated(name)]).T
    for layer, got in zip(exactly(name).layers, found, strict=True):
        want = layer_row(exactly(name), layer)["local_dimension"]
        assert abs(got.mean() - want) < 4 * got.std() / len(got) ** 0.5 + 0.03 * want


# -- rtol, chunks, seeds -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("rtol", [0.14, 0.07])
def test_rtol_is_met(rtol, chunk):
    case = NETWORKS["wide"]()
    x = case.x[:3] * torch.tensor([[10.0], [1.0], [0.1]])  # samples of unlike sharpness
    p = fl.sketch(case.model, x, directions=16, rtol=rtol, chunk=chunk, top=1, tolerance=10.0)
    assert p.sketch.directions < 600
    assert p.sketch.errors["sharpness"] <= rtol * fl.sharpness(p)
    assert p.notes == []
    exact = fl.sharpness(fl.probe(case.model, x))
    assert abs(fl.sharpness(p) / exact - 1) <= 5 * rtol


def test_rtol_that_is_met_at_once_adds_nothing():
    case = NETWORKS["wide"]()
    p = fl.sketch(case.model, case.x, directions=8, rtol=10.0, top=1, tolerance=10.0)
    assert p.sketch.directions == 8


def test_a_limit_that_stops_is_reported(monkeypatch):
    monkeypatch.setattr("flatlens.passes.sketch.MAX_DIRECTIONS", 20)
    case = NETWORKS["wide"]()
    p = fl.sketch(case.model, case.x, directions=6, rtol=0.015, top=1, tolerance=10.0)
    assert p.sketch.directions == 18
    assert p.notes == ["rtol=0.015 was not met within 20 directions"]
    assert MAX_DIRECTIONS > 1000


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sketch", "auto"])
def test_rtol_that_takes_all_products_is_exact_and_says_so(method):
    case = NETWORKS["wide"]()
    m = fl.measure(case.model, case.x, method=method, directions=8, rtol=1e-3)
    assert m.probe.sketch is None
    assert m["sharpness"] == fl.sharpness(fl.probe(case.model, case.x))
    assert re.match(
        r"exact: 600 products are no more than \d+ directions \(rtol=0.001\)", m.probe.notes[-1]
    )


@pytest.mark.slow
def test_directions_end_where_the_exact_pass_would(monkeypatch):
    """The first chunk was met with few directions; another one takes no more than all products."""
    case = NETWORKS["wide"]()
    x = case.x[:2] * torch.tensor([[0.01], [100.0]])
    needed = lambda strategy, *_: 600.0 if strategy.chunks else 0.0  # noqa: E731
    monkeypatch.setattr(SketchStrategy, "_directions_needed", needed)
    p = fl.sketch(case.model, x, directions=200, rtol=0.001, chunk=1, top=1, tolerance=10.0)
    assert p.sketch is not None
    assert p.notes == ["rtol=0.001 was not met within 600 directions"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain_mlp", "residual", "conv_called_twice", "attention_self_fused"]
)
def test_chunks_and_order_change_nothing(name):
    """A sample has random directions of its own, wherever it stands."""
    case = widened(ZOO[name]())
    run = functools.partial(fl.sketch, case.model, directions=2, output=case.output, tolerance=FINE)
    whole = run(case.x)
    turned = run(case.x.flip(0))
    for metric in (*whole.sketch.errors, "mls", "nmls"):
        want = getattr(fl, metric)(whole)
        assert getattr(fl, metric)(turned) == pytest.approx(want, rel=1e-9)
        for chunk in (1, 2):
            parts = run(case.x, chunk=chunk)
            assert getattr(fl, metric)(parts) == pytest.approx(want, rel=1e-9), (metric, chunk)
    batches = run([case.x[:1], case.x[1:]])
    np.testing.assert_allclose(fl.sharpness(batches), fl.sharpness(whole), rtol=1e-12)


def test_equal_samples_have_directions_of_their_own():
    """Or their errors would not average out."""
    case = NETWORKS["dense"]()
    p = fl.sketch(case.model, case.x[:1].expand(3, -1), directions=2, top=1, tolerance=10.0)
    assert len(set(p.layers[0].grad_weight)) == 3


def test_seeds_differ_and_repeat():
    case = NETWORKS["dense"]()
    first, again, other = (
        fl.sharpness(fl.sketch(case.model, case.x, directions=3, seed=s)) for s in (1, 1, 2)
    )
    assert first == again != other


# -- networks that ask for care ------------------------------------------------


def four_directions(x: torch.Tensor, model: nn.Module, **options) -> tuple[Probe, Probe]:
    exact, p = fl.probe(model, x), fl.sketch(model, x, directions=4, tolerance=FINE, **options)
    assert p.sketch is not None
    return exact, p


def test_zero_jacobian():
    """Every unit is dead at every sample: all is 0, with no error, and nothing is divided by 0."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    exact, p = four_directions(torch.rand(3, 6).double(), model)
    assert p.sketch.converged
    assert (p.input.singular[:, :3] == 0).all()
    assert fl.local_dimension(p) == fl.input_invariant_mls(p) == 0
    assert p.sketch.errors["local_dimension"] == 0
    assert fl.sharpness(p) == pytest.approx(fl.sharpness(exact), rel=1e-12)  # the last bias alone
    assert all(row.holds for row in fl.bounds(p))


def test_dead_at_one_sample():
    model = shaken(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).double())
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        model[0].weight.abs_()
        x[1] = -100.0
    exact, p = four_directions(x, model)
    assert p.input.singular[1, 0] == 0
    close(p.input.singular[:, :3], exact.input.singular[:, :3], "singular")


def test_rank_deficient():
    """Rank two: the third value is 0, and so is the volume of three."""
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    exact, p = four_directions(torch.randn(3, 6).double(), model)
    assert (p.input.singular[:, 2] == 0).all()
    assert fl.log_volume(p, top=3) == -np.inf
    close(fl.log_volume(p, top=2), fl.log_volume(exact, top=2), "top 2")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_beyond_the_rank_are_zero(dtype):
    """Products with A A^T leave the root of rounding where A has a zero: 1e-8 of the largest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 4), nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 30))
    model, x = model.to(dtype), torch.randn(3, 20).to(dtype)
    exact, p = fl.probe(model, x), fl.sketch(model, x, directions=4, top=6, tolerance=1e-6)
    assert p.sketch.converged
    for got, want in [(p.input, exact.input), *zip(p.layers, exact.layers, strict=True)]:
        got, want = got.singular[:, :6], want.singular[:, :6]
        assert ((got == 0) == (want == 0)).all()
        np.testing.assert_allclose(got, want, rtol=1e-4 if dtype == torch.float32 else 1e-9)
    assert fl.log_volume(p, top=5) == fl.log_volume(exact, top=5) == -np.inf
    assert np.isfinite(fl.log_volume(p, top=4))


@pytest.mark.parametrize("loss", [None, "cross_entropy"])
@pytest.mark.parametrize("last", [1e-3, 1e-5, 1e-7, 1e-9])
def test_small_values_are_not_taken_for_zero(last, loss):
    """Below the root of rounding there are still values above the rank rule."""
    Q = [torch.linalg.qr(torch.randn(12, 12).double()).Q for _ in range(2)]
    model = nn.Linear(12, 12, bias=False).double()
    values = torch.tensor([2.0, 1.0, last, *[0.0] * 9]).double()
    model.weight.data.copy_(Q[0] @ torch.diag(values) @ Q[1])
    x = torch.randn(3, 12).double()
    if loss is None:
        p, exact = fl.sketch(model, x, directions=4, top=5, tolerance=1e-9), fl.probe(model, x)
    else:
        p, exact = (
            fl.measure(model, x, loss=loss, directions=4, method=method).loss_aware.probe
            for method in ("sketch", "exact")
        )
        assert p.sketch.converged
    got, want = (q.input.singular[:, : 5 if loss is None else 3] for q in (p, exact))
    assert ((got == 0) == (want == 0)).all()
    assert (got <= want * (1 + 1e-6)).all()  # the smallest may be a lower end
    np.testing.assert_allclose(got, want, rtol=1e-2 if last > 1e-6 else 1.0)


def test_volume_of_the_top_few():
    case = NETWORKS["dense"]()
    exact = fl.probe(case.model, case.x)
    p = fl.sketch(case.model, case.x, directions=4, top=5, tolerance=1e-9)
    for top in range(1, 6):
        close(fl.log_volume(p, top=top), fl.log_volume(exact, top=top), f"top {top}")
    assert np.isnan(fl.log_volume(p))
    with pytest.raises(fl.FlatlensError, match=r"holds 5; make it with sketch\(..., top=6\)"):
        fl.log_volume(p, top=6)
    with pytest.raises(fl.FlatlensError, match="but there are"):
        fl.log_volume(p, top=1000)


def test_as_many_values_as_there_are():
    """Six inputs have six singular values: asked for, all are there, and the volume is."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12)).double()
    exact, p = four_directions(torch.randn(3, 6).double(), model, top=6)
    close(fl.log_volume(p), fl.log_volume(exact), "log_volume")


def test_values_that_occur_twice_are_found_twice():
    case = NETWORKS["two_tokens"]()
    exact = fl.probe(case.model, case.x)
    s = exact.input.singular
    np.testing.assert_allclose(s[:, 0], s[:, 1], rtol=1e-9)
    for top in (2, 3):
        p = fl.sketch(case.model, case.x, directions=2, top=top, tolerance=FINE)
        assert p.sketch.converged
        close(fl.log_volume(p, top=top), fl.log_volume(exact, top=top), f"top {top}")


@pytest.mark.parametrize("name", ["plain_mlp", "conv2d_plain", "attention_self_fused", "residual"])
def test_float32(name):
    exact, p = both(name, float32=True)
    assert p.dtype == torch.float32
    assert p.sketch.converged
    np.testing.assert_allclose(fl.mls(p), fl.mls(exact), rtol=1e-4)
    np.testing.assert_allclose(fl.nmls(p), fl.nmls(exact), rtol=1e-4)
    quantile = t.ppf(1 - 0.5e-4, 1)
    for key, want in truths(exact, p.sketch.errors).items():
        value, error = estimates(p)[key]
        assert abs(value - want) <= quantile * error + 1e-4 * abs(want), key


def test_default_attention_kernels_have_no_second_derivative_and_are_no_obstacle():
    case = NETWORKS["default_attention"]()
    exact, p = four_directions(case.x, case.model)
    close(fl.nmls(p), fl.nmls(exact), "nmls")
    value, error = estimates(p)["sharpness"]
    assert abs(value - fl.sharpness(exact)) < t.ppf(1 - 0.5e-4, 3) * error


def test_a_missing_second_derivative_is_reported():
    case = NETWORKS["differentiable_once"]()
    exact, p = four_directions(case.x, case.model)
    assert any("no second derivative" in note for note in p.notes)
    close(fl.nmls(p), fl.nmls(exact), "nmls")


def test_a_network_without_parameters():
    model = Net(lambda s, x: F.linear(torch.tanh(F.linear(x, s.w)), s.w))
    model.register_buffer("w", torch.randn(6, 6, dtype=torch.float64))
    exact, p = four_directions(torch.randn(3, 6).double(), model)
    assert fl.sharpness(p) == 0
    close(fl.nmls(p), fl.nmls(exact), "nmls")


def test_narrow_head_is_exact_where_that_is_as_cheap():
    case = ZOO["narrow_head"]()
    width = fl.probe(case.model, case.x).layers[-1].in_features
    p = fl.sketch(case.model, case.x, directions=width)
    assert p.sketch is None
    assert p.notes == [f"exact: {width} products are no more than {width} directions"]


# -- honesty -------------------------------------------------------------------


def test_unconverged_is_flagged_and_noted(monkeypatch):
    monkeypatch.setattr("flatlens.passes.sketched_spectra.MAX_STEPS", 3)
    model = nn.Sequential(nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 70)).double()
    x = torch.randn(2, 70).double()
    m = fl.measure(model, x, method="sketch", directions=4)
    assert m["spectra_converged"] == 0
    (note,) = m.probe.notes
    assert "did not meet tolerance=" in note
    assert "in 3 steps" in note
    assert "lower bounds" in str(m)
    exact = fl.probe(model, x)
    assert (m.probe.input.singular[:, 0] <= exact.input.singular[:, 0] * (1 + 1e-9)).all()
    assert np.isnan(m.probe.input.singular[:, 1:]).all()  # what is not known is not given
    monkeypatch.setattr("flatlens.passes.sketched_spectra.MAX_STEPS", 100)
    m = fl.measure(model, x, method="sketch", directions=4)
    assert m["spectra_converged"] == 1
    assert m.probe.notes == []


@pytest.mark.slow
@every_case
def test_verdicts_are_those_of_the_exact_pass_and_no_theorem_fails(name):
    exact, p = both(name)
    for got, want in zip(fl.bounds(p), fl.bounds(exact), strict=True):
        assert got.verdict != "theorem" or got.holds, got
        if got.verdict != "not applicable":
            assert got.verdict == want.verdict, got
            assert "estimates" in got.why


@pytest.mark.slow
@pytest.mark.parametrize("directions", [8, 32])
def test_no_theorem_is_reported_as_failing_at_equality(directions):
    """Eq. 11 is an equality, and S is not known: it may be far too low by chance."""
    case = NETWORKS["equality"]()
    sides = fl.bounds(fl.probe(case.model, case.x))["eq11"]
    assert sides.slack == pytest.approx(1, rel=1e-9)
    for seed in range(50):
        p = fl.sketch(case.model, case.x, directions=directions, seed=seed, top=1)
        assert p.sketch is not None
        assert all(row.holds for row in fl.bounds(p) if row.verdict == "theorem"), seed


def test_what_needs_all_singular_values_is_not_applicable():
    case = NETWORKS["dense"]()
    m = fl.measure(case.model, case.x, method="sketch", directions=4)
    for row in m.bounds:
        if row.name in NEEDS_ALL:
            assert row.verdict == "not applicable"
            assert "sketched pass" in row.why
    assert {"volume", "log_volume", "network_volume"}.isdisjoint(m.values)
    assert m["log_volume_top3"] == fl.log_volume(m.probe, top=3)
    assert not np.isnan(list(m.values.values())).any()


def test_measurement_carries_the_errors():
    case = NETWORKS["dense"]()
    m = fl.measure(case.model, case.x, method="sketch", directions=4, seed=3)
    errors = {name.removesuffix("_se"): v for name, v in m.values.items() if name.endswith("_se")}
    assert errors == m.probe.sketch.errors
    assert f"+- {m['sharpness_se']:.2g}" in str(m)
    assert m.probe.sketch.seed == 3
    assert m.to_dict()["sharpness_se"] == m["sharpness_se"] > 0
    assert list(m.layers["sharpness_se"]) == [e["sharpness"] for e in m.probe.sketch.layer_errors]
    assert "sharpness_se" not in fl.measure(case.model, case.x).layers


def test_the_model_is_left_as_found():
    case = ZOO["batchnorm_left_in_training_mode"]()
    model, x = case.model, case.x.clone()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    fl.measure(model, x, method="sketch", directions=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(x, case.x)
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    for p, g in zip(model.parameters(), grads, strict=True):
        assert p.grad is None if g is None else torch.equal(p.grad, g)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# -- the choice ----------------------------------------------------------------


def flat(width: int) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).double()
    return model, torch.randn(2, width).double()


def test_auto_is_exact_where_outputs_are_few_and_says_nothing():
    for width in (10, 50, 64):
        m = fl.measure(*flat(width))
        assert m.probe.sketch is None
        assert m.probe.notes == []


def test_auto_sketches_where_outputs_are_many_and_says_why():
    m = fl.measure(*flat(500))
    assert m.probe.sketch is not None
    assert [n for n in m.probe.notes if n.startswith("sketched: 500 products a sample against")]
    assert "sharpness_se" in m.values


def test_auto_is_exact_in_between_and_says_why():
    m = fl.measure(*flat(100))
    assert m.probe.sketch is None
    assert [n for n in m.probe.notes if n.startswith("exact: 100 products a sample against")]


@pytest.mark.parametrize(("budget", "method"), [(1e-9, "sketched"), (1e9, "exact")])
def test_budget_decides_and_says_so(budget, method):
    m = fl.measure(*flat(300), budget=budget)
    assert (m.probe.sketch is None) == (method == "exact")
    (note,) = m.probe.notes
    assert note.startswith(method)
    assert f"with a budget of {budget:g} s" in note


def test_asked_for_more_directions_than_outputs_it_is_exact():
    model, x = flat(10)
    m = fl.measure(model, x, method="sketch")
    assert m.probe.sketch is None
    assert m.probe.notes == ["exact: 10 products are no more than 32 directions"]
    assert m["sharpness"] == fl.sharpness(fl.probe(model, x))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"directions": 1}, "directions=1 give no standard error; use 2 or more"),
        ({"rtol": 0.0}, "rtol=0.0 is not a relative standard error; give a number"),
        ({"rtol": float("nan")}, "rtol=nan is not a relative standard error"),
        ({"method": "exactly"}, "method='exactly' is unknown; use one of auto, exact, sketch"),
        ({"method": "exact", "rtol": 0.1}, "rtol is for estimates; leave it out, or use method="),
        ({"budget": 3.0}, 'budget chooses the method; leave it out with method="sketch"'),
        ({"method": "exact", "budget": 3.0}, 'leave it out with method="exact"'),
        ({"method": "auto", "budget": 0.0}, "budget=0.0 is not a number of seconds; give a number"),
        ({"method": "auto", "budget": -1.0}, "budget=-1.0 is not a number of seconds"),
        ({"method": "auto", "budget": float("nan")}, "budget=nan is not a number of seconds"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options, says):
    with pytest.raises(fl.FlatlensError, match=says):
        fl.measure(*flat(5), **{"method": "sketch", **options})


def test_rtol_is_for_what_is_estimated_beside_an_exact_pass():
    model, x = flat(5)
    y, options = torch.zeros(2, 5), {"method": "exact", "quantities": ["mls", "hessian_trace"]}
    m = fl.measure(model, x, y, rtol=0.05, **options)
    assert 0 <= m["hessian_trace_se"] <= 0.05 * abs(m["hessian_trace"])


ARGUMENTS = """
import torch, flatlens as fl
net, x = torch.nn.Linear(2, 2), torch.ones(3, 2)
for call in (fl.measure, fl.sketch):
    for arguments in ((torch.tanh, x), (None, x), (net, None), (net, 3)):
        try:
            call(*arguments)
        except fl.FlatlensError as error:
            print(error)
"""


@pytest.mark.slow
def test_what_is_no_model_or_no_input_is_refused_in_one_sentence():
    """In a process of its own: here types are checked before the first line is run."""
    where = {**os.environ, "PYTHONPATH": str(Path(fl.__file__).parents[1])}
    command = [sys.executable, "-c", ARGUMENTS]
    made = subprocess.run(command, env=where, capture_output=True, check=True)
    lines = made.stdout.decode().splitlines()
    wanted = ["the model is a builtin", "the model is a NoneType", "x is None; give", "x is a int"]
    assert len(lines) == 8
    assert all(a.startswith(b) for a, b in zip(lines[:4], wanted, strict=True)), lines
    assert all("is not a torch.nn.Module" in line for line in lines[4:6]), lines
    assert all(a.startswith(b) for a, b in zip(lines[6:], wanted[2:], strict=True)), lines


def test_no_singular_value_at_all_is_refused():
    with pytest.raises(fl.FlatlensError, match="top=0 singular values cannot be found"):
        fl.sketch(*flat(5), top=0)


def test_spectra_of_layers_can_be_left_out():
    case = NETWORKS["dense"]()
    whole, p = (
        fl.sketch(case.model, case.x, directions=4, layers=layers, tolerance=FINE)
        for layers in (True, False)
    )
    close(fl.mls(p), fl.mls(whole), "mls")
    assert fl.sharpness(p) == fl.sharpness(whole)
    assert np.isnan(fl.nmls(p))
    assert all(row.holds for row in fl.bounds(p))
