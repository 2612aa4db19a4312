"""The benchmark of other packages; nothing here is timed.

Every side gives the same number, failures are reported, and tables and guard read the records.
"""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"
if not FOLDER.exists():
    pytest.skip("benchmarks are not part of the package", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import assemblies  # noqa: E402
import cells  # noqa: E402
import estimators  # noqa: E402
import guard  # noqa: E402
import peers  # noqa: E402
import sides  # noqa: E402
import tables  # noqa: E402
from cells import Cell  # noqa: E402

pytestmark = pytest.mark.slow

# what a side needs; the others need torch alone
LIBRARIES = {
    "backpack_ggn": "backpack",
    "backpack_l2": "backpack",
    "backpack_squares": "backpack",
    "opacus": "opacus",
    "curvlinops_hutchinson": "curvlinops",
    "curvlinops_hutchpp": "curvlinops",
    "eigenthings_hutchinson": "hessian_eigenthings",
    "eigenthings_hutchpp": "hessian_eigenthings",
}
# no dependencies of the tests: left to the benchmark itself
OTHERS = ("nngeometry", "asdl", "pyhessian", "nngeometry+autograd")
TINY = "mlp-16x2"


def needs(side):
    if library := LIBRARIES.get(side.partition("+")[0]):
        pytest.importorskip(library)


def options(*more):
    return peers.parse(["--here", "--repeats", "1", "--seeds", "2", *more])


def run(case, *names):
    """The record of the smallest cell, in this process."""
    return peers.measured(Cell(case, TINY, 2, 3), names, options())


@pytest.mark.filterwarnings("ignore")  # of hooks, by the peers
@pytest.mark.parametrize("side", [s for s in sides.PEERS if s not in OTHERS])
def test_exact_peer_agrees(side):
    needs(side)
    record = run("a", "floor", "flatlens", side)
    found = record["sides"]
    assert "error" not in found[side]
    other = (side, "flatlens") if side in peers.REFERENCES else ("flatlens", side)
    assert found[other[0]]["against"] is None
    assert found[other[1]]["against"] == other[0]
    assert found[other[1]]["difference"] < 1e-5
    assert found[side]["value"] == pytest.approx(found["flatlens"]["value"], rel=1e-5)
    assert cells.fastest(record) == side
    assert {"flatlens / floor", "flatlens / fastest peer"} <= cells.ratios(record).keys()
    assert len(found[side]["wall"]) == len(found[side]["cpu"]) == 2
    json.dumps(record)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "side"),
    [
        (case, side)
        for case in assemblies.EXTENTS
        for side in assemblies.whole_sides(case)
        if "+" in side and side not in OTHERS
    ],
)
def test_assembled_quantities_agree(case, side):
    needs(side)
    found = run(case, "floor", "flatlens", side)["sides"]
    (compared,) = (name for name in ("flatlens", side) if found[name]["against"])
    assert found[compared]["difference"] < 1e-4


@pytest.mark.parametrize("case", assemblies.EXTENTS)
def test_every_side_of_a_set_gives_the_same_numbers(case):
    torch.manual_seed(0)
    net, x = sides.network("lenet", 3).eval(), sides.images("lenet", 2)
    values = {
        k: assemblies.whole_sides(case)[k](net)(x, 2) for k in ("flatlens", "jacrev+autograd")
    }
    assert values["flatlens"].keys() == values["jacrev+autograd"].keys()
    assert peers.difference(values["jacrev+autograd"], values["flatlens"], 2) < 1e-3


def test_the_power_iteration_of_an_assembly_finds_the_norm_of_a_convolution():
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(2, 3, 3, stride=2, padding=1)
    columns = torch.func.jacrev(lambda v: layer(v[None])[0])(torch.randn(2, 7, 7))
    dense = columns.detach().reshape(-1, 98)
    norm = assemblies.convolution_norm(layer, torch.Size([1, 2, 7, 7]))
    assert norm == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=0.02)


