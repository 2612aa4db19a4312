"""The HTML report: what it plots and says, that nothing in it runs but its own, how it looks."""

import base64
import contextlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from made_up_runs import table
from torch import nn

import flatlens as fl
from flatlens import FlatlensError, cli
from flatlens.analysis.model_trend import rank_correlation
from flatlens.report import build, network_plots, report
from flatlens.report.measurement_files import read_measurement
from flatlens.report.plots import safe
from flatlens.reproduction.archive import write_records
from flatlens.reproduction.judgement import judged, write_claims
from flatlens.training.config import Config
from flatlens.training.measure_run import measure_run
from flatlens.training.train import train

pytest.importorskip("plotly")

EVIL = "</script><img src=x onerror=\"document.title='owned'\">&lt;b&gt;'"
STEPS = np.arange(0, 9_001, 1_500)
CONFIGURATIONS = ((0.05, 20), (0.1, 20), (0.1, 8))
LINES = ["lr 0.05, batch size 20", "lr 0.1, batch size 8", "lr 0.1, batch size 20"]
CONFIG = ("model", "data", "lr", "batch_size", "seed", "steps", "note")


def level(scale, name):
    def make(lr, batch, t, z):
        return scale * (2 + np.log2(lr / 0.05) + batch / 32 + t + 0.3 * z(name))

    return make


COLUMNS = {
    "train_loss": lambda lr, batch, t, z: 0.1 * 10.0 ** (-4 * t),  # near zero half-way
    "nmls": level(2.0, "a"),
    "sharpness": level(9.0, "b"),
    "log_volume": lambda *run: -level(3.0, "c")(*run),
    "mls": level(1.0, "e"),
    "local_dimension": level(1.5, "f"),
    "generalization_gap": level(4.0, "g"),
    "eq48_ab.lhs": level(1.0, "e"),
    "eq48_ab.rhs": level(1.1, "e"),
    "eq48_bc.rhs": level(1.2, "e"),
    "eq48_cd.rhs": level(1.5, "e"),
    "eq12.lhs": level(2.0, "a"),
    "eq12.rhs": lambda lr, batch, t, z: level(2.0, "a")(lr, batch, t, z) * np.where(t < 1, 2, 0.5),
}


def write_runs(folder, frame, names=CONFIG):
    """The table as run folders."""
    for run, rows in frame.groupby("run"):
        place = folder / run.replace("/", "-")
        place.mkdir(parents=True)
        kept = rows.drop(columns=["run", "classes", *names], errors="ignore")
        lines = [json.dumps(row) for row in kept.to_dict("records")]
        (place / "records.jsonl").write_text("\n".join(lines) + "\n")
        config = {name: rows[name].tolist()[0] for name in names if name in rows}
        content = {"config": config, "provenance": {"flatlens": "9.9", "command": ["a", EVIL]}}
        (place / "config.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def frame():
    made = table(seeds=3, configurations=CONFIGURATIONS, steps=STEPS, **COLUMNS)
    return made.assign(note=EVIL)


@pytest.fixture(scope="module")
def plain(frame, tmp_path_factory):
    """A folder of runs and its report; static figures have tests of their own."""
    folder = tmp_path_factory.mktemp("plain")
    write_runs(folder / "runs", frame)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "static_figures", lambda *_: {})
        return report(folder / "runs", folder / "report.html")


