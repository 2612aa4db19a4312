"""The paper redrawn: recipes are what they say, the smoke scale runs, records give it all again."""

import gzip
import json
import math
import re
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens import FlatlensError, cli
from flatlens.analysis.run_table import finished, followed
from flatlens.measurement.quantities import read_request
from flatlens.reproduction import drawing, training
from flatlens.reproduction.archive import read_records, write_records
from flatlens.reproduction.claims import TEXTS
from flatlens.reproduction.judgement import judged, overview
from flatlens.reproduction.recipe import ALONE, SCALES, drawings, recipes
from flatlens.reproduction.recipe_records import frames_of_runs
from flatlens.reproduction.reproduce import reproduce
from flatlens.reproduction.timing import duration
from flatlens.training.authors import EPSILON, bound_authors, d_authors, split
from flatlens.training.config import due_steps
from flatlens.training.sweep import SweepError

pytestmark = pytest.mark.slow

FIGURES = {
    "mlp": ["h8", "h9", "g4", "g6"],
    "lenet": ["g7"],
    "vgg": ["fig1", "fig2", "g5"],
    "d3": ["d3"],
}
FIVE = {(0.05, 20), (0.1, 20), (0.2, 20), (0.1, 8), (0.1, 32)}
SWEEPS = [name for name in FIGURES if name != "d3"]


# ------------------------------------------------------------------ recipes


def test_every_figure_has_a_recipe():
    assert {r.name: list(r.figures) for r in recipes().values()} == FIGURES
    assert {name: [d.name for d in drawn] for name, drawn in drawings(["all"]).items()} == {
        name: drawn for name, drawn in FIGURES.items() if name not in ALONE
    }


def test_every_claim_on_trained_networks_is_tested_by_a_figure():
    asked = {c for r in recipes().values() for d in r.figures.values() for c in d.claims}
    assert asked == set(TEXTS)


@pytest.mark.parametrize(("scale", "seeds"), [("desk", 8), ("paper", 20)])
@pytest.mark.parametrize("name", SWEEPS)
def test_five_configurations_with_as_many_seeds(name, scale, seeds):
    configs = recipes()[name].configs(scale)
    assert Counter((c.lr, c.batch_size) for c in configs) == dict.fromkeys(FIVE, seeds)
    assert len({c.name for c in configs}) == len(configs) == 5 * seeds
    assert {c.samples for c in configs} == {100}
    data = ("fashion-mnist", None) if name == "mlp" else ("cifar10", (0, 1))
    assert {(c.data, c.classes) for c in configs} == {data}
    assert {(c.model, c.loss, c.optimizer) for c in configs} == {(name, "mean_squared", "sgd")}


@pytest.mark.parametrize("name", FIGURES)
def test_the_paper_s_scale_is_the_published_one(name):
    configs = recipes()[name].configs("paper")
    assert {(c.steps, c.train_size, c.samples) for c in configs} == {(750_000, None, 100)}
    if name in ("mlp", "vgg"):  # curves of five seeds, the others at the end alone
        schedules = Counter(c.measure for c in configs)
        assert schedules == {"every:200": 25, "end": 75}


def test_the_long_arm_sees_all_images():
    configs = recipes()["d3"].configs("desk")
    assert {(c.lr, c.batch_size) for c in configs} == {(0.05, 20), (0.2, 20)}
    assert {(c.steps, c.train_size, c.classes) for c in configs} == {(200_000, None, (0, 1))}
    assert [c.seed for c in configs] == sorted(c.seed for c in configs)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FIGURES)
def test_curves_have_enough_records(name, scale):
    recipe = recipes()[name]
    if scale not in recipe.scales:
        with pytest.raises(FlatlensError, match=f"has no scale {scale}"):
            recipe.configs(scale)
    elif any(d.draw == "trends" for d in recipe.figures.values()):
        longest = max(recipe.configs(scale), key=lambda c: len(due_steps(c.measure, c.steps)))
        assert len(due_steps(longest.measure, longest.steps)) >= (4 if scale == "smoke" else 30)