def count(monkeypatch, owner, name):
    """A list that grows by the first argument of each call."""
    calls, real = [], getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(args[0])
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_an_assembly_decomposes_nothing_twice(monkeypatch):
    torch.manual_seed(0)
    net = sides.network("mlp-16x2", 2).eval()  # three layers; the first reads the flat image
    whole = assemblies.assembled("jacrev", assemblies.Extent())(net)
    norms, spectra = (count(monkeypatch, assemblies, name) for name in ("kernel_norm", "singular"))
    whole(sides.images("mlp", 4), 2)
    assert len(norms) == 3  # not per batch
    assert len(spectra) == 2 * 3  # two batches, three places
    W = torch.randn(7, 5)
    assert assemblies.kernel_norm(W) == pytest.approx(
        float(torch.linalg.matrix_norm(W, 2)), rel=1e-5
    )


@pytest.mark.parametrize("side", ["backpack_ggn", "backpack_l2", "backpack_l2+autograd"])
def test_no_peer_forms_what_it_need_not(side, monkeypatch):
    pytest.importorskip("backpack")
    net = sides.network(TINY, 2).eval()
    asked = count(monkeypatch, net, "forward")
    {**sides.PEERS, **assemblies.whole_sides("c1")}[side](net)(sides.images(TINY, 3), 3)
    # an image's derivative is asked for where it is part of the result, and only there
    assert [x.requires_grad for x in asked] == ["+" in side]


def test_the_lower_limit_of_s_leaves_out_the_image(monkeypatch):
    net = sides.network(TINY, 2).eval()
    x = sides.images(TINY, 3)
    places = []
    monkeypatch.setattr(sides.core, "backward_each_output", lambda _, to: places.append(len(to)))
    sides.lower_limit(net)(x, 3)
    sides.lower_limit_whole(net)(x, 3)
    assert places == [3, 4]


def test_assembled_quantities_agree_on_a_residual_network():
    torch.manual_seed(0)
    model = sides.network("resnet18", 2).eval()[3]  # one block
    net = torch.nn.Sequential(model, torch.nn.Flatten(), torch.nn.Linear(64 * 16, 2))
    x = torch.rand(2, 64, 4, 4)
    extent = assemblies.Extent()
    mine = assemblies.flatlens_whole(extent)(net)(x, 2)
    theirs = assemblies.assembled("jacrev", extent)(net)(x, 2)
    assert peers.difference(theirs, mine, 2) < 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", [s for s in sides.ESTIMATES if s not in OTHERS])
def test_estimators_estimate_s(side):
    needs(side)
    torch.manual_seed(0)
    net, x = sides.network("mlp-2x1", 2).eval(), sides.images(TINY, 3)
    exact = sum(sides.flatlens(net)(x, 3)) / 3
    estimate = sides.ESTIMATES[side](net, x)
    found = [estimate(30, seed) for seed in range(8)]
    assert sum(found) / 8 == pytest.approx(exact, rel=0.15)


def test_estimator_cell_climbs():
    record = run("b", "floor", "exact", "flatlens_sketch")
    rungs = record["sides"]["flatlens_sketch"]["rungs"]
    assert [r["products"] for r in rungs][:1] == [3]
    assert all(len(r["values"]) == 2 for r in rungs)
    assert cells.times_to(record)["flatlens_sketch"] > 0


def test_a_failing_side_is_reported_and_not_ranked(monkeypatch):
    def broken(model):
        raise NotImplementedError("no such layer in /some/where/file.py\nsecond line")

    monkeypatch.setitem(sides.EXACT, "broken", broken)
    monkeypatch.setitem(sides.EXACT, "wrong", lambda model: lambda x, batch: 1e9)
    record = run("a", "floor", "flatlens", "broken", "wrong")
    assert record["sides"]["broken"] == {"error": "NotImplementedError: no such layer in ..."}
    assert record["sides"]["wrong"]["difference"] > 1
    assert record["sides"]["wrong"]["against"] == "flatlens"
    assert cells.unchecked(record)  # nobody else could be asked
    assert cells.peers(record) == {}
    assert {side for side, _, _ in cells.failures([record])} == {"broken", "wrong"}
    assert "broken" in peers.line(record)