# ------------------------------------------------------------------ reading a report


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of the page."""

    def __init__(self, content):
        super().__init__()
        self.elements, self.text, self._skip = [], "", False
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._skip = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._skip = False
        self.text += "\n" if tag in ("p", "tr", "h2", "h3", "li", "summary") else " "

    def handle_data(self, data):
        self.text += "" if self._skip else data

    def named(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def parsed(path):
    return Parsed(path.read_text(encoding="utf-8"))


def restored(value, arrays):
    """The plots with every reference replaced by its array, as the page's script does."""
    if isinstance(value, list):
        return [restored(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"array"}:
        return arrays[value["array"]]
    return {key: restored(v, arrays) for key, v in value.items()}


def plots(path):
    """Everything that is plotted, by the caption of the plot."""
    content = path.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="plots">(.*?)</script>', content)
    boxes = [a for a in Parsed(content).named("div") if "data-plot" in a]
    stored = json.loads(found)
    data = restored(stored["plots"], stored["arrays"])
    assert set(data) == {box["data-plot"] for box in boxes}
    return {box["aria-label"]: data[box["data-plot"]] for box in boxes}


def lines(plot):
    """Line traces by name."""
    return {t["name"]: t for t in plot["data"] if t["mode"] == "lines" and "fill" not in t}


# ------------------------------------------------------------------ what is plotted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("caption", "column", "log"),
    [
        ("NMLS", "nmls", False),
        ("log volume", "log_volume", False),
        ("training loss", "train_loss", True),
    ],
)
def test_trends_are_means_with_bands(plain, frame, caption, column, log):
    plot = plots(plain)[caption]
    found = lines(plot)
    assert list(found) == LINES
    rows = frame[(frame.lr == 0.1) & (frame.batch_size == 8)]
    values = np.log(rows[column]) if log else rows[column]
    groups = values.groupby(rows["step"])
    mean, width = groups.mean().to_numpy(), groups.std().to_numpy()
    back = np.exp if log else np.asarray
    line = found[LINES[1]]
    assert line["x"] == STEPS.tolist()
    assert line["y"] == pytest.approx(back(mean))
    sides = np.array(line["customdata"])
    assert sides[:, 0] == pytest.approx(back(mean - width))
    assert sides[:, 1] == pytest.approx(back(mean + width))
    (band,) = (t for t in plot["data"] if "fill" in t and t["name"] == LINES[1])
    assert band["y"] == pytest.approx([*back(mean + width), *back(mean - width)[::-1]])
    assert plot["layout"]["yaxis"]["type"] == ("log" if log else "linear")


def test_a_dot_is_where_the_loss_is_near_zero(plain):
    dots = [t for t in plots(plain)["MLS"]["data"] if t["mode"] == "markers"]
    assert [t["x"] for t in dots] == [[4_500]] * len(LINES)


def test_every_panel_of_a_group_has_the_series_of_its_legend(plain):
    page = parsed(plain)
    data = plots(plain)
    for box in [a for a in page.named("div") if "data-plot" in a]:
        plot = data[box["aria-label"]]
        drawn = {t["legendgroup"] for t in plot["data"] if t.get("legendgroup")}
        buttons = [a for a in page.named("button") if a["data-group"] == box["data-group"]]
        assert {a["data-series"] for a in buttons if "data-series" in a} == drawn
    chosen = [json.loads(a["data-only"]) for a in page.named("button") if "data-only" in a]
    assert [LINES[0], LINES[2]] in chosen  # learning rates at batch 20
    assert sorted([LINES[1], LINES[2]]) in map(sorted, chosen)  # batches at learning rate 0.1


def test_the_matrix_and_the_scatter_are_of_the_ends(plain, frame):
    last = frame[frame.step == STEPS[-1]]
    data = plots(plain)
    (matrix,) = data["Pearson's r at the end of training"]["data"]
    i, j = matrix["y"].index("MLS"), matrix["x"].index("log volume")
    r = np.corrcoef(last["mls"], last["log_volume"])[0, 1]
    assert matrix["z"][i][j] == matrix["z"][j][i] == pytest.approx(r)
    assert matrix["text"][i][j] == f"{r:.2f}"
    rho = last[["mls", "log_volume"]].rank().corr().iloc[0, 1]
    assert f"ρ −{abs(rho):.2f}".replace("−0", "−") in matrix["customdata"][i][j]
    pairs = data["one quantity against another, one point per network"]
    points = [(x, y) for t in pairs["data"] for x, y in zip(t["x"], t["y"], strict=True)]
    assert sorted(points) == sorted(zip(last["mls"], last["nmls"], strict=True))
    assert [v for part in pairs["columns"]["eq48_cd.rhs"] for v in part] == pytest.approx(
        last.sort_values(["lr", "batch_size", "seed"])["eq48_cd.rhs"].tolist()
    )


def test_tightness_is_of_one_configuration(plain, frame):
    found = lines(plots(plain)["Eq. 48, as in the paper"])
    assert list(found) == ["A = MLS", "B", "C", "D = Eq. 11"]
    rows = frame[(frame.lr == 0.1) & (frame.batch_size == 8)]
    expected = np.exp(np.log(rows["eq48_cd.rhs"]).groupby(rows["step"]).mean())
    assert found["D = Eq. 11"]["y"] == pytest.approx(expected.to_numpy())


