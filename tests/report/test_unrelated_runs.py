"""Reports on runs that belong to no sweep: a line each, no claims, and bad folders by name."""

import json
import os

import numpy as np
import pandas as pd
import pytest
import torch
from made_up_runs import table
from test_report import COLUMNS, lines, parsed, plots, write_runs
from torch import nn

import flatlens as fl
from flatlens.analysis.sweeps import judgeable, reached_interpolation
from flatlens.report import build, report, training_plots
from flatlens.report.elements import Html
from flatlens.report.glossary import INEQUALITIES
from flatlens.report.page import Page
from flatlens.report.sources import Source, read

pytest.importorskip("plotly")


def unrelated(values=(1.6, 5.0, 10.5), **columns):
    """Runs that a Tracker wrote without a config."""
    runs = [
        pd.DataFrame({"run": name, "step": [0, 10, 20], "nmls": [value, value, value]})
        for name, value in zip(["resnet", "vit", "old/mlp"], values, strict=True)
    ]
    return pd.concat(runs, ignore_index=True).assign(sharpness=4.0, **columns)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unrelated")
    write_runs(folder / "runs", unrelated())
    bad = folder / "runs" / "bad"
    bad.mkdir()
    (bad / "records.jsonl").write_text('{"step": 0}\n{"step": \n')
    (bad / "config.json").write_text('{"config": {}}')
    (folder / "runs" / "link.png").symlink_to("/etc/passwd")
    os.mkfifo(folder / "runs" / "pipe.pdf")
    return report(folder / "runs", folder / "r.html")


def test_runs_without_a_config_are_a_line_each(page):
    found = lines(plots(page)["NMLS"])
    assert {name: trace["y"] for name, trace in found.items()} == {
        "old-mlp": [10.5] * 3, "resnet": [1.6] * 3, "vit": [5.0] * 3,
    }  # fmt: skip
    assert plots(page)["NMLS"]["layout"]["xaxis"]["title"]["text"] == "steps"
    assert "each run has a line of its own" in parsed(page).text


def test_equal_values_have_no_extremes(page):
    text = parsed(page).text
    assert "At the end resnet is least sensitive and old-mlp most sensitive" in text
    assert "sharpest" not in text  # all three have the same sharpness


def test_unrelated_runs_are_no_evidence_for_the_paper(page):
    text = parsed(page).text
    assert "none is judged on these runs" in text
    assert "the network is none of the paper's" in text
    assert "supported:" not in text


def test_the_page_opens_with_a_summary_in_words(page):
    text = parsed(page).text
    assert "3 runs without a config, each shown by itself, up to step 20." in text
    assert "resnet is least sensitive and old-mlp most sensitive" in text


def test_unreadable_folders_are_listed_with_the_reason(page):
    text = parsed(page).text
    assert "1 run folder could not be read" in text
    assert "Line 2 of " in text.split("Run folders that could not be read")[-1]


def test_links_and_pipes_beside_the_records_are_not_opened(page):
    content = page.read_text(encoding="utf-8")
    assert "link.png" not in content
    assert "pipe.pdf" not in content


def test_names_of_inequalities_are_explained_on_hover_and_in_a_list(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "static_figures", lambda *_: {})
    frame = unrelated(**{"eq12.lhs": 1.0, "eq12.rhs": 2.0})
    write_runs(tmp_path / "runs", frame)
    found = parsed(report(tmp_path / "runs", tmp_path / "r.html"))
    assert {"title": INEQUALITIES["eq12"]} in found.named("abbr")
    assert INEQUALITIES["eq12"] in found.text
    assert "All 1 recorded inequalities hold in every record" in found.text


def test_every_inequality_of_the_core_has_an_explanation():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    names = {row.name for row in fl.bounds(fl.probe(net, torch.randn(4, 3)))}
    assert names <= set(INEQUALITIES)


def test_settings_that_flatlens_does_not_know_name_a_line(tmp_path):
    frame = pd.concat([
        unrelated().assign(dropout=0.1, seed=[*[0] * 3, *[1] * 3, *[2] * 3]),
        unrelated().assign(dropout=0.5, run=lambda d: "b/" + d["run"]),
    ])  # fmt: skip
    write_runs(tmp_path / "runs", frame, names=("dropout", "seed"))
    ((_, _, df),) = read(tmp_path / "runs").families()
    assert [s.name for s in training_plots.configurations(df)] == ["dropout 0.1", "dropout 0.5"]


def test_section_titles_are_unique():
    page = Page("p")
    for _ in range(3):
        page.section("vgg on cifar10", Html(""))
    assert [title for _, title in page.names] == [
        "vgg on cifar10", "vgg on cifar10 (2)", "vgg on cifar10 (3)",
    ]  # fmt: skip


# ------------------------------------------------------------------ claims need a sweep


def sweep(**columns):
    return table(seeds=2, configurations=((0.05, 20), (0.1, 20)), **{**COLUMNS, **columns})


def test_claims_need_a_varied_setting():
    df = sweep()
    assert judgeable(df, ["D1", "D2", "T1"])[1] == ["D1", "T1"]
    assert judgeable(df[df.lr == 0.1], ["D1", "T1"])[1:] == (
        [], "neither the learning rate nor the batch size varies by itself",
    )  # fmt: skip


def test_claims_need_interpolation():
    df = sweep(train_loss=lambda lr, batch, t, z: 0.1 * (1 - t / 2))
    assert set(reached_interpolation(df).values()) == {False}
    runs, claims, why = judgeable(df, ["D1"])
    assert (len(runs), claims) == (0, [])
    assert "no configuration came to 1 % of its start" in why


def test_configurations_that_do_not_interpolate_are_left_out():
    arms = ((0.05, 20), (0.1, 20), (0.2, 20))

    def loss(lr, batch, t, z):
        return 0.1 * 10.0 ** (-4 * t) if lr > 0.05 else 0.1 + 0 * t

    df = table(seeds=2, configurations=arms, **{**COLUMNS, "train_loss": loss})
    runs, claims, why = judgeable(df, ["D1"])
    assert set(runs["lr"]) == {0.1, 0.2}
    assert claims == ["D1"]
    assert why.endswith("lr 0.05")


# ------------------------------------------------------------------ many runs


@pytest.mark.slow
def test_many_runs_make_a_small_page(tmp_path):
    """100 runs without a config; curves are thinned and shared steps are stored once."""
    steps = np.arange(0, 2_000, 10)
    runs = [
        pd.DataFrame({"run": f"r{k:03}", "step": steps, "nmls": k + steps / 7, "sharpness": 1.0})
        for k in range(100)
    ]
    df = pd.concat(runs, ignore_index=True).assign(mls=lambda d: d["nmls"] / 3)
    source = Source(tmp_path, {"": df}, None, None, [])
    tmp_path.joinpath("empty.pdf").write_bytes(b"%PDF")  # so that none is drawn
    content = build.build_page(source, {}, 0.15)
    data = content.partition('id="plots">')[2].partition("</script>")[0]
    assert len(data) < 1_500_000
    stored = json.loads(data)
    assert sum(array == stored["arrays"][0] for array in stored["arrays"]) == 1
