"""Verdicts of several scales side by side."""

import json

import numpy as np
import pytest
from made_up_runs import table

from flatlens import FlatlensError, cli
from flatlens.reproduction.compare import compare
from flatlens.reproduction.judgement import judged, write_claims
from flatlens.reproduction.recipe import drawings


def ends(sign):
    """Every quantity falls with the learning rate (sign -1) or rises with it (1)."""

    def make(lr, batch, t, z):
        return np.exp(sign * 0.3 * np.log2(lr) + 0.01 * z("a") + 0 * t)

    return {
        "sharpness": lambda *run: make(*run) ** 2,
        "mls": make,
        "nmls": make,
        "log_volume": lambda *run: np.log(make(*run)),
    }


def folder(path, scale, recipe, seeds, sign):
    """What `flatlens reproduce` leaves of made-up runs."""
    path.mkdir(parents=True)
    arm = ((0.05, 20), (0.1, 20), (0.2, 20))
    frames = {recipe: table("vgg", seeds=seeds, configurations=arm, **ends(sign))}
    write_claims(judged(frames), frames, path)
    (path / "provenance.json").write_text(json.dumps({"calls": [{"scale": scale}]}))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("scales")
    return [
        folder(root / "desk", "desk", "vgg", 8, 1),
        folder(root / "desk" / "night", "night", "vgg", 4, -1),
        folder(root / "long", "paper", "d3", 3, -1),
    ]


def test_the_scale_nearest_to_the_paper_comes_first(folders):
    assert list(compare(folders)) == ["claim", "figure", "paper", "night", "desk", "differs"]


def test_verdicts_that_differ_are_marked_and_have_their_seeds(folders):
    rows = compare(folders[:2]).set_index(["claim", "figure"])
    row = rows.loc[("D1", "fig1")]
    assert row["desk"] == "not supported (8 seeds)"
    assert row["night"] == "supported (4 seeds)"
    assert row["differs"] == "yes"
    assert rows.loc[("D2", "fig2"), "differs"] == ""  # inconclusive in both: one batch size


def test_a_figure_of_one_scale_says_where_it_is_judged(folders):
    rows = compare(folders).set_index(["claim", "figure"])
    assert rows.loc[("D3", "d3"), "night"] == "see fig1"
    assert rows.loc[("D3", "d3"), "desk"] == "stays at paper"


def test_the_command_prints_a_table_of_markdown(folders, capsys):
    assert cli.main(["reproduce", "--compare", str(folders[0]), str(folders[1])]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| claim | figure | night | desk | differs |\n")
    assert "| D1 | fig1 | supported (4 seeds) | not supported (8 seeds) | yes |" in printed
    assert "need 8 seeds" in printed


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [([0], "two folders or more"), ([0, 0], "at scale desk, as another folder is")],
)
def test_folders_that_cannot_be_compared_are_refused(folders, chosen, sentence):
    with pytest.raises(FlatlensError, match=sentence):
        compare([folders[k] for k in chosen])


def test_a_folder_without_claims_is_one_sentence(folders, tmp_path, capsys):
    assert cli.main(["reproduce", "--compare", str(folders[0]), str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "claims.json: No such file" in told
    assert told.count("\n") == 1


def test_the_long_arm_is_part_of_the_night():
    from flatlens.reproduction.recipe import COVERED, recipes

    figure = COVERED["d3", "night"]
    (found,) = drawings([figure])["vgg"]
    assert "D3" in found.claims
    night = {c.steps for c in recipes()["vgg"].configs("night") if c.train_size is None}
    assert night == {100_000}