def test_inequalities_are_counted_over_all_records(plain):
    text = parsed(plain).text
    assert re.search(r"eq48_ab\s+✓ holds\s+63 of 63\s+1\.1\s+1\.1", text)
    assert re.search(r"eq12\s+✗ broken\s+54 of 63\s+0\.5\s+0\.5", text)
    assert "Not recorded or not finite: bound (12)" not in text
    assert "Not recorded or not finite: relative sharpness." in text


def test_claims_of_a_folder_of_runs_are_tested(plain):
    text = parsed(plain).text
    assert re.search(r"T1\s+✓ supported\s+A <= B <= C <= D at every step\s+mlp on digits", text)
    assert "Pearson r" in text
    assert "correlation needs 8 runs" not in text  # there are nine


@pytest.mark.slow
def test_plotly_knows_every_property(plain, zoo_report):
    import plotly.graph_objects as go

    figures = [*plots(plain).values(), *plots(zoo_report).values()]
    for plot in figures:
        go.Figure({"data": plot["data"], "layout": plot["layout"]})
    with pytest.raises(ValueError, match="nosuch"):
        go.Figure({"data": [{"type": "scatter", "nosuch": 1}]})


# ------------------------------------------------------------------ one safe file


def test_the_file_needs_and_runs_nothing_else(plain):
    content = plain.read_text(encoding="utf-8")
    found = parsed(plain)
    assert content.count("* plotly.js v") == 1
    scripts = found.named("script")
    assert [s.get("type") for s in scripts] == ["application/json", None, None]
    assert not {name for name, _ in found.elements} & {"img", "link", "iframe", "object"}
    for _, attributes in found.elements:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith(("#", "data:"))
    (policy,) = (m["content"] for m in found.named("meta") if "http-equiv" in m)
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "'unsafe-inline'" not in policy.split("style-src")[0]


def test_texts_of_users_are_shown_and_never_run(plain):
    found = parsed(plain)
    assert EVIL in found.text  # a config value, and the provenance
    assert f"a {EVIL}" in found.text


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(plain, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "static_figures", lambda *_: {})
    again = report(plain.parent / "runs", tmp_path / "again.html")
    assert again.read_bytes() == plain.read_bytes()


def test_a_report_that_cannot_be_written_leaves_the_old_one(plain, tmp_path, monkeypatch):
    out = tmp_path / "report.html"
    out.write_text("old")
    monkeypatch.setattr(build, "build_page", lambda *_: "new")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(
            FlatlensError, match=r"Cannot write .*: No space left on device; nothing was changed\.$"
        ):
            report(plain.parent / "runs", out)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]
    report(plain.parent / "runs", out)
    assert out.read_text() == "new"


# ------------------------------------------------------------------ what reproduce made


