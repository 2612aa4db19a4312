"""Probes of shares, put together: the probe of the whole, whatever the shares and their order."""

import functools
import itertools
import socket
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from traps import ZOO, Case
from traps.everyday import mostly_slow

import flatlens as fl
from flatlens.probes import Probe

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
CASES = [
    "plain_mlp",
    "residual",
    "module_called_twice",
    "conv2d_plain",
    "conv_called_twice",
    "frozen_weight",
    "free_scale_and_shift",
    "embedding_by_internal_indices",
    "attention_self_batch_first",
    "cls_token_position_and_layerscale",
    "relu_dead_at_one_sample",
    "narrow_head",
    "tuple_of_inputs",
]
WIDE = ["plain_mlp", "residual", "conv_called_twice", "attention_self_batch_first"]  # N > 2
SPLITS = [(1, 2), (2, 1), (1, 1, 1)]


def samples(case: Case, rows: slice):
    return case.mapped(lambda t: t[rows])


@functools.cache
def probed(name: str, start: int, end: int, sketched: bool = False) -> Probe:
    case, rows = ZOO[name](), slice(start, end)
    if sketched:
        return fl.sketch(case.model, samples(case, rows), directions=2, output=case.output)
    return fl.probe(case.model, samples(case, rows), output=case.output)


def shares(name: str, split: tuple[int, ...], sketched: bool = False) -> list[Probe]:
    ends = [0, *itertools.accumulate(split)]
    return [probed(name, a, b, sketched) for a, b in itertools.pairwise(ends)]


def facts(value, place: str = "") -> dict:
    """Every number and word of a probe by its place; how it was gone about (chunk) is no fact."""
    if isinstance(value, list) and not place.endswith("notes"):
        value = dict(enumerate(value))
    if hasattr(value, "__dataclass_fields__"):
        value = vars(value)
    if isinstance(value, dict):
        parts = [facts(v, f"{place}.{k}") for k, v in value.items() if k not in ("chunk", "notes")]
        return {key: v for part in parts for key, v in part.items()}
    return {place: value}


def agree(got: Probe, want: Probe, order: list[int] | None = None, but: tuple[str, ...] = ()):
    """Equal to 1e-12 of each number's own array, after the samples are put in ``order``."""
    left, right = facts(got), facts(want)
    assert left.keys() == right.keys()
    for key, b in right.items():
        a = left[key]
        if key.endswith(but):
            continue
        if isinstance(b, np.ndarray):
            per_sample = b.ndim and len(b) == want.n and not key.endswith(("curvature", "crossed"))
            b = b[order] if order is not None and per_sample else b
            size = np.abs(b[np.isfinite(b)]).max(initial=0.0)
            rtol = 1e-10 if key.endswith("patch_rank") else 1e-12  # a small root of a Gram matrix
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12 * size, err_msg=key)
        elif isinstance(b, float):
            assert a == pytest.approx(b, rel=1e-12, abs=0), key
        else:
            assert a == b, key


# What measures rounding (0 in theory) is other rounding in another batch.
ROUNDING = ("bypass", "chain", "beside", "path")


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", mostly_slow(CASES))
def test_any_split_is_the_whole(name, split):
    first, *rest = shares(name, split)
    n = sum(split)
    agree(first.merge(*rest), probed(name, 0, n), but=ROUNDING)


@pytest.mark.parametrize("name", mostly_slow(CASES))
def test_any_order_is_the_whole(name):
    parts = shares(name, (1, 1, 1))
    for order in itertools.permutations(range(3)):
        first, *rest = (parts[i] for i in order)
        merged = first.merge(*rest)
        agree(merged, probed(name, 0, 3), list(order), but=ROUNDING)
        for metric in ("sharpness", "nmls", "log_volume", "matrix_normalized_sharpness"):
            whole = getattr(fl, metric)(probed(name, 0, 3))
            rtol = 1e-10 if metric == "log_volume" else 1e-12  # small singular values
            assert getattr(fl, metric)(merged) == pytest.approx(whole, rel=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("sketched", [False, True])
@pytest.mark.parametrize("name", WIDE)
def test_grouping_changes_nothing(name, sketched):
    a, b, c = shares(name, (1, 1, 1), sketched)
    agree(a.merge(b).merge(c), a.merge(b.merge(c)))
    agree(a.merge(b).merge(c), a.merge(b, c))
    agree(a.merge(), a)


@pytest.mark.parametrize("name", mostly_slow(CASES))
def test_inequalities_of_the_merged_probe_are_those_of_the_whole(name):
    first, *rest = shares(name, (1, 2))
    for got, want in zip(fl.bounds(first.merge(*rest)), fl.bounds(probed(name, 0, 3)), strict=True):
        assert (got.name, got.verdict, got.holds) == (want.name, want.verdict, want.holds)
        np.testing.assert_allclose([got.lhs, got.rhs], [want.lhs, want.rhs], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_sketched_shares_are_the_sketch_of_the_whole(name, split):
    """A sample has its random directions wherever it stands; errors add in squares."""
    first, *rest = parts = shares(name, split, sketched=True)
    merged, whole = first.merge(*rest), probed(name, 0, 3, sketched=True)
    assert merged.sketch is not None
    assert merged.sketch.converged
    but = (*ROUNDING, *whole.sketch.errors, "converged")
    agree(merged, whole, but=but)
    for quantity in whole.sketch.errors:
        squares = [(p.n * p.sketch.errors[quantity]) ** 2 for p in parts]
        assert merged.sketch.errors[quantity] == pytest.approx(sum(squares) ** 0.5 / 3, rel=1e-12)
    for i in range(len(whole.layers)):
        squares = [(p.n * p.sketch.layer_errors[i]["sharpness"]) ** 2 for p in parts]
        error = merged.sketch.layer_errors[i]["sharpness"]
        assert error == pytest.approx(sum(squares) ** 0.5 / 3, rel=1e-12)


def test_a_share_that_did_not_converge_is_not_forgotten(monkeypatch):
    case = ZOO["plain_mlp"]()
    good = probed("plain_mlp", 0, 1, sketched=True)
    monkeypatch.setattr("flatlens.passes.sketched_spectra.MAX_STEPS", 1)
    bad = fl.sketch(case.model, case.x[1:2], directions=2, top=1)
    assert not bad.sketch.converged
    merged = good.merge(bad)
    assert not merged.sketch.converged
    assert merged.notes == bad.notes


def one(model: nn.Module, width: int = 4) -> Probe:
    return fl.probe(model.double(), torch.ones(2, width, dtype=torch.float64))


UNLIKE = {
    "other weights": lambda: one(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))),
    "other layers": lambda: one(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))),
    "other inputs": lambda: one(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3)), 5),
    "other outputs": lambda: one(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))),
}