def test_a_side_in_its_own_process(tmp_path):
    path = tmp_path / "cells.jsonl"
    arguments = ["--models", TINY, "--outputs", "2", "--samples", "7", "--repeats", "1"]
    arguments += ["--budget", "0.2", "--sides", "loop", "--json", str(path)]
    peers.main(arguments)
    (record,) = cells.read(path).values()
    loop = record["sides"]["loop"]
    assert loop["ran"] <= 7
    assert loop["value"] > 0
    assert set(record["sides"]) == {"floor", "loop"}
    peers.main([*arguments, "--append"])  # nothing is left to do
    assert len(path.read_text().splitlines()) == 1
    with pytest.raises(SystemExit):
        peers.main(arguments)


def test_a_process_that_takes_too_long_is_given_up():
    cell, slow = Cell("a", TINY, 2, 3), options("--limit", "0.01")
    with pytest.raises(TimeoutError, match="not done"):
        peers.Process(cell, "loop", slow)


def test_flatlens_is_checked_against_the_loop(monkeypatch):
    monkeypatch.setitem(sides.EXACT, "flatlens", lambda model: lambda x, batch: [1.0] * len(x))
    found = run("a", "floor", "flatlens", "loop", "jacrev")["sides"]
    assert found["flatlens"]["against"] == found["jacrev"]["against"] == "loop"
    assert not cells.sound(found["flatlens"])
    assert cells.sound(found["loop"])
    assert cells.sound(found["jacrev"])


def test_values_are_compared_over_the_same_samples():
    found = {
        "flatlens": {"ran": 4, "value": [1.0, 2.0, 3.0, 6.0]},
        "loop": {"ran": 2, "value": [1.0, 2.0]},
        "opacus": {"ran": 4, "value": 3.0},  # the loop has no mean of four
        "jacrev": {"ran": 2, "value": 1.5},
        "floor": {"ran": 4, "value": None},
    }
    peers.compare(found)
    against = {name: side.get("against") for name, side in found.items()}
    assert against == {
        "flatlens": "loop",
        "loop": None,
        "opacus": "flatlens",
        "jacrev": "loop",
        "floor": None,
    }
    assert all(side.get("difference", 0.0) == 0.0 for side in found.values())


def test_a_second_call_is_made_and_then_as_many_as_fit():
    assert not peers.enough([], 3.0)
    assert not peers.enough([5.0], 3.0)  # the first is cold
    assert peers.enough([7.0], 3.0)
    assert peers.enough([3.0, 2.0], 3.0)
    assert not peers.enough([2.0, 2.0], 3.0)
    assert peers.enough([2.0, None, 2.1], 3.0)  # a call takes 2.05, whatever the repeat


def tries(monkeypatch, costs, side="opacus"):
    """The batch sizes that are tried, if a call takes so many seconds."""
    monkeypatch.setattr(peers, "made", lambda cell, side, n: (None, lambda batch: batch))
    monkeypatch.setattr(peers.core, "seconds", lambda work: costs[work()])
    return [batch for batch, _ in peers.tried(Cell("a", TINY, 2, 20), side, 1.0)]


def test_larger_batches_are_tried_as_long_as_they_pay(monkeypatch):
    assert tries(monkeypatch, {1: 2.0, 5: 2.2, 20: 3.0}) == [1, 5, 20]  # slow, but not linear
    assert tries(monkeypatch, {1: 0.1, 5: 0.9, 20: 1.0}) == [1, 5]
    assert tries(monkeypatch, {1: 1.0, 5: 5.1, 20: 20.0}) == [1, 5]
    assert tries(monkeypatch, {1: 1.0, 5: 1.0, 20: 1.0}, "loop") == [1]


def test_tuning_keeps_what_it_has_when_time_is_up(monkeypatch):
    def slower(cell, side, budget):
        yield 1, 0.5
        yield 5, 0.01
        time.sleep(60)

    monkeypatch.setattr(peers, "tried", slower)
    found = peers.tuned(Cell("a", TINY, 2, 20), "opacus", options("--budget", "0.2"))
    assert found == (5, 0.01)