@pytest.fixture
def reproduced(frame, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    frames = {"mlp": frame}
    write_records(frames, folder / "records.jsonl.gz")
    write_claims(judged(frames), frames, folder)
    call = {"command": "flatlens reproduce all", "scale": "desk", "wall_time": "3 h"}
    (folder / "provenance.json").write_text(json.dumps({"calls": [call]}))
    (folder / "h8.pdf").write_bytes(b"%PDF-h8")
    return folder


@pytest.mark.slow
def test_a_reproduction_is_shown_as_it_was_judged(reproduced, plain, tmp_path):
    file = reproduced / "claims.json"
    rows = json.loads(file.read_text())
    for row in rows:
        if row["claim"] == "T1":
            row |= {"verdict": "inconclusive", "value": None}
    file.write_text(json.dumps(rows))
    out = report(reproduced, tmp_path / "report.html")
    found = parsed(out)
    assert re.search(r"T1\s+A <= B <= C <= D at every step\s+.*○ inconclusive", found.text)
    assert "g4: every part with its interval" in found.text
    assert "flatlens reproduce all" in found.text
    assert "3 h" in found.text
    (link,) = (a for a in found.named("a") if "download" in a)
    assert link["download"] == "h8.pdf"
    assert base64.b64decode(link["href"].partition(",")[2]) == b"%PDF-h8"
    assert plots(out)["NMLS"] == plots(plain)["NMLS"]
    again = report(reproduced / "records.jsonl.gz", tmp_path / "again.html")
    assert plots(again) == plots(out)


@pytest.mark.slow
def test_claims_are_tested_where_no_file_has_them(reproduced, tmp_path):
    before = parsed(report(reproduced, tmp_path / "a.html")).text
    (reproduced / "claims.json").unlink()
    after = parsed(report(reproduced, tmp_path / "b.html")).text
    assert before == after.replace("∞", "–")  # JSON has no infinite effect


# ------------------------------------------------------------------ layers


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One finished run of a small network, with its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    options = {"widths": [64, 12, 10, 10], "activation": "tanh"}
    config = Config(model_options=options, steps=20, measure="every:10", samples=20, train_size=50)
    train(config, folder / "run", progress=False)
    return folder


@pytest.mark.slow
def test_the_last_checkpoint_is_measured_as_the_run_was(trained):
    before = {p: p.read_bytes() for p in sorted(trained.rglob("*")) if p.is_file()}
    m = measure_run(trained / "run")
    last = fl.read_runs(trained).iloc[-1]
    for name in ("sharpness", "nmls", "log_volume", "local_dimension", "eq12.rhs"):
        assert m.to_dict()[name] == pytest.approx(last[name], rel=1e-6)
    assert {p: p.read_bytes() for p in sorted(trained.rglob("*")) if p.is_file()} == before


@pytest.mark.slow
def test_the_layers_of_a_checkpoint(trained, tmp_path):
    assert cli.main(["report", str(trained), "-o", str(tmp_path / "r.html"), "--measure"]) == 0
    found = plots(tmp_path / "r.html")
    rows = measure_run(trained / "run").rows
    panels = {t: k for t, k, _ in network_plots.LAYERS}
    for title, key in panels.items():
        (trace,) = found[title]["data"]
        assert trace["x"] == [row["name"] for row in rows]
        assert trace["y"] == pytest.approx([row[key] for row in rows])
    last = fl.read_runs(trained).iloc[-1]
    (trace,) = found["MLS of each layer (their sum is NMLS)"]["data"]
    assert sum(trace["y"]) == pytest.approx(last["nmls"], rel=1e-6)
    text = parsed(tmp_path / "r.html").text
    assert re.search(r"layer \S+ carries most of NMLS, \d+%", text)
    assert re.search(r"eq12\s+Eq\. 12\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+✓ theorem", text)
    downloads = [a["download"] for a in parsed(tmp_path / "r.html").named("a") if "download" in a]
    assert downloads == ["tightness.pdf"]  # drawn, for a single configuration


@pytest.mark.slow
def test_the_layers_of_a_measurement(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "static_figures", lambda *_: {})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).double()
    m = fl.measure(net, torch.randn(3, 1, 4, 4).double())
    (tmp_path / "conv.json").write_text(m.to_json())
    runs, out = str(plain.parent / "runs"), str(tmp_path / "r.html")
    assert cli.main(["report", runs, "-o", out, "--measurements", str(tmp_path / "conv.json")]) == 0
    (trace,) = plots(tmp_path / "r.html")[
        "sharing ratio (tied over untied gradient of the weight)"
    ]["data"]
    assert trace["name"] == "conv"
    assert trace["y"] == pytest.approx(m.layers["sharing_ratio"].tolist())
    assert "shares its weights over 4 positions" in parsed(tmp_path / "r.html").text


def test_a_layer_may_be_named_like_a_number(tmp_path):
    m = fl.measure(nn.Sequential().append(nn.Linear(3, 2)), torch.ones(2, 3))
    record = json.loads(m.to_json())
    record["layers"][0] |= {"name": "inf", "eq5_slack": "inf"}
    (tmp_path / "m.json").write_text(json.dumps(record))
    found = network_plots.layers({"m": read_measurement(tmp_path / "m.json")})
    trace = found[0][1].data[0]
    assert trace["x"] == ["inf"]
    assert trace["y"] == [None]


# ------------------------------------------------------------------ the zoo


