"""Figure 3 on trained models: verdicts with known answers, and the whole command at smoke scale."""

import json
from importlib.util import find_spec
from itertools import product

import numpy as np
import pandas as pd
import pytest

from flatlens import FlatlensError, cli
from flatlens.figures.figure3 import ESTIMATORS, figure3, require_models
from flatlens.reproduction.claims import verdicts
from flatlens.reproduction.figure3_claims import figure3_claims
from flatlens.reproduction.figure3_recipe import figure3_recipe
from flatlens.training.stored_network import stored_network
from flatlens.zoo.trained import measure_trained

FAMILIES = ("vit", "vit_relpos", "deit", "cait", "xcit", "mobilevit")
RECIPES = ("learning_rate", "weight_decay", "sam", "augmentation")


def made_up(slope: float = 2.0, paper_slope: float = 2.0, noise: float = 0.05) -> pd.DataFrame:
    """24 trained models on a line, MobileViT above it and to the left, and one published model."""
    draw = np.random.default_rng(0)
    lines = []
    for k, family in enumerate(FAMILIES):
        for recipe in RECIPES:
            mobile = family == "mobilevit"
            a = draw.normal() + (-3 if mobile else 0.3 * k)
            lines.append({
                "run": f"{family}-{recipe}", "model": f"timm:{family}", "class": family,
                "training": recipe, "kind": "trained", "test_accuracy": 60.0,
                "adaptive_sharpness": np.exp(a),
                "normalized_mls": np.exp(slope * a + 2 * mobile + noise * draw.normal()),
                "adaptive_sharpness_paper": np.exp(a + noise * draw.normal()),
                "normalized_mls_paper": np.exp(paper_slope * a + noise * draw.normal()),
            })  # fmt: skip
    star = lines[0] | {"run": "deit", "kind": "published", "training": "-", "model": "deit_tiny"}
    return pd.DataFrame([*lines, star | {"adaptive_sharpness": 1e9}])


def verdict(table: pd.DataFrame, claim: str, network: str) -> str:
    short = verdicts(table).set_index(["claim", "network"])["verdict"]
    return str(short[claim, network])


@pytest.mark.slow
def test_v1_is_judged_for_true_numbers_and_for_the_papers_estimators():
    table = figure3_claims(made_up(slope=-2.0, paper_slope=2.0))
    assert verdict(table, "V1", "true numbers") == "not supported"
    assert verdict(table, "V1", "the paper's estimators") == "supported"


@pytest.mark.slow
def test_rank_correlation_between_the_two_estimators_of_each_axis_is_given():
    table = figure3_claims(made_up(paper_slope=2.0))
    agreement = table[~table["main"]].set_index("part")["value"]
    assert agreement["adaptive_sharpness_paper with adaptive_sharpness"] > 0.9
    assert "normalized_mls_paper with normalized_mls" in agreement


@pytest.mark.slow
def test_v2_names_the_family_off_the_trend():
    table = figure3_claims(made_up())
    row = table[(table["claim"] == "V2") & (table["network"] == "true numbers")].iloc[0]
    assert (row["value"], row["verdict"]) == (1.0, "supported")
    assert row["note"] == "off the trend: mobilevit"


@pytest.mark.slow
def test_the_published_model_enters_no_number():
    with_star = figure3_claims(made_up())
    without = figure3_claims(made_up().iloc[:-1])
    pd.testing.assert_frame_equal(with_star, without)


def test_estimates_below_zero_have_a_rank_and_are_named():
    """Ranks of the paper's sharpness stay as they are when all of it moves below 0."""
    df = made_up()
    low = df.assign(adaptive_sharpness_paper=df["adaptive_sharpness_paper"] - 1.0)
    below = low["adaptive_sharpness_paper"] <= 0
    assert 0 < below.sum() < len(df) - 3
    tables = [t[t["claim"] == "V1"].reset_index() for t in map(figure3_claims, (df, low))]
    for name in ("value", "low", "high", "n", "verdict"):
        pd.testing.assert_series_equal(tables[0][name], tables[1][name])
    note = tables[1].loc[tables[1]["network"] == "the paper's estimators", "note"].iloc[0]
    assert note.startswith("at or below 0: ")
    assert note.count(",") + 1 == (below & (df["kind"] == "trained")).sum()
    drawn = figure3(low).axes[1]
    assert drawn.texts[-1].get_text() == f"not drawn: {note.count(',') + 1} models at or below 0"


