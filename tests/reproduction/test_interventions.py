"""Interventions: paired comparisons with known answers, and the whole command at smoke scale."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from flatlens import FlatlensError, cli
from flatlens.analysis.intervention_claims import TEXTS, intervention_claims
from flatlens.analysis.interventions import (
    changes,
    effect,
    fitted,
    predictions,
    values,
    with_arms,
)
from flatlens.figures.dose_response import dose_response
from flatlens.reproduction.claims import verdicts
from flatlens.reproduction.interventions import RECIPES
from flatlens.reproduction.recipe import read_recipe

STEPS = (0, 10, 20, 30)
# by how much the logarithm of each quantity changes for a unit of intervention
EFFECTS = {
    "sam": {"sharpness": -2.0, "mls": -0.5, "nmls": -0.3, "log_volume": -3.0, "eq12.rhs": -0.9},
    "asam": {"sharpness": -1.0, "mls": -0.2, "nmls": -0.2, "log_volume": -1.0, "eq12.rhs": -0.4},
    "sharpness": {"sharpness": -3.0, "mls": -0.6, "nmls": -0.4, "log_volume": -4.0, "eq12.rhs": -1},
    "sensitivity": {"sharpness": 0.2, "mls": -0.8, "nmls": -0.3, "log_volume": -2.0},
    "weight decay": {"sharpness": -0.1, "mls": -0.1},
}


def made_up(effects=EFFECTS, seeds=6, noise=0.02, strengths=(0.5, 1.0, 1.5)) -> pd.DataFrame:
    """Runs of all arms; test loss follows MLS, everything else has noise of its own."""
    draw = np.random.default_rng(0)
    lines = []
    for seed in range(seeds):
        base = dict.fromkeys(("sharpness", "mls", "nmls", "log_volume", "eq12.rhs"), 0.0)
        own = {name: draw.normal() for name in base}  # a seed's own level: pairs remove it
        for arm, strength in [("plain", 0.0), *((a, s) for a in effects for s in strengths)]:
            logs = {
                name: own[name] + strength * effects.get(arm, {}).get(name, 0.0)
                + noise * draw.normal()
                for name in base
            }  # fmt: skip
            logs["adaptive_sharpness"] = draw.normal()
            for step in STEPS:
                numbers = {k: v if k.startswith("log_") else math.exp(v) for k, v in logs.items()}
                lines.append({
                    "run": f"{arm}-{strength}-{seed}", "step": step, "steps": STEPS[-1],
                    "seed": seed, "model": "mlp", "data": "digits",
                    **numbers, **config(arm, strength),
                    "train_loss": 10.0 ** (-step / 10), "train_accuracy": 100.0,
                    "test_loss": math.exp(0.5 * logs["mls"]),
                })  # fmt: skip
    return pd.DataFrame(lines)


def config(arm: str, strength: float) -> dict:
    penalty = f"{arm}:{strength}" if arm in ("sharpness", "sensitivity") else None
    return {
        "optimizer": arm if arm in ("sam", "asam") else "sgd",
        "rho": strength if arm in ("sam", "asam") else None,
        "penalty": penalty,
        "weight_decay": strength if arm == "weight decay" else 0.0,
    }


def row(table: pd.DataFrame, claim: str, part: str, scope: str) -> pd.Series:
    """The one row of a part."""
    mine = (table["claim"] == claim) & (table["part"] == part) & (table["scope"] == scope)
    (found,) = [r for _, r in table[mine].iterrows()]
    return found


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return intervention_claims(made_up())


def test_arms_are_read_from_the_config():
    df = with_arms(made_up(seeds=1))
    assert set(df["arm"]) == {"plain", *EFFECTS}
    assert set(df.loc[df["arm"] == "sam", "strength"]) == {0.5, 1.0, 1.5}


def test_runs_from_before_the_fields_were_added_are_plain():
    df = made_up(seeds=1).drop(columns=["penalty", "weight_decay"])
    assert set(with_arms(df)["arm"]) == {"plain", "sam", "asam"}


def test_two_interventions_at_once_are_refused():
    df = made_up(seeds=1)
    df["weight_decay"] = 0.1
    with pytest.raises(FlatlensError, match="more than one way"):
        with_arms(df)


def test_change_is_paired_within_seeds_and_averaged_over_strengths(table):
    found = row(table, "I1", "mls under sam", "0.5, 1, 1.5; end")
    assert found["value"] == pytest.approx(-0.5, abs=0.03)
    assert found["low"] < -0.5 < found["high"]
    assert found["high"] - found["low"] < 0.1  # the levels of the seeds, of size 1, are gone
    assert (found["units"], found["n"], found["verdict"]) == (6, 18, "supported")


def test_verdicts_follow_the_effects_that_were_put_in(table):
    short = verdicts(table).set_index("claim")["verdict"]
    assert short[["I1", "I2", "I3", "I4"]].tolist() == ["supported"] * 4
    assert short["I5"] == "supported"


def test_the_best_predictor_is_the_one_that_test_loss_follows(table):
    leads = table[(table["claim"] == "I5") & table["main"] & (table["scope"] == "end")]
    assert {part.split()[0] for part in leads["part"]} == {"mls"}
    with_loss = row(table, "I5", "mls with test_loss", "end")
    assert with_loss["value"] == pytest.approx(1.0)


@pytest.mark.slow
def test_the_opposite_effects_are_not_supported():
    opposite = {
        arm: {name: -size if name != "sharpness" else size for name, size in sizes.items()}
        for arm, sizes in EFFECTS.items()
    }
    short = verdicts(intervention_claims(made_up(opposite))).set_index("claim")["verdict"]
    assert short[["I1", "I2", "I3", "I4"]].tolist() == ["not supported"] * 4


@pytest.mark.slow
def test_sensitivity_that_lowers_sharpness_too_speaks_against_I4():
    effects = {**EFFECTS, "sensitivity": {"mls": -0.8, "sharpness": -1.0}}
    short = verdicts(intervention_claims(made_up(effects))).set_index("claim")["verdict"]
    assert short["I4"] == "not supported"


@pytest.mark.slow
def test_an_arm_that_does_not_lower_S_says_nothing():
    effects = {**EFFECTS, "sam": {"mls": -0.5, "nmls": -0.5}}
    found = row(intervention_claims(made_up(effects)), "I1", "mls under sam", "0.5, 1, 1.5; end")
    assert found["verdict"] == "inconclusive"
    assert "S is not clearly lower" in found["note"]


@pytest.mark.slow
def test_a_bound_that_falls_less_than_nmls_speaks_against_I3():
    effects = {arm: {**sizes, "eq12.rhs": -0.1} for arm, sizes in EFFECTS.items()}
    found = row(
        intervention_claims(made_up(effects)), "I3", "bound / nmls under sam", "0.5, 1, 1.5; end"
    )
    assert found["verdict"] == "not supported"


def test_arms_that_do_not_fit_the_training_data_are_left_out_and_named():
    df = made_up(seeds=2)
    df.loc[df["run"] == "sam-1.5-1", "train_accuracy"] = 99.9
    used, reasons = fitted(with_arms(df))
    assert set(used.loc[used["arm"] == "sam", "strength"]) == {0.5, 1.0}
    assert reasons == ["sam 1.5 is left out: training accuracy 99.9 % at the end"]


def test_without_a_fitted_plain_run_every_claim_is_inconclusive():
    table = intervention_claims(made_up(seeds=2).assign(train_accuracy=50.0))
    assert set(table["verdict"]) == {"inconclusive"}
    assert set(table["claim"]) == set(TEXTS)


def test_equal_loss_is_interpolated_where_both_runs_come_to_it():
    df = pd.DataFrame({
        "run": ["p"] * 3 + ["s"] * 3, "step": [0, 1, 2] * 2, "steps": 2, "seed": 0,
        "optimizer": ["sgd"] * 3 + ["sam"] * 3, "rho": [None] * 3 + [0.1] * 3,
        "train_loss": [1.0, 0.01, 0.0001, 1.0, 0.5, 0.1], "train_accuracy": 100.0,
        "mls": np.exp([0.0, 2.0, 3.0, 0.0, 0.4, 0.5]),
    })  # fmt: skip
    df = with_arms(df)
    (change,) = changes(df, "equal loss")["mls"]
    assert change == pytest.approx(0.5 - 1.0)  # plain is at 0.1 halfway between 1 and 0.01
    (end,) = changes(df, "end")["mls"]
    assert end == pytest.approx(0.5 - 3.0)


def test_a_level_that_is_never_reached_has_no_value():
    run = pd.DataFrame({"train_loss": [1.0, 0.5], "mls": [1.0, 2.0]})
    assert math.isnan(values(run, ["mls"], 0.1)[0])
    assert values(run, ["mls"], 2.0)[0] == 0.0


def test_pairs_without_a_finite_value_are_counted():
    df = with_arms(made_up(seeds=3))
    df.loc[(df["run"] == "sam-0.5-0"), "log_volume"] = -math.inf
    table = changes(df, "end")
    assert effect(table[table["arm"] == "sam"], "log_volume").left_out == 1


def test_predictions_have_a_row_for_each_seed():
    table = predictions(with_arms(made_up(seeds=3)), "equal loss")
    assert table["arms"].tolist() == [16] * 3
    assert table["mls"].tolist() == pytest.approx([1.0] * 3)


def test_figure_has_a_panel_for_each_quantity():
    figure = dose_response(made_up(seeds=2))
    titles = [ax.get_title() for ax in figure.axes if ax.get_visible()]
    assert titles == [
        "MLS", "NMLS", "bound (12)", "log volume", "adaptive sharpness", "test loss",
    ]  # fmt: skip
    with pytest.raises(FlatlensError, match="no intervention to draw"):
        dose_response(made_up({}, seeds=1))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_sixteen_arms_from_the_same_weights(name):
    recipe = read_recipe(name)
    configs = recipe.configs("desk")
    seeds = recipe.scales["desk"]["seeds"]
    assert len(configs) == 16 * seeds
    assert len({c.name for c in configs}) == len(configs)
    assert {(c.model, c.lr, c.batch_size, c.steps) for c in configs} == {
        (configs[0].model, 0.1, 20, configs[0].steps)
    }


@pytest.mark.slow
def test_the_command_at_smoke_scale_and_redrawn_from_its_records(tmp_path, capsys):
    out = tmp_path / "first"
    code = cli.main(
        ["reproduce", "interventions", "--scale", "smoke", "--out", str(out), "--workers", "1"]
    )
    assert code == 0, capsys.readouterr().err
    folder = out / "interventions"
    claims = json.loads((folder / "claims.json").read_text())
    assert {row["claim"] for row in claims} == set(TEXTS)
    assert {row["figure"] for row in claims} == set(RECIPES)
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["networks"]["interventions_mlp"] == {
        "runs": 12, "finished": 12, "records": 12 * 3,
    }  # fmt: skip
    again = tmp_path / "again"
    source = str(folder / "records.jsonl.gz")
    assert cli.main(["reproduce", "--from", source, "--out", str(again)]) == 0
    files = ("claims.json", "claims.md", "records.jsonl.gz", "provenance.json")
    for name in (*files, "interventions_mlp.pdf", "interventions_vgg_equal_loss.pdf"):
        assert (again / "interventions" / name).read_bytes() == (folder / name).read_bytes()
    known = tmp_path / "known"
    command = ["reproduce", "interventions", "--no-train", "--scale", "smoke", "--with", source]
    assert cli.main([*command, "--out", str(known)]) == 0
    for name in ("claims.json", "records.jsonl.gz"):
        assert (known / "interventions" / name).read_bytes() == (folder / name).read_bytes()
    calls = json.loads((known / "interventions" / "provenance.json").read_text())["calls"]
    assert len(calls) == 2