@pytest.mark.parametrize("name", FIGURES)
def test_the_smoke_scale_needs_no_files(name):
    data = {c.data for c in recipes()[name].configs("smoke")}
    assert data <= {"digits", "synthetic:gaussians"}


# ------------------------------------------------------------------ the smoke scale, all of it


def data_of(figure):
    """Everything that a figure plots or says."""
    return [
        (
            ax.get_title(),
            [(line.get_label(), *map(np.asarray, line.get_data())) for line in ax.get_lines()],
            [text.get_text() for text in ax.texts],
        )
        for ax in figure.axes
    ]


def same(a, b):
    return all(
        x[0] == y[0]
        and x[2] == y[2]
        and len(x[1]) == len(y[1])
        and all(
            m[0] == n[0] and np.array_equal(m[1], n[1]) and np.array_equal(m[2], n[2], True)
            for m, n in zip(x[1], y[1], strict=True)
        )
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """All recipes trained and drawn; figures are caught, since writing them takes longest."""
    out = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FLATLENS_DATA", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        figures = catch(patch)
        made = reproduce(["all", "d3"], scale="smoke", out=out, workers=1)
    return out, made, figures


def catch(patch):
    figures = {}

    def keep(figure, path):
        figures[path.name] = data_of(figure)
        return {}

    patch.setattr(drawing, "save", keep)
    return figures


def test_every_recipe_runs(smoke):
    out, made, figures = smoke
    assert made.problems == []
    expected = [name for names in FIGURES.values() for name in names]
    variants = [f"{name}_authors" for name in expected if name != "g4"]
    assert sorted(figures) == sorted([*expected, *variants])
    for name, recipe in recipes().items():
        configs = recipe.configs("smoke")
        assert len(list((out / "runs" / name).glob("*/done"))) == len(configs)
    for figure in figures.values():
        assert any(len(line[1]) for _, lines, _ in figure for line in lines)


def test_trends_show_the_arms_of_the_paper(smoke):
    _, _, figures = smoke
    labels = {name: [line[0] for line in figures[name][0][1]] for name in ("fig1", "h8")}
    assert [t for t in labels["fig1"] if t[0] != "_"] == [
        f"learning rate {lr}" for lr in (0.05, 0.1, 0.2)
    ]
    assert [t for t in labels["h8"] if t[0] != "_"] == [f"batch size {b}" for b in (8, 20, 32)]


def test_the_authors_figures_show_their_columns(smoke):
    out, _, figures = smoke
    assert figures["fig1"][3][0] == "log volume"
    assert figures["fig1_authors"][3][0] == "log volume (top 3)"
    texts = {text for _, _, texts in figures["g5_authors"] for text in texts}
    assert {"log vol.\n(top 3)", "bound\n(authors)", "D\n(authors)"} <= texts
    frame = frames_of_runs(out, "smoke")["vgg"]
    assert {"bound_authors", "d_authors", "relative_flatness"} <= set(frame)


def test_every_claim_has_a_verdict_for_each_of_its_figures(smoke):
    out, made, _ = smoke
    rows = json.loads((out / "claims.json").read_text())
    verdicts = {row["verdict"] for row in rows}
    assert verdicts <= {"supported", "not supported", "inconclusive"}
    asked = {(d.name, c) for r in recipes().values() for d in r.figures.values() for c in d.claims}
    assert {(row["figure"], row["claim"]) for row in rows} == asked
    table = overview(made.claims).set_index("claim")
    assert list(table) == ["says", *[name for names in FIGURES.values() for name in names]]
    assert table.loc["T1", "g4"] == "supported"
    assert table.loc["T1", "fig1"] == ""
    text = (out / "claims.md").read_text()
    assert "| T1 | A <= B <= C <= D at every step |" in text
    assert "mlp 10 of 10, lenet 10 of 10, vgg 10 of 10, d3 2 of 2." in text
    assert "## Fig. G.7: LeNet, correlations" in text
    parts = {row["part"] for row in rows if row["claim"] == "C1"}
    assert parts == {"eq12.rhs with nmls", "bound_authors with nmls"}


def test_the_summary_has_the_ends(smoke):
    out, _, _ = smoke
    last = frames_of_runs(out, "smoke")["lenet"].query("lr == 0.2")
    text = (out / "summary.md").read_text()
    row = next(t for t in text.split("lenet:")[1].splitlines() if "lr 0.2" in t)
    assert f"{last['nmls'].mean():.4g} ± {last['nmls'].std():.2g}" in row


def test_provenance_says_how_it_was_made(smoke):
    out, _, _ = smoke
    content = json.loads((out / "provenance.json").read_text())
    (call,) = content["calls"]
    assert call["scale"] == "smoke"
    assert call["torch"] == torch.__version__
    assert call["command"].startswith("flatlens ")
    assert content["networks"]["mlp"] == {"runs": 10, "finished": 10, "records": 70}


def test_records_are_the_table_of_read_runs(smoke):
    out, _, _ = smoke
    expected, frames = frames_of_runs(out, "smoke"), read_records(out / "records.jsonl.gz")
    assert list(frames) == list(FIGURES)
    for name, frame in frames.items():
        pd.testing.assert_frame_equal(frame, expected[name])


def test_the_same_records_are_the_same_bytes(smoke, tmp_path):
    out, _, _ = smoke
    write_records(read_records(out / "records.jsonl.gz"), tmp_path / "again.gz")
    assert (tmp_path / "again.gz").read_bytes() == (out / "records.jsonl.gz").read_bytes()


def test_records_give_the_same_figures_and_claims_without_training(smoke, tmp_path, monkeypatch):
    out, _, figures = smoke
    monkeypatch.setattr(training, "sweep", None)
    again = catch(monkeypatch)
    made = reproduce(["h8", "g4", "g7", "d3"], out=tmp_path, source=out / "records.jsonl.gz")
    assert made.problems == []
    assert len(again) == 7
    for name in again:
        assert same(figures[name], again[name]), name
    for name in ("claims.md", "claims.json", "summary.md", "records.jsonl.gz", "provenance.json"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()
    assert not same(figures["h8"], figures["h9"])  # the comparison can fail


def test_known_runs_are_judged_with_the_others_and_not_trained(smoke, tmp_path, monkeypatch):
    out, _, _ = smoke
    frames = read_records(out / "records.jsonl.gz")
    runs = frames["lenet"]["run"].unique()
    unfinished = frames["mlp"][frames["mlp"]["step"] < 60]
    known = {"lenet": frames["lenet"][frames["lenet"]["run"] != runs[0]], "mlp": unfinished}
    (tmp_path / "old").mkdir()
    write_records(known, tmp_path / "old" / "records.jsonl.gz")
    (tmp_path / "old" / "provenance.json").write_text('{"calls": [{"command": "earlier"}]}')
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    again = catch(monkeypatch)
    made = reproduce(
        ["g7"],
        scale="smoke",
        out=tmp_path / "new",
        known=tmp_path / "old" / "records.jsonl.gz",
        workers=1,
    )
    assert made.problems == []
    assert [folder.name for folder in tmp_path.glob("new/runs/*/*") if folder.is_dir()] == [runs[0]]
    assert len(again) == 2
    written = read_records(tmp_path / "new" / "records.jsonl.gz")
    assert list(written) == ["lenet"]  # no run of the MLP is finished
    order = ["run", "step"]
    pd.testing.assert_frame_equal(
        written["lenet"].sort_values(order, ignore_index=True),
        frames["lenet"].sort_values(order, ignore_index=True),
    )
    content = json.loads((tmp_path / "new" / "provenance.json").read_text())
    assert [call["command"][:8] for call in content["calls"]] == ["earlier", "flatlens"]
    assert content["networks"]["lenet"]["finished"] == len(runs)


def test_a_second_call_trains_nothing(smoke, monkeypatch):
    out, _, _ = smoke
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*/records.jsonl")}
    catch(monkeypatch)
    monkeypatch.setattr("flatlens.training.sweep.run_cell", None)
    made = reproduce(["g7"], scale="smoke", out=out)
    assert made.problems == []
    after = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*/records.jsonl")}
    assert after == before


def test_runs_that_fail_are_reported_and_the_others_drawn(smoke, monkeypatch):
    out, _, _ = smoke

    def fail(*_, **options):
        raise SweepError(f"1 of 10 runs failed below {options['out'].name}.")

    monkeypatch.setattr(training, "sweep", fail)
    figures = catch(monkeypatch)
    made = reproduce(["g4", "d3"], scale="smoke", out=out)
    assert made.problems == [f"{name}: 1 of 10 runs failed below {name}." for name in ("mlp", "d3")]
    assert list(figures) == ["g4", "d3", "d3_authors"]


def copied(smoke, folder):
    """The networks of one recipe, to be damaged."""
    shutil.copytree(smoke[0] / "runs" / "lenet", folder / "runs" / "lenet")
    return sorted(folder.glob("runs/lenet/*/records.jsonl"))


@pytest.mark.parametrize("train", [True, False])
def test_a_damaged_run_is_reported_and_the_others_drawn(smoke, tmp_path, monkeypatch, train):
    first, *rest = copied(smoke, tmp_path)
    first.write_text("{\n" + first.read_text())
    figures = catch(monkeypatch)
    made = reproduce(["g7"], scale="smoke", out=tmp_path, train=train, workers=1)
    # with training the damaged run is trained again, and nothing is missing
    damaged = [f"Line 1 of {first} is damaged" in text for text in made.problems]
    assert damaged == ([] if train else [True])
    assert list(figures) == ["g7", "g7_authors"]
    runs = read_records(tmp_path / "records.jsonl.gz")["lenet"]["run"].nunique()
    assert runs == len(rest) + train


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"calls": 3}'])
def test_damaged_provenance_loses_nothing(smoke, tmp_path, monkeypatch, content):
    copied(smoke, tmp_path)
    (tmp_path / "provenance.json").write_text(content)
    catch(monkeypatch)
    made = reproduce(["g7"], scale="smoke", out=tmp_path, train=False)
    assert made.problems == [
        f"{tmp_path / 'provenance.json'} was damaged; a new list of calls is begun."
    ]
    assert len(json.loads((tmp_path / "provenance.json").read_text())["calls"]) == 1
    assert (tmp_path / "claims.md").exists()


# ------------------------------------------------------------------ the command


def test_the_command_draws_without_training(smoke, capsys, tmp_path):
    out, _, _ = smoke
    code = cli.main(
        ["reproduce", "h9", "--from", str(out / "records.jsonl.gz"), "--out", str(tmp_path)]
    )
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    for name in ("h9.pdf", "h9.png", "h9_authors.pdf", "claims.md"):
        assert str(tmp_path / name) in printed.out
        assert (tmp_path / name).stat().st_size > 1_000
    assert not (tmp_path / "h8.pdf").exists()


def test_records_of_one_recipe_are_redrawn_as_far_as_they_go(smoke, tmp_path, monkeypatch):
    out, _, _ = smoke
    frames = read_records(out / "records.jsonl.gz")
    write_records({"d3": frames["d3"]}, tmp_path / "long.gz")
    figures = catch(monkeypatch)
    made = reproduce([], out=tmp_path, source=tmp_path / "long.gz")
    assert made.problems == []
    assert list(figures) == ["d3", "d3_authors"]


def test_without_records_there_is_a_reason(capsys, tmp_path):
    code = cli.main(["reproduce", "g7", "--scale", "smoke", "--no-train", "--out", str(tmp_path)])
    assert code == 1
    told_ = capsys.readouterr().err
    assert told_ == "flatlens: g7 is not drawn: there are no records of the recipe lenet.\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    {
        ("g8",): "There is no figure 'g8' to reproduce; use h8, h9, g4, g6, g7, fig1",
        (): "Name what to reproduce, such as fig1 or all",
        ("fig1", "--scale", "huge"): "huge",
        ("fig1", "--from", "nowhere.gz"): "Cannot read nowhere.gz",
        ("fig1", "--with", "nowhere.gz"): "Cannot read nowhere.gz",
        ("fig1", "--with", "a.gz", "--from", "b.gz"): "Give either --from, to train nothing, or",
        ("fig3", "--with", "a.gz"): "fig3 measures weights, which a file of records does not hold",
        ("interventions", "fig1", "--with", "a.gz"): "call interventions by itself",
    }.items(),
)
def test_bad_input_is_one_sentence(arguments, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith("flatlens: ")
    assert reason in text
    assert text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_data_that_are_not_there_are_reported_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATLENS_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FlatlensError, match="fashion-mnist"):
        reproduce(["g4"], scale="desk", out=tmp_path / "out")
    assert not list(tmp_path.glob("out/runs/*"))