def test_too_few_models_are_inconclusive():
    assert set(figure3_claims(made_up().iloc[:2])["verdict"]) == {"inconclusive"}


def test_models_below_the_accuracy_are_left_out_and_named():
    df = made_up()
    df.loc[3, "test_accuracy"] = 54.0
    used, reasons = require_models(df, 55.0)
    assert len(used) == len(df) - 1
    assert reasons == ["vit-augmentation is left out: its test accuracy 54.0 % is below 55 %"]
    with pytest.raises(FlatlensError, match="No model comes to"):
        require_models(df, 99.0)


def test_figure_has_a_panel_for_each_estimator():
    figure = figure3(made_up())
    titles = [ax.get_title() for ax in figure.axes]
    assert titles[0].startswith("Eq. 41 and exact MLS: ρ")
    assert titles[1].startswith("Eqs. 46 and 47: ρ")
    assert len(titles) == len(ESTIMATORS)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[-1] == "deit_tiny, ImageNet"


@pytest.mark.parametrize(
    ("scale", "recipes"), [("desk", {"learning_rate", "augmentation"}), ("night", set(RECIPES))]
)
def test_recipe_has_every_family_with_each_recipe_of_the_scale(scale, recipes):
    recipe = figure3_recipe(scale)
    assert len({c.name for c in recipe.configs}) == 6 * len(recipes)
    assert {(m.family, m.recipe) for m in recipe.models} == set(product(FAMILIES, recipes))
    assert (recipe.images, recipe.accuracy) == (100, 55.0)


def test_the_models_of_desk_scale_are_models_of_night_scale():
    desk, night = (figure3_recipe(scale).configs for scale in ("desk", "night"))
    assert desk == night[: len(desk)]


def test_a_scale_that_is_not_there_is_one_sentence():
    with pytest.raises(FlatlensError, match="has no scale paper; use desk, night, smoke"):
        figure3_recipe("paper")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("timm") is None, reason="needs the extra zoo")
def test_the_command_at_smoke_scale_and_redrawn_from_its_records(tmp_path, capsys):
    out = tmp_path / "first"
    options = ["--scale", "smoke", "--workers", "1"]
    assert cli.main(["reproduce", "fig3", "--out", str(out), *options]) == 0, (
        capsys.readouterr().err
    )
    folder = out / "fig3"
    claims = json.loads((folder / "claims.json").read_text())
    assert {(row["claim"], row["network"]) for row in claims} == {
        (claim, name) for claim in ("V1", "V2") for name in ESTIMATORS
    }
    assert len(list((folder / "measured").glob("*/done"))) == 6
    again = tmp_path / "again"
    source = str(folder / "records.jsonl.gz")
    assert cli.main(["reproduce", "--from", source, "--out", str(again)]) == 0
    for name in ("claims.json", "claims.md", "records.jsonl.gz", "provenance.json", "fig3.pdf"):
        assert (again / "fig3" / name).read_bytes() == (folder / name).read_bytes()

    run = next((folder / "runs").glob("vit_tiny*"))
    config, _ = stored_network(run)
    assert config.model == "timm:vit_tiny_patch16_224"
    measured = folder / "measured" / run.name
    before = (measured / "records.jsonl").read_bytes()
    measure_trained(run, measured, 2, paper=True)  # done: nothing is measured again
    assert (measured / "records.jsonl").read_bytes() == before


def test_a_folder_that_is_no_training_is_refused(tmp_path):
    with pytest.raises(FlatlensError, match=r"has no checkpoint\.safetensors"):
        stored_network(tmp_path)