@pytest.mark.parametrize("other", UNLIKE)
def test_probes_of_unlike_networks_are_refused(other):
    torch.manual_seed(0)
    p = one(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)))
    with pytest.raises(fl.FlatlensError, match="different networks or outputs"):
        p.merge(UNLIKE[other]())


def test_probes_of_unlike_precision_and_norm_are_refused():
    case = ZOO["conv2d_plain"]()
    p, single = probed("conv2d_plain", 0, 1), case.float32()
    with pytest.raises(fl.FlatlensError, match="different networks"):
        p.merge(fl.probe(single.model, single.x[1:]))
    with pytest.raises(fl.FlatlensError, match="different networks"):
        p.merge(fl.probe(case.model, case.x[1:], weight_norm="frobenius"))


def test_tokens_of_another_length_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.AdaptiveAvgPool2d((1, 3)), nn.Flatten()).double()
    short, long = (fl.probe(model, torch.ones(2, t, 3).double()) for t in (4, 5))
    with pytest.raises(fl.FlatlensError, match="different networks or outputs"):
        short.merge(long)


def test_exact_and_sketched_are_refused():
    with pytest.raises(fl.FlatlensError, match="some probes are exact and some sketched"):
        probed("plain_mlp", 0, 1).merge(probed("plain_mlp", 1, 2, sketched=True))


# -- several processes ---------------------------------------------------------


def network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 12)).double()
    x = torch.randn(5, 8, generator=g, dtype=torch.float64)
    return model, x, torch.randint(0, 12, (5,), generator=g)


OPTIONS = {
    "exact": {"method": "exact"},
    "auto": {},
    "cross_entropy": {"loss": "cross_entropy:0.1"},
    "sketch": {"method": "sketch", "directions": 4},
}


def rank_main(rank: int, port: int, folder: str) -> None:
    """What each of two processes does: rank 0 has three samples, rank 1 two."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        model, x, y = network()
        mine = slice(0, 3) if rank == 0 else slice(3, 5)
        found = {}
        for name, options in OPTIONS.items():
            m = fl.measure(model, x[mine], y[mine], distributed=True, **options)
            found[name] = (m.values, m.samples, m.rows, [vars(row) for row in m.bounds])
        wrapped = nn.parallel.DistributedDataParallel(model)
        found["wrapped"] = fl.measure(wrapped, x[mine], y[mine], distributed=True).values
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, (port, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_two_processes_get_the_whole_answer(ranks, name):
    model, x, y = network()
    whole = fl.measure(model, x, y, **OPTIONS[name])
    loose = 1e-3 if name == "sketch" else 1e-12  # Lanczos goes on until its whole batch is done
    for found in ranks:
        values, per_sample, rows, bounds = found[name]
        assert values.keys() == whole.values.keys()
        for quantity, value in whole.values.items():
            rtol = 1e-12 if f"{quantity}_se" in values else loose
            if not quantity.endswith("_se"):  # of a variance, which shares estimate each their own
                np.testing.assert_allclose(values[quantity], value, rtol=rtol, err_msg=quantity)
        for quantity, value in whole.samples.items():
            np.testing.assert_allclose(
                per_sample[quantity], value, rtol=max(loose, 1e-10), atol=1e-10, err_msg=quantity
            )
        assert [row["sharpness"] for row in rows] == pytest.approx(
            [row["sharpness"] for row in whole.rows], rel=1e-12
        )
        assert [row["verdict"] for row in bounds] == [row.verdict for row in whole.bounds]


@pytest.mark.slow
def test_both_processes_get_the_same(ranks):
    left, right = ranks
    for name in OPTIONS:
        assert left[name][0] == right[name][0]


@pytest.mark.slow
def test_what_wraps_a_model_for_several_processes_changes_nothing(ranks):
    for found in ranks:
        assert found["wrapped"] == found["auto"][0]


@pytest.mark.parametrize("method", ["auto", "exact", "sketch"])
def test_without_a_process_group_one_sentence_says_what_to_do(method):
    model, x, _ = network()
    with pytest.raises(fl.FlatlensError, match="init_process_group"):
        fl.measure(model, x, method=method, distributed=True)