def test_the_list_has_a_time_for_each_recipe(capsys, monkeypatch):
    seen = []

    def train(config, folder, progress):
        seen.append((config.steps, config.measure))

    monkeypatch.setattr("flatlens.reproduction.timing.train", train)
    assert cli.main(["reproduce", "--list", "--scale", "paper", "--workers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["recipe", *FIGURES]
    assert "100  750,000" in lines[1]
    assert set(seen) == {(1, "end"), (1, "every:1"), (51, "end")}


def test_the_list_names_all_that_can_be_reproduced(monkeypatch):
    from flatlens.reproduction import timing
    from flatlens.reproduction.experiments import EXPERIMENTS
    from flatlens.reproduction.listing import listing

    monkeypatch.setattr(timing, "train", lambda config, folder, progress: None)
    listed = [line[1].split(", ") for line in listing("smoke", 2)[1:]]
    assert {name for names in listed for name in names} >= {*EXPERIMENTS, "fig1", "h8", "d3"}


def test_the_estimate_times_each_kind_of_step(monkeypatch):
    """A step with a penalty takes ten times as long as a plain one."""
    from flatlens.reproduction import timing

    def seconds(config):
        return 2.0 + config.steps * (0.1 if config.penalty else 0.01)

    monkeypatch.setattr(timing, "_seconds", seconds)
    plain = recipes()["mlp"].configs("smoke")[0]
    configs = [replace(plain, penalty=penalty) for penalty in (None, "sharpness:1", "sharpness:2")]
    assert timing.estimate(configs, 1) == pytest.approx(sum(map(seconds, configs)))


def test_the_estimate_counts_steps_and_records(monkeypatch):
    """A machine on which starting takes 2 s, a step 10 ms and a record 0.5 s."""
    from flatlens.reproduction import timing

    def seconds(config):
        return 2.0 + 0.01 * config.steps + 0.5 * len(due_steps(config.measure, config.steps))

    monkeypatch.setattr(timing, "_seconds", seconds)
    configs = recipes()["vgg"].configs("desk")
    assert timing.estimate(configs, 2) == pytest.approx(sum(map(seconds, configs)) / 2)
    assert duration(5_400) == "1.5 h"


# ------------------------------------------------------------------ which runs


def frame(**steps):
    """Runs with records at these steps, of 30."""
    rows = [{"run": run, "step": s, "steps": 30} for run, found in steps.items() for s in found]
    return pd.DataFrame(rows)


def test_finished_runs_are_preferred_and_ends_alone_have_no_curve():
    df = frame(a=[0, 10, 30], b=[0, 10], c=[30])
    assert set(finished(df)["run"]) == {"a", "c"}
    assert set(finished(frame(a=[0, 10], b=[0]))["run"]) == {"a", "b"}
    assert set(followed(df)["run"]) == {"a", "b"}


def test_one_configuration_so_far_is_inconclusive_not_an_error(smoke):
    out, _, _ = smoke
    vgg = frames_of_runs(out, "smoke")["vgg"]
    table = judged({"vgg": vgg[(vgg["lr"] == 0.1) & (vgg["batch_size"] == 20)]})
    assert set(table.loc[table["claim"] == "D1", "verdict"]) == {"inconclusive"}


def test_damaged_records_are_one_sentence(tmp_path):
    for content in (b"no gzip", gzip.compress(b"{"), gzip.compress(b"[1]\n"), gzip.compress(b"")):
        path = tmp_path / "records.jsonl.gz"
        path.write_bytes(content)
        with pytest.raises(FlatlensError, match=r"records\.jsonl\.gz"):
            read_records(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"recipe": "lenet", "step": 0, "steps": 5}, "Line 1 of .* the field 'run' is missing"),
        ({"recipe": "lenet", "run": "a", "step": 0}, "Line 1 of .* the field 'steps' is missing"),
        ({"recipe": "love", "run": "a", "step": 0, "steps": 5}, "the recipe 'love'; those known"),
        (
            {"recipe": "lenet", "run": "a", "step": "x", "steps": 5},
            "Line 1 of .* the field 'step' is 'x', but it must be a whole number",
        ),
    ],
)
def test_records_of_something_else_are_one_sentence(tmp_path, capsys, line, reason):
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(line).encode() + b"\n"))
    out = tmp_path / "out"
    assert cli.main(["reproduce", "--from", str(path), "--out", str(out)]) == 2
    told_ = capsys.readouterr().err
    assert re.search(reason, told_)
    assert told_.count("\n") == 1
    assert not out.exists()