def zoo_frame():
    draw = np.random.default_rng(0)
    a = draw.normal(3, 0.6, size=40)
    b = 2 * a + 0.1 * draw.normal(size=40)
    classes = np.array([f"c{k % 8}" for k in range(40)])
    b[classes == "c3"] += 3
    models = [f"m{k}" for k in range(39)] + [EVIL]
    noisy = np.where(np.arange(40) == 7, 0.5, 0.1)
    return pd.DataFrame({
        "run": [f"m{k}" for k in range(40)], "step": 0, "model": models, "class": classes,
        "adaptive_sharpness": 10**a, "adaptive_sharpness_se": 0.05 * 10**a,
        "normalized_mls": 10**b, "normalized_mls_se": noisy * 10**b,
    })  # fmt: skip


@pytest.fixture(scope="module")
def zoo_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    write_runs(folder / "zoo", zoo_frame(), names=("model",))
    (folder / "zoo" / "gone").mkdir()
    (folder / "zoo" / "gone" / "skipped.txt").write_text("Traceback\nno weights of gone\n")
    return report(folder / "zoo", folder / "zoo.html")


@pytest.mark.slow
def test_figure_3_of_a_zoo(zoo_report):
    plot = plots(zoo_report)["normalised MLS against adaptive sharpness, one point per model"]
    df = zoo_frame().drop(index=7)  # its standard error is too large
    clouds = [t for t in plot["data"] if t["mode"] == "markers"]
    points = {
        n: (x, y) for t in clouds for n, x, y in zip(t["customdata"], t["x"], t["y"], strict=True)
    }
    expected = zip(df["adaptive_sharpness"], df["normalized_mls"], strict=True)
    names = [safe(m) for m in df["model"]]
    assert points == dict(zip(names, expected, strict=True))
    errors = {v for t in clouds for v in np.divide(t["error_y"]["array"], t["y"]).round(9)}
    assert errors == {0.1}
    (line,) = (t for t in plot["data"] if t["mode"] == "lines")
    slope = math.log10(line["y"][1] / line["y"][0]) / math.log10(line["x"][1] / line["x"][0])
    assert slope == pytest.approx(2, abs=0.3)
    assert [a["text"] for a in plot["layout"]["annotations"]] == ["<b>c3</b>"]
    found = parsed(zoo_report)
    e = rank_correlation(*np.log10([df["adaptive_sharpness"], df["normalized_mls"]]), df["class"])
    low, high = (f"{v:.2f}".removeprefix("0") for v in (e.low, e.high))
    assert f"39 models of 8 classes. Spearman's ρ is {e.value:.2f}".replace("0.", ".") in found.text
    assert f"[{low}, {high}] over classes" in found.text
    assert "far off the line: c3." in found.text
    assert re.search(r"m7\s+0\.5\s", found.text)
    assert re.search(r"gone\s+no weights of gone", found.text)
    assert EVIL in found.text
    assert not found.named("img")
    assert [a["download"] for a in found.named("a") if "download" in a] == ["figure3.pdf"]


# ------------------------------------------------------------------ what is missing, and errors


def test_a_quantity_of_some_runs_is_drawn_for_these(tmp_path):
    rows = {"run": ["a", "a", "b", "b"], "step": [0, 10, 0, 10], "mls": [1.0, 2.0, 3.0, 4.0]}
    frame = pd.DataFrame({**rows, "nmls": [1.0, 2.0, math.nan, math.nan], "lr": [1, 1, 2, 2]})
    write_runs(tmp_path / "runs", frame)
    for path in (tmp_path / "runs" / "b").glob("records.jsonl"):
        path.write_text(path.read_text().replace(', "nmls": NaN', ""))
    found = plots(report(tmp_path / "runs", tmp_path / "r.html"))
    assert list(lines(found["MLS"])) == ["lr 1", "lr 2"]
    assert list(lines(next(p for c, p in found.items() if c.startswith("NMLS")))) == ["lr 1"]


def test_a_section_says_what_the_records_lack(tmp_path):
    write_runs(tmp_path / "runs", pd.DataFrame({"run": ["a"], "step": [5], "sharpness": [2.0]}))
    text = parsed(report(tmp_path / "runs", tmp_path / "r.html")).text
    for sentence in (
        "No run was measured more than once",
        "Values at the last record of each run",
        "The records hold no sides of inequalities",
        "Correlations need 8 runs or more, there are 1",
        "Records hold no numbers of single layers",
        "none can be drawn",
    ):
        assert sentence in text