# -- made records ----------------------------------------------------------------------------------


def side(*walls, peak=10.0, **more):
    return {
        "wall": list(walls),
        "cpu": list(walls),
        "peak_mib": peak,
        "ran": 100,
        "batch": 20,
    } | more


def made(cell, factor=1.0):
    """flatlens takes two floors, the peer four; one peer is wrong and one cannot."""
    found = {
        "floor": side(9.0, 1.0, 2.0),
        "lower_limit": side(9.0, 0.5, 1.0),
        "flatlens": side(9.0, 2.0 * factor, 4.0 * factor, peak=40.0 * factor, difference=0.0),
        "opacus": side(9.0, 4.0, 8.0, difference=1e-6),
        "asdl": side(9.0, 0.1, 0.2, difference=0.4),
        "nngeometry": {"error": "RuntimeError: sizes | differ"},
    }
    if cell.case == "b":
        rung = {"cpu": [1.0], "values": [102.0, 98.0]}
        rungs = [rung | {"products": 3, "wall": [1.0]}]
        found = {k: found[k] for k in ("floor", "opacus")}
        found["exact"] = found.pop("opacus")
        found |= {"pyhessian": side(rungs=rungs)}
        found |= {"flatlens_sketch": side(rungs=[rung | {"products": 3, "wall": [0.5]}])}
    facts = {"versions": {"torch": "1"}, "date": "2000-01-01", "processor": "P"}
    facts |= {"cores": 2, "python": "3", "commit": "abc"}
    return {"cell": cells.as_json(cell), "facts": facts, "sides": found, "truth": 100.0}


def test_ratios_are_medians_within_repeats():
    found = cells.ratios(made(Cell("a", "mlp", 10, 100)))
    assert found["flatlens / floor"] == 2
    assert found["flatlens / fastest peer"] == 0.5
    assert found["flatlens / fastest peer, memory"] == 4
    record = made(Cell("a", "mlp", 10, 1000))
    assert cells.seconds(record, "floor") == pytest.approx(15)  # 1.5 s for 100 samples


def test_no_cell_is_lost_where_repeats_do_not_pair_up(tmp_path):
    record = made(Cell("a", "mlp", 10, 100), 4.0)
    record["sides"]["flatlens"]["wall"] = [9.0, None, 8.0]
    record["sides"]["opacus"]["wall"] = [9.0, 4.0, None]
    record["sides"]["floor"]["wall"] = [1.0, None, None]  # a first call alone
    found = cells.ratios(record)
    assert found["flatlens / fastest peer"] == 2
    assert found["flatlens / floor"] == 8
    page = tables.page([record])
    assert "nan" not in page
    assert "S alone in the fastest peer's time (at most 1): 0 of 1 cells; the worst is 2.00" in page


def test_a_goal_counts_cells_where_flatlens_failed():
    good, bad, alone = (made(Cell("a", "mlp", 10, n)) for n in (1, 100, 1000))
    bad["sides"]["flatlens"] = {"error": "FlatlensError: no"}
    alone["sides"]["opacus"]["difference"] = 0.5
    (told,) = tables.goal([good, bad, alone], "flatlens / fastest peer", 1.0, "in time")
    assert "1 of 2 cells; the worst is 0.50 (a mlp N=10 n=1 threads=1)" in told
    assert "not met, as flatlens failed, in a mlp N=10 n=100 threads=1" in told
    assert "no peer to compare with in a mlp N=10 n=1000 threads=1." in told


def test_time_to_one_percent():
    assert cells.seconds_to([(3, 0.02, 1.0)]) == pytest.approx(4)  # beyond: 1 / error^2
    assert cells.seconds_to([(3, 0.1, 1.0), (12, 0.001, 100.0)]) == pytest.approx(10)
    assert cells.seconds_to([(3, 0.005, 1.0)]) == 1.0
    record = made(Cell("b", "mlp", 10, 100))
    assert cells.times_to(record) == pytest.approx({"pyhessian": 4, "flatlens_sketch": 2})
    assert cells.ratios(record) == pytest.approx({"flatlens_sketch / fastest peer": 0.5})