# ------------------------------------------------------------------ the authors' variants


def gradients(network, x):
    """mean_i ||df/dtheta||^2, by autograd, one sample and output at a time."""
    total = 0.0
    for sample in x:
        for output in network(sample[None])[0]:
            found = torch.autograd.grad(output, list(network.parameters()), retain_graph=True)
            total += sum(float(g.square().sum()) for g in found)
    return total / len(x)


def test_the_authors_bound_of_a_convolutional_network():
    torch.manual_seed(0)
    conv, head = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(3 * 4 * 6, 5)
    network = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), head).double()
    x = torch.randn(4, 2, 4, 6).double()
    hidden = network[:3](x).detach()
    first = conv.weight.detach().square().sum() * 4 * 6 / (x.flatten(1).square().sum(1) + EPSILON)
    second = head.weight.detach().square().sum() / (hidden.square().sum(1) + EPSILON)
    S = gradients(network, x)
    p = fl.probe(network, x)
    assert d_authors(p) == pytest.approx(math.sqrt(first.mean() * S), rel=1e-9)
    assert bound_authors(p) == pytest.approx(math.sqrt((first + second).mean() * S), rel=1e-9)


def test_the_authors_bound_of_an_mlp_is_spectral():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(5, 6).double()
    sides = ((network[0], x), (network[2], network[:2](x)))
    ratios = [
        torch.linalg.matrix_norm(layer.weight.detach(), 2) ** 2
        / (z.detach().square().sum(1) + EPSILON)
        for layer, z in sides
    ]
    S = gradients(network, x)
    p = fl.probe(network, x)
    assert bound_authors(p) == pytest.approx(math.sqrt(float(sum(ratios).mean()) * S), rel=1e-9)
    assert d_authors(p) == pytest.approx(math.sqrt(float(ratios[0].mean()) * S), rel=1e-9)
    assert bound_authors(p) < fl.bounds(p)["eq12"].rhs  # epsilon


def test_default_may_stand_in_a_list_of_quantities():
    names, variants = split(["default", "relative_flatness", "d_authors"])
    assert names == ["default", "relative_flatness"]
    assert {"sharpness", "log_volume_top3"} <= set(read_request(names).metrics)
    assert variants == ["d_authors"]