def test_quantities_that_were_not_recorded_are_named(tmp_path):
    frame = pd.DataFrame({"run": "a", "step": [0, 10], "sharpness": [2.0, 3.0], "mls": [1.0, 2.0]})
    write_runs(tmp_path / "runs", frame)
    out = report(tmp_path / "runs", tmp_path / "r.html")
    assert set(plots(out)) == {"sharpness (√S)", "MLS"}
    told = "Not recorded or not finite: training loss, NMLS, log volume, local dimension."
    assert told in parsed(out).text


def broken_claims(folder):
    (folder / "claims.json").write_text('[{"claim": "T1"}]')


def no_measurement(folder):
    (folder / "m.json").write_text('{"layers": [{}], "inequalities": []}')


def text_file(folder):
    (folder / "some.txt").write_text("no records")


@pytest.mark.parametrize(
    ("prepare", "arguments", "sentence"),
    [
        (None, ["nowhere"], "There is no folder .*nowhere"),
        (None, ["empty"], "There is no run below .*empty"),
        (None, ["started"], "have no records yet"),
        (text_file, ["some.txt"], "some.txt is damaged or no gzip file"),
        (None, ["runs", "-o", "no/such/r.html"], r"There is no folder .*no/such for the report"),
        (None, ["runs", "-o", "empty"], "is a folder; name a file"),
        (None, ["runs", "--measure"], "has no checkpoint.safetensors to measure"),
        (None, ["runs", "--measurements", "m.json"], "Cannot read a measurement from m.json"),
        (no_measurement, ["runs", "--measurements", "m.json"], "not what flatlens measure --json"),
        (broken_claims, ["."], "is not a table of claims"),
    ],
)  # fmt: skip
def test_errors_are_one_sentence(
    frame, tmp_path, monkeypatch, capsys, prepare, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path / "runs", frame[frame.run == frame.run[0]])
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "records.jsonl").write_text("")
    (tmp_path / "started" / "config.json").write_text('{"config": {}}')
    if prepare is broken_claims:
        write_records({"mlp": frame}, tmp_path / "records.jsonl.gz")
    if prepare is not None:
        prepare(tmp_path)
    assert cli.main(["report", *arguments]) == 2
    told = capsys.readouterr().err
    assert re.search(sentence, told)
    assert told.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_an_absent_plotly_is_reported_first(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(FlatlensError, match=r"pip install 'flatlens\[report\]'"):
        report(tmp_path / "nowhere", tmp_path / "r.html")


# ------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window, with the messages of its console."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    with contextlib.closing(made.command_executor):
        yield made
        made.quit()


HOVER = "[aria-label=NMLS] .hoverlayer"


def opened(browser, path, width=1280, height=1600, scheme="light"):
    """The report on a screen of this size, its visible plots drawn."""
    from selenium.webdriver.support.wait import WebDriverWait

    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(path.as_uri())
    drawn = "return document.querySelectorAll('.plot .main-svg').length"
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(drawn) > 0)
    return browser


def shown(browser, caption):
    """Names of the lines that a drawn plot shows."""
    script = """return document.querySelector(`[aria-label="${arguments[0]}"]`).data
        .filter((t) => t.visible !== false && t.mode === "lines" && !t.fill).map((t) => t.name)"""
    return browser.execute_script(script, caption)