def test_tables_replace_only_their_own_part(tmp_path):
    path, docs = tmp_path / "cells.jsonl", tmp_path / "page.md"
    for cell in [Cell("a", "mlp", 10, 1000), Cell("b", "mlp", 10, 100), Cell("c1", "mlp", 10, 100)]:
        cells.append(path, made(cell))
    for cell in cells.PLANS["growth"][:3]:
        record = made(cell)
        record["facts"]["commit"] = "def"
        cells.append(path, record)
    docs.write_text("# Before\n")
    arguments = [str(path), "--docs", str(docs), "--figures", str(tmp_path)]
    tables.main(arguments)
    once = docs.read_text()
    docs.write_text(once + "\n# After\n")
    tables.main(arguments)
    assert docs.read_text() == once + "\n# After\n"
    assert once.startswith("# Before\n")
    assert "| mlp | 10 | 1,000 | 1 | 15.00 s | 0.50 (100) |" in once
    assert "**2.00 (100)** | 0.50 (Opacus) | 30.00 s / 30.00 s |" in once
    assert "| mlp | 10 | 1,000 | 1 | 90.00 s | 30.00 s | Opacus | 90.00 s | 60.00 s |" in once
    words = " ".join(once.split())  # prose is wrapped
    assert "commits abc, def, 2000-01-01. Machine: P, 2 cores" in words
    assert "~~0.10 (100)~~" in once  # wrong
    assert "NNGeometry: RuntimeError: sizes / differ (a mlp N=10 n=1000 threads=1; c" in words
    assert "~4 (12)" in once
    assert "in the time of the fastest assembly (at most 1): 1 of 1 cells" in words
    assert (tmp_path / "peers-growth.png").stat().st_size > 1000


def test_a_torn_line_is_no_cell(tmp_path):
    path, cell = tmp_path / "cells.jsonl", Cell("a", "mlp", 10, 100)
    cells.append(path, made(cell))
    with path.open("a") as stream:
        stream.write('{"cell": {"case"')
    assert list(cells.read(path)) == [cell]
    cells.append(path, made(Cell("a", "vgg", 10, 100)))
    assert len(cells.read(path)) == 2


def test_guard_fails_above_the_margin(tmp_path, capsys):
    cell, other = Cell("a", "mlp", 10, 100), Cell("c1", "mlp", 10, 100)
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("old", "same", "slow", "gone", "else")}
    cells.append(paths["old"], made(cell))
    cells.append(paths["same"], made(cell, 1.2))
    cells.append(paths["slow"], made(cell, 1.3))
    gone = made(cell)
    gone["sides"]["flatlens"] = {"error": "FlatlensError: no"}
    cells.append(paths["gone"], gone)
    cells.append(paths["else"], made(other))
    codes = [
        guard.main([str(paths[name]), "--committed", str(paths["old"])])
        for name in ("same", "slow", "gone", "else")
    ]
    assert codes == [0, 1, 1, 2]
    told = capsys.readouterr().out
    assert "flatlens / floor: 2.00, now 2.60" in told
    assert "peak MiB: 40.00, now 52.00" in told
    assert "now missing" in told


def test_plans_cover_what_they_promise():
    default = cells.PLANS["default"]
    assert {cell.model for cell in default} == set(sides.NETWORKS)
    assert {cell.outputs for cell in default} == {1, 10, 100, 1000}
    assert {1, 100, 1000} <= {cell.samples for cell in default}
    assert {cell.threads for cell in default} == {1, 2}
    assert set(cells.PLANS["guard"]) <= set(default)


def test_each_direction_of_the_sketch_that_is_timed():
    x = torch.randn(3, 50)
    each = estimators.sketched(torch.nn.Linear(50, 40), x, directions=5, seed=0)
    # ||grad (v . f)||^2 = ||v||^2 (||x||^2 + 1), whatever the signs of v
    want = 40 * (x.double().square().sum(1) + 1).mean()
    assert each == pytest.approx([float(want)] * 5, rel=1e-5)