@pytest.mark.slow
def test_it_opens_without_a_message_and_its_legend_works(browser, plain):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    opened(browser, plain)
    assert shown(browser, "NMLS") == LINES
    first = browser.find_element(By.CSS_SELECTOR, "button[data-series]")
    assert first.accessible_name == LINES[0]
    first.click()
    assert first.get_attribute("aria-pressed") == "false"
    assert shown(browser, "NMLS") == shown(browser, "training loss") == LINES[1:]
    keyboard = browser.switch_to.active_element
    for _ in range(30):  # from the top of the page, as a person without a mouse
        if keyboard == first:
            break
        keyboard.send_keys(Keys.TAB)
        keyboard = browser.switch_to.active_element
    keyboard.send_keys(Keys.SPACE)
    assert first.get_attribute("aria-pressed") == "true"
    assert shown(browser, "MLS") == LINES
    box = browser.find_element(By.CSS_SELECTOR, "[aria-label=NMLS]")
    ActionChains(browser).move_to_element(box).perform()
    wait = WebDriverWait(browser, 30)
    wait.until(lambda b: b.find_element(By.CSS_SELECTOR, HOVER).text.count("[") == 3)
    only = browser.find_element(By.XPATH, "//button[starts-with(., 'varying lr')]")
    only.send_keys(Keys.ENTER)
    assert shown(browser, "NMLS") == [LINES[0], LINES[2]]
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_the_keyboard_reaches_the_end_of_the_page(browser, plain):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    opened(browser, plain)
    script = """const e = document.activeElement;
        if (e === document.body) return null;
        e.dataset.visits = 1 + Number(e.dataset.visits || 0);
        return [e.dataset.visits, getComputedStyle(e).outlineStyle, e.textContent]"""
    stops = []
    for _ in range(200):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        stop = browser.execute_script(script)
        if stop is None or stop[0] == "2":  # after the last element the focus leaves the page
            break
        stops.append(stop)
    assert stops[0][2] == "Skip to the content"
    assert all(style == "solid" for _, style, _ in stops)
    names = {text for _, _, text in stops}
    assert {"Layer by layer", "Figures to download", "What the inequalities say"} <= names


@pytest.mark.slow
def test_axes_of_the_scatter_are_chosen_by_keyboard(browser, plain):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.select import Select

    opened(browser, plain, height=8000)
    choice = browser.find_element(By.CSS_SELECTOR, "select[data-axis=x]")
    Select(choice).select_by_visible_text("log volume")
    plot = plots(plain)["one quantity against another, one point per network"]
    script = """const box = document.querySelector(`[data-plot="${arguments[0]}"]`);
        return [box.data.map((t) => t.x), box.layout.xaxis.title.text]"""
    x, title = browser.execute_script(script, choice.get_attribute("data-of"))
    assert title == "log volume"
    assert x == plot["columns"]["log_volume"]
    assert browser.get_log("browser") == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_its_screen_and_colours(browser, plain, tmp_path, width, scheme):
    opened(browser, plain, width=width, scheme=scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    cut = """return [...document.querySelectorAll("caption, .legend")]
        .filter((e) => e.getBoundingClientRect().right > innerWidth
            || (e.matches(".legend") && e.scrollHeight > e.clientHeight + 1))
        .map((e) => e.textContent)"""
    assert browser.execute_script(cut) == []
    back, text = browser.execute_script(
        """const style = getComputedStyle(document.body);
        const label = document.querySelector(".plot .xtick text");
        return [style.backgroundColor, getComputedStyle(label).fill]"""
    )
    brightness = [sum(map(int, re.findall(r"\d+", c)[:3])) / 3 for c in (back, text)]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
    assert abs(brightness[0] - brightness[1]) > 150
    assert browser.save_screenshot(str(tmp_path / "report.png"))
    assert (tmp_path / "report.png").stat().st_size > 20_000
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_a_change_of_the_scheme_recolours_the_plots(browser, plain):
    from selenium.webdriver.support.wait import WebDriverWait

    opened(browser, plain)
    script = "return document.querySelector('.plot').layout.font.color"
    light = browser.execute_script(script)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    WebDriverWait(browser, 30).until(lambda b: b.execute_script(script) != light)


@pytest.mark.slow
def test_hostile_names_do_nothing_in_a_browser(browser, zoo_report):
    opened(browser, zoo_report)
    assert browser.title == "flatlens report: zoo"
    assert browser.execute_script("return document.images.length") == 0
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_the_page_s_policy_stops_what_is_not_its_own(browser, tmp_path, plain):
    """A negative control: without escaping, the policy alone would still hold."""
    broken = tmp_path / "broken.html"
    content = plain.read_text(encoding="utf-8")
    broken.write_text(content.replace("<h1>", f"<h1>{EVIL}<script>document.title='owned'</script>"))
    opened(browser, broken)
    assert browser.title == "flatlens report: runs"
    assert "Content Security Policy" in str(browser.get_log("browser"))
