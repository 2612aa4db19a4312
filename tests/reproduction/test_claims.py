"""Claims on runs whose truth is known: right, reversed, nothing there, and not recorded."""

import math

import numpy as np
import pandas as pd
import pytest
from made_up_runs import LOSS, STEPS, table

from flatlens.analysis import run_table, statistics
from flatlens.analysis.curve_statistics import late_change, over_steps, phase
from flatlens.analysis.statistics import (
    Interval,
    averaged,
    centred,
    combination,
    correlation,
    jackknife,
    jackknife_correlation,
)
from flatlens.errors import FlatlensError
from flatlens.reproduction.claims import ABOUT, TEXTS, claims, markdown, verdicts

VERDICTS = {1: "supported", -1: "not supported", 0: "inconclusive"}


def verdict(df: pd.DataFrame, claim: str) -> str:
    (found,) = verdicts(claims(df, only=[claim]))["verdict"]
    return found


def rows(df: pd.DataFrame, claim: str) -> pd.DataFrame:
    return claims(df, only=[claim])


# ------------------------------------------------------------------ the statistics


def test_t_quantile_is_that_of_the_tables():
    known = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 10: 2.22814, 120: 1.97993}
    for freedom, value in known.items():
        assert statistics.t_quantile(freedom) == pytest.approx(value, rel=1e-5)


def test_a_difference_of_two_means_is_welchs():
    a, b = np.array([27.5, 21.0, 19.0, 23.6]), np.array([27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8])
    e = combination(np.concatenate([a, b]), ["a"] * 4 + ["b"] * 7, {"a": 1.0, "b": -1.0})
    va, vb = a.var(ddof=1) / 4, b.var(ddof=1) / 7
    freedom = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 6)
    half = statistics.t_quantile(freedom) * math.sqrt(va + vb)
    assert (e.value, e.n, e.units) == (pytest.approx(a.mean() - b.mean()), 11, 11)
    assert (e.low, e.high) == (pytest.approx(e.value - half), pytest.approx(e.value + half))


def test_one_run_has_no_interval():
    e = combination(np.array([1.0]), ["a"], {"a": 1.0})
    assert e.value == 1
    assert math.isnan(e.low)


def test_correlation_is_numpys_and_ranks_share_ties():
    x, y = np.random.default_rng(0).normal(size=(2, 30))
    assert correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-12)
    assert statistics.ranks(np.array([3.0, 1.0, 3.0, 9.0])).tolist() == [2.5, 1, 2.5, 4]
    assert math.isnan(correlation(x, np.ones(30)))


def test_a_difference_of_two_means_with_common_seeds_is_that_of_pairs():
    a, b = np.random.default_rng(0).normal(size=(2, 6)) + np.arange(6)  # seeds differ by far more
    e = combination(np.append(a, b), [*"aaaaaabbbbbb"], {"a": 1.0, "b": -1.0}, [*range(6)] * 2)
    half = statistics.t_quantile(5) * (a - b).std(ddof=1) / math.sqrt(6)
    assert (e.low, e.high) == (
        pytest.approx((a - b).mean() - half),
        pytest.approx((a - b).mean() + half),
    )
    assert (e.n, e.units) == (12, 6)


def test_a_mean_over_configurations_has_the_scatter_of_seeds():
    values = np.random.default_rng(0).normal(size=(3, 5)) + 10 * np.arange(3)[:, None]
    groups, seeds = np.repeat([*"abc"], 5).tolist(), np.tile(np.arange(5), 3).tolist()
    e = averaged(values.ravel(), groups, seeds)
    by_seed = values.mean(axis=0)
    half = statistics.t_quantile(4) * by_seed.std(ddof=1) / math.sqrt(5)
    assert (e.low, e.high) == (
        pytest.approx(by_seed.mean() - half),
        pytest.approx(by_seed.mean() + half),
    )
    assert e.effect == pytest.approx(e.value / math.sqrt(values.var(axis=1, ddof=1).mean()))


def lists(groups, seeds=None):
    return [[unit.tolist() for unit in units] for units in statistics.strata(groups, seeds)]


def test_units_are_seeds_where_configurations_share_them():
    assert lists([*"aabb"], [0, 1, 1, 2]) == [[[0], [1, 2], [3]]]  # seed 1 ties a and b
    assert lists([*"aabb"], [0, 1, 2, 3]) == lists([*"aabb"]) == [[[0], [1]], [[2], [3]]]
    assert lists([*"aabbcc"], [0, 1, 0, 1, 7, 8]) == [[[0, 2], [1, 3]], [[4], [5]]]
    assert lists([*"abb"], [0, 1, 2]) == [[[0], [1], [2]]]  # one run of a hides its scatter
    assert lists([*"aab"], [0, 0, 0]) == [[[0, 1, 2]]]


def pairs(draw, n, shared, apart, within):
    """Five configurations of n seeds: x and y, and their correlation if seeds were endless.

    `shared`: part of the variance that is the seed's; `apart`: distance of neighbours' means.
    """
    means = apart * (np.arange(5)[:, None] - 2.0)
    x, other = math.sqrt(shared) * draw.normal(size=(2, 1, n)) + math.sqrt(
        1 - shared
    ) * draw.normal(size=(2, 5, n))
    y = within * x + math.sqrt(1 - within**2) * other
    truth = (means.var() + within) / (means.var() + 1)
    return np.stack([(x + means).ravel(), (y + means).ravel()]), truth


@pytest.mark.slow
@pytest.mark.parametrize("apart", [1, 2])
@pytest.mark.parametrize(("n", "shared"), [(8, 0.75), (4, 0.75), (8, 0), (4, 0)])
def test_intervals_of_pooled_correlations_hold_the_truth(n, shared, apart):
    draw, repeats, covered = np.random.default_rng(0), 400, 0
    groups = np.repeat(np.arange(5), n).tolist()
    seeds = np.tile(np.arange(n), 5).tolist() if shared else None
    for _ in range(repeats):
        xy, truth = pairs(draw, n, shared, apart, within=0.3)
        e = jackknife_correlation(lambda rows, xy=xy: correlation(*xy[:, rows]), groups, seeds)
        covered += e.low < truth < e.high
    assert 0.9 <= covered / repeats <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("within", [0, 0.6])
def test_intervals_within_configurations_hold_the_truth(within):
    draw, repeats, covered = np.random.default_rng(1), 300, 0
    groups, seeds = np.repeat(np.arange(5), 8), np.tile(np.arange(8), 5).tolist()
    for _ in range(repeats):
        xy, _ = pairs(draw, 8, shared=0.75, apart=1, within=within)
        e = jackknife_correlation(
            lambda rows, xy=xy: correlation(*centred(xy[:, rows], groups[rows].tolist())),
            groups.tolist(),
            seeds,
        )
        covered += e.low < within < e.high
    assert 0.92 <= covered / repeats <= 0.985


def test_intervals_of_correlations_end_at_one():
    x = np.arange(8.0)
    e = jackknife_correlation(lambda rows: correlation(x[rows], 2 * x[rows]), ["a"] * 8)
    assert (e.low, e.high) == (pytest.approx(1), pytest.approx(1))
    y = x.copy()
    y[[0, 1]] = y[[1, 0]]  # without either the order is perfect
    ranks = statistics.ranks
    e = jackknife_correlation(lambda rows: correlation(ranks(x[rows]), ranks(y[rows])), ["a"] * 8)
    assert 0 < e.low < e.value < e.high < 1
    e = statistics.fisher(Interval(-0.95, -1.2, -0.7, 8, -0.95))
    assert -1 < e.low < -0.95 < e.high < 1
    assert e.low == pytest.approx(math.tanh(math.atanh(-0.95) - 0.25 / (1 - 0.95**2)))


def test_a_statistic_that_cannot_lack_a_unit_has_no_interval():
    e = jackknife(lambda rows: 1.0 if len(rows) > 3 else math.nan, [*"aabb"])
    assert (e.value, math.isnan(e.low), math.isnan(e.high)) == (1, True, True)


def test_correlation_table_counts_seeds_once():
    draw = np.random.default_rng(0)
    xy, _ = pairs(draw, 8, shared=0.95, apart=0, within=0.5)
    df = pd.DataFrame({"x": xy[0], "y": xy[1]})
    groups, seeds = np.repeat(np.arange(5), 8).tolist(), np.tile(np.arange(8), 5).tolist()
    (runs,) = statistics.correlation_table(df, ["x", "y"], groups).to_dict("records")
    (few,) = statistics.correlation_table(df, ["x", "y"], groups, seeds).to_dict("records")
    for kind in ("pearson", "spearman"):
        assert few[kind] == runs[kind]
        wide, narrow = (t[f"{kind}_high"] - t[f"{kind}_low"] for t in (few, runs))
        assert wide > 1.5 * narrow
    assert few["n"] == 40


def test_centred_leaves_no_group_mean():
    x = np.random.default_rng(0).normal(size=(3, 6))
    left = centred(x, [0, 0, 1, 1, 1, 0])
    assert left[:, [0, 1, 5]].mean(axis=1) == pytest.approx(0, abs=1e-15)
    assert (x - left)[:, 2] == pytest.approx(x[:, 2:5].mean(axis=1))


def test_wilson_of_none_and_all():
    low, high = statistics.wilson(0.0, 100)
    assert (low, high) == (0, pytest.approx(0.0370, abs=1e-4))
    assert statistics.wilson(1.0, 100) == (pytest.approx(1 - 0.0370, abs=1e-4), 1)


# ------------------------------------------------------------------ which runs, which steps


def test_configurations_name_what_varies():
    df = table(seeds=1)
    assert run_table.settings(df) == ["lr", "batch_size"]
    assert run_table.ordered(df) == [
        "lr 0.05, batch size 20",
        "lr 0.1, batch size 8",
        "lr 0.1, batch size 20",
        "lr 0.1, batch size 32",
        "lr 0.2, batch size 20",
    ]


def test_a_measured_loss_is_no_setting():
    df = table(seeds=1, loss=lambda lr, batch, t, z: t + lr)
    assert "loss" not in run_table.settings(df)
    df["config.loss"] = np.where(df["lr"] == 0.05, "cross_entropy", "mean_squared")
    assert run_table.settings(df) == ["lr", "batch_size", "config.loss"]


def test_an_arm_varies_in_one_setting():
    df = table(seeds=2)
    assert set(run_table.arm(df, "lr")["batch_size"]) == {20}
    assert set(run_table.arm(df, "batch_size")["lr"]) == {0.1}
    assert sorted(run_table.arm(df, "batch_size")["batch_size"].unique()) == [8, 20, 32]
    with pytest.raises(FlatlensError, match="differ in lr"):
        run_table.arm(df[df["lr"] == 0.1], "lr")


def test_an_arm_that_was_chosen_has_a_name():
    df = table(seeds=2)
    assert run_table.arm_name(df, "lr") == "batch size 20"
    assert run_table.arm_name(run_table.arm(df, "lr"), "lr") == ""
    grid = table(seeds=1, configurations=[(lr, b) for lr in (0.05, 0.1, 0.2) for b in (8, 20, 32)])
    assert (
        run_table.arm_name(grid, "lr")
        == f"batch size {run_table.arm(grid, 'lr')['batch_size'].iloc[0]}"
    )


def test_other_measurements_are_other_configurations():
    df = table(seeds=2)
    coarse = df.assign(samples=10, run="coarse/" + df["run"])
    both = pd.concat([df.assign(samples=100), coarse], ignore_index=True)
    assert len(run_table.ordered(both)) == 10
    assert [name for name, _ in run_table.families(both)] == [
        "mlp on digits, samples 10",
        "mlp on digits, samples 100",
    ]
    assert "evaluate" in run_table.settings(both.assign(evaluate=both["samples"]))


def test_a_run_without_a_seed_stands_for_itself():
    df = table(seeds=1)
    runs = df.drop_duplicates("run")
    assert run_table.seeds(runs) == [0] * 5
    assert run_table.seeds(runs.drop(columns="seed")) == runs["run"].tolist()
    some = runs.assign(seed=[0, 1, None, 1, None])
    assert run_table.seeds(some) == [0, 1, runs["run"].iloc[2], 1, runs["run"].iloc[4]]


def test_families_are_networks_on_data():
    longer = table(steps=STEPS[:21])
    df = pd.concat([table(), table(model="vgg"), longer.assign(run="long/" + longer["run"])])
    assert [name for name, _ in run_table.families(df)] == [
        "mlp on digits, steps 10000",
        "mlp on digits, steps 5000",
        "vgg on digits, steps 10000",
    ]
    assert [name for name, _ in run_table.families(table())] == ["mlp on digits"]


def test_the_end_is_that_of_finished_runs():
    df = table(seeds=2)
    unfinished = (df["run"] == "mlp/0.1-8-1") & (df["step"] > 5_000)
    assert len(run_table.ends(df)) == 10
    assert len(run_table.ends(df[~unfinished])) == 9
    with pytest.raises(FlatlensError, match="has come to its last step"):
        run_table.ends(df[df["step"] < 5_000])


def test_interpolation_and_the_phases_around_it():
    run = pd.DataFrame({"step": STEPS, "train_loss": LOSS})
    assert run_table.interpolation(run) == 4_000
    assert phase(run, "early")["step"].max() == phase(run, "late")["step"].min() == 4_000
    assert run_table.interpolation(run.assign(train_loss=0.1)) is None
    assert phase(run.assign(train_loss=0.1), "late").empty


def test_changes_of_known_curves():
    run = pd.DataFrame({"step": STEPS, "train_loss": LOSS, "mls": np.exp(-STEPS / 1_000)})
    run["log_volume"] = -STEPS / 500
    assert late_change(run, "mls") == pytest.approx(-6)
    assert late_change(run, "log_volume", start=0.5) == pytest.approx(-6)
    assert over_steps(run, "mls", "log_volume") == pytest.approx(1)
    assert math.isnan(late_change(run[run["step"] < 4_500], "mls"))  # two records say nothing


# ------------------------------------------------------------------ the claims


def at_end(sign, size=0.1, noise=0.01):
    """A quantity whose logarithm falls (sign 1) with lr and rises with the batch."""

    def make(lr, batch, t, z):
        level = -sign * size * (np.log2(lr / 0.1) - np.log2(batch / 20)) + noise * z("own")
        return np.exp(level) * np.ones_like(t)

    return make


def ends_like(sign, **options):
    make = at_end(sign, **options)
    log = lambda *run: np.log(make(*run))  # noqa: E731
    squared = lambda *run: make(*run) ** 2  # noqa: E731
    return table(sharpness=squared, mls=make, nmls=make, log_volume=log)


@pytest.mark.parametrize("claim", ["D1", "D2"])
@pytest.mark.parametrize("sign", [1, -1])
def test_learning_rate_and_batch_size(claim, sign):
    df = ends_like(sign)
    assert verdict(df, claim) == VERDICTS[sign]
    found = rows(df, claim)
    expected = {"D1": -0.1 * sign, "D2": 0.1 * sign}[claim]
    assert found["value"].to_numpy() == pytest.approx(expected, abs=0.01)
    assert ((found["low"] < expected) & (expected < found["high"])).mean() >= 0.75
    assert found["n"].tolist() == [24] * 4
    assert found["units"].tolist() == [8] * 4
    assert (np.abs(found["effect"]) > 5).all()


@pytest.mark.parametrize(
    ("noise", "expected"), [(0.2, "inconclusive"), (0.001, "not supported")], ids=["wide", "tight"]
)
def test_no_effect_of_the_learning_rate(noise, expected):
    assert verdict(ends_like(0, noise=noise), "D1") == expected


def test_one_part_that_fails_fails_the_claim():
    df = ends_like(1)
    df["nmls"] = 1 / df["nmls"]
    assert rows(df, "D1")["verdict"].tolist() == [*3 * ["supported"], "not supported"]
    assert verdict(df, "D1") == "not supported"


def test_one_seed_gives_a_number_but_no_verdict():
    df = ends_like(1)
    found = rows(df[df["seed"] == 0], "D1")
    assert found["value"].to_numpy() == pytest.approx(-0.1, abs=0.02)
    assert set(found["verdict"]) == {"inconclusive"}
    assert set(found["note"]) == {"too few seeds for an interval"}


def test_slopes_compare_runs_of_one_seed():
    """What a seed does to all configurations alike says nothing against the learning rate."""
    df = ends_like(1, size=0.05, noise=0.005)
    offset = np.exp(np.random.default_rng(0).normal(size=8))[df["seed"]]
    df = df.assign(mls=df["mls"] * offset)
    assert rows(df, "D1").set_index("part")["verdict"]["mls with lr"] == "supported"
    apart = df.assign(seed=df["run"])
    assert rows(apart, "D1").set_index("part")["verdict"]["mls with lr"] == "inconclusive"
    assert set(rows(apart, "D1")["units"]) == {24}


def test_the_arm_is_named_where_runs_are_left_out():
    grid = [(lr, batch) for lr in (0.05, 0.1, 0.2) for batch in (8, 20, 32)]
    make = at_end(1)
    df = table(configurations=grid, seeds=3, sharpness=make, mls=make, nmls=make, log_volume=make)
    found = rows(df, "D1")
    batch = run_table.arm(df, "lr")["batch_size"].iloc[0]
    assert set(found["scope"]) == {f"lr 0.05, 0.1, 0.2 at batch size {batch}"}
    assert set(found["n"]) == {9}
    assert set(rows(df[df["batch_size"] == 20], "D1")["scope"]) == {"lr 0.05, 0.1, 0.2"}


def curve(late, *, rise=1.0, noise=0.02, log=False):
    """A logarithm that rises until the loss is near zero (t = 0.4), then changes by `late`."""

    def make(lr, batch, t, z):
        y = (
            rise * np.minimum(t, 0.4)
            + (late + noise * z(f"late {late}")) * np.maximum(t - 0.4, 0) / 0.6
        )
        return y if log else np.exp(y)

    return make


def squared(make):
    return lambda *run: make(*run) ** 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "expected"),
    [(-0.3, "supported"), (0.3, "not supported"), (0.0, "inconclusive")],
)
def test_late_fall_of_the_vgg(late, expected):
    noise = 0.15 if late == 0 else 0.02
    one, log = curve(late, noise=noise), curve(late, noise=noise, log=True)
    df = table(model="vgg", sharpness=squared(one), mls=one, log_volume=log)
    assert verdict(df, "D3") == expected
    found = rows(df, "D3")
    everywhere = found[found["scope"] == "all configurations"]
    assert everywhere["value"].to_numpy() == pytest.approx(late, abs=0.06)
    assert len(found) == 3 * 6  # and each configuration alone
    assert found["main"].sum() == 3


def test_what_a_seed_does_to_all_configurations_is_counted_once():
    """Late changes of the seeds themselves, without a mean: eight numbers, not forty."""
    late = np.random.default_rng(3).normal(size=8)
    df = table(model="vgg", sharpness=curve(0.0), mls=curve(0.0), log_volume=curve(0.0, log=True))
    t = np.maximum(df["step"] / STEPS[-1] - 0.4, 0) / 0.6
    df["log_volume"] = late[df["seed"]] * t + 1e-3 * df["lr"] * t
    found = rows(df, "D3").query("part == 'late change of log_volume'").iloc[0]
    half = statistics.t_quantile(7) * late.std(ddof=1) / math.sqrt(8)
    assert (found["n"], found["units"]) == (40, 8)
    assert found["high"] - found["low"] == pytest.approx(2 * half, rel=1e-6)


def test_late_fall_needs_a_late_phase():
    one = curve(-0.3)
    df = table(model="vgg", sharpness=one, mls=one, log_volume=one).assign(train_loss=0.1)
    assert verdict(df, "D3") == "inconclusive"
    assert set(rows(df, "D3")["note"]) == {"0 of 40 runs have such a phase"}


def slowing_volume(lr, batch, t, z):
    """Falls by 2 until t = 0.7, then by 0.3."""
    return -2 * np.minimum(t, 0.7) / 0.7 - np.maximum(t - 0.7, 0) + 0.01 * z("volume") * t


def mlp(late=0.0, follower=None, volume=slowing_volume):
    one = curve(late)
    follower = follower or one
    return table(sharpness=squared(one), mls=follower, nmls=follower, log_volume=volume)


def test_late_phase_of_the_mlp():
    assert verdict(mlp(), "D4") == "supported"


BROKEN = {
    "late change of sqrt_sharpness": {"late": -0.5},
    "mls with sqrt_sharpness": {"follower": lambda lr, batch, t, z: np.exp(-t)},
    "change of log_volume in the second half": {
        "volume": lambda lr, batch, t, z: np.maximum(t - 0.5, 0) + 0.01 * z("v") * t
    },
    "rate of log_volume, second half minus before": {
        "volume": lambda lr, batch, t, z: -(t**3) + 0.01 * z("v") * t
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("part", BROKEN)
def test_each_part_of_the_late_phase_can_fail(part):
    df = mlp(**BROKEN[part])
    found = rows(df, "D4").set_index("part")["verdict"]
    assert found[part] == "not supported"
    assert verdict(df, "D4") == "not supported"


@pytest.mark.parametrize(("fall", "expected"), [(-1, "supported"), (1, "not supported")])
def test_volume_once_sharpness_is_level(fall, expected):
    df = mlp(volume=lambda lr, batch, t, z: fall * t + 0.05 * z("volume") * t)
    assert verdict(df, "D5") == expected
    assert rows(df, "D5")["value"].to_numpy() == pytest.approx(0.3 * fall, abs=0.03)


def test_volume_says_nothing_while_sharpness_moves():
    assert verdict(mlp(late=0.5), "D5") == "inconclusive"


def test_volume_of_the_vgg_is_judged_at_its_largest_batch():
    one = curve(0.0)
    df = table(model="vgg", sharpness=squared(one), mls=one, log_volume=slowing_volume)
    assert rows(df, "D5")["n"].tolist() == [8]
    assert rows(df, "D5")["scope"].tolist() == ["batch size 32"]


def dimension(follows):
    """Falls with the loss; then it goes its own way (0), that of sharpness (1) or against it."""

    def make(lr, batch, t, z):
        after = np.maximum(t - 0.4, 0)
        wiggle = np.sin(40 * after + 6 * z("phase"))
        return 5 - 8 * np.minimum(t, 0.4) + (follows * after if follows else 0.1 * wiggle)

    return make


@pytest.mark.parametrize(
    ("follows", "expected"), [(0, "supported"), (1, "not supported"), (-1, "not supported")]
)
def test_local_dimension(follows, expected):
    df = table(sharpness=squared(curve(0.5)), local_dimension=dimension(follows))
    assert rows(df, "D6")["verdict"].tolist() == ["supported", expected]
    assert verdict(df, "D6") == expected
    found = rows(df, "D6")
    assert "|rho|" in found["statistic"][1]
    assert found["low"].min() >= -1
    assert found["high"].max() <= 1


def test_local_dimension_that_rises_as_the_loss_falls():
    df = table(sharpness=squared(curve(0.5)), local_dimension=lambda lr, batch, t, z: 1 + t)
    assert rows(df, "D6")["verdict"][0] == "not supported"


def chain(a, b, c, d):
    names = ("eq48_ab.lhs", "eq48_ab.rhs", "eq48_bc.rhs", "eq48_cd.rhs")
    one = lambda value: lambda lr, batch, t, z: value * np.exp(0.1 * z("run") + t)  # noqa: E731
    return table(**{name: one(v) for name, v in zip(names, (a, b, c, d), strict=True)})


def test_the_chain_holds_at_every_step():
    found = rows(chain(1, 2, 2.2, 9), "T1")
    assert found["verdict"].tolist() == ["supported"]
    assert (found["value"][0], found["n"][0], found["units"][0]) == (0, 40, 8)
    assert found["note"][0] == f"0 of {40 * len(STEPS)} records break it"
    assert found["high"][0] == pytest.approx(statistics.wilson(0.0, 8)[1])
    assert found["effect"][0] == pytest.approx(1.1)


def test_one_broken_record_breaks_the_chain():
    df = chain(1, 2, 2.2, 9)
    df.loc[7, "eq48_bc.rhs"] = df.loc[7, "eq48_ab.rhs"] * 0.99
    found = rows(df, "T1")
    assert found["verdict"].tolist() == ["not supported"]
    assert found["value"][0] == pytest.approx(1 / 8)
    assert found["statistic"][0] == "share of seeds with such a record"
    assert found["note"][0] == f"1 of {len(df)} records break it"
    assert rows(df.drop(columns="seed"), "T1")["value"][0] == pytest.approx(1 / 40)


def test_records_without_the_chain_are_not_counted():
    df = chain(1, 2, 2.2, 9)
    df.loc[:9, "eq48_ab.lhs"] = np.nan
    assert rows(df, "T1")["note"][0] == f"0 of {len(df) - 10} records break it"
    assert verdict(df.assign(**{"eq48_ab.lhs": np.nan}), "T1") == "inconclusive"


@pytest.mark.parametrize(
    ("values", "expected"), [((1, 2, 2.2, 9), "supported"), ((1, 4, 4.2, 5), "not supported")]
)
def test_the_largest_gap(values, expected):
    a, b, c, d = values
    df = chain(*values)
    df["eq48_cd.rhs"] *= 1 + 0.01 * np.sin(df["seed"])  # else all runs are one
    assert verdict(df, "T2") == expected
    log_ratio = math.log((d - c) / max(b - a, c - b))
    assert rows(df, "T2")["value"][0] == pytest.approx(log_ratio, abs=0.1)


# ------------------------------------------------------------------ correlations over networks

PAIRS = {
    "C1": [("eq12.rhs", "nmls")],
    "C4": [("sharpness", "generalization_gap")],
    "C5": [("mls", "nmls")],
    "C8": [("eq48_cd.rhs", "mls")],
}


def related(strength, between=0.0):
    """A quantity that goes with the run's number `x` within configurations, and between them."""

    def make(lr, batch, t, z):
        level = np.log2(lr / 0.1) + 0.3 * np.log2(batch / 20)
        return np.ones_like(t) * (50 + strength * z("x") + between * level + z(f"own {strength}"))

    return make


@pytest.mark.parametrize("claim", PAIRS)
@pytest.mark.parametrize("sign", [1, -1, 0])
def test_correlations(claim, sign):
    ((x, y),) = PAIRS[claim]
    df = table(**{x: related(3.0), y: related(3.01 * sign)})
    claimed = -1 if claim == "C8" else 1
    assert verdict(df, claim) == VERDICTS[sign * claimed]
    found = rows(df, claim)
    assert found["scope"].tolist() == ["pooled", "within configurations"]
    last = run_table.ends(run_table.prepared(df))
    columns = ["sqrt_sharpness" if x == "sharpness" else x, y]
    assert found["value"][0] == pytest.approx(last[columns].corr().iloc[0, 1], rel=1e-10)
    inside = last[columns] - last.groupby(["lr", "batch_size"])[columns].transform("mean")
    assert found["value"][1] == pytest.approx(inside.corr().iloc[0, 1], rel=1e-10)


def test_a_pooled_correlation_that_hides_the_reverse_is_said():
    df = table(mls=related(3.0, between=30), nmls=related(-3.01, between=30))
    found = rows(df, "C5")
    assert found["verdict"].tolist() == ["supported", "not supported"]
    assert found["note"][0] == "within configurations: not supported"
    assert "within configurations: not supported" in markdown(claims(df, only=["C5"]))


def test_within_configurations_takes_eight_seeds():
    df = table(seeds=7, mls=related(3.0), nmls=related(3.01))
    assert rows(df, "C5")["scope"].tolist() == ["pooled"]


def test_three_networks_say_nothing():
    df = table(seeds=1, mls=related(3.0), nmls=related(3.01))
    assert verdict(df, "C5") == "inconclusive"
    assert "needs 8 runs, there are 5" in rows(df, "C5")["note"][0]


def test_all_three_correlate_with_the_gap():
    names = ("nmls", "mls", "eq12.rhs", "generalization_gap")
    df = table(**{name: related(3 + k / 100) for k, name in enumerate(names)})
    assert verdict(df, "C2") == "supported"
    assert rows(df, "C2")["main"].sum() == 3
    assert verdict(df.drop(columns="eq12.rhs"), "C2") == "inconclusive"
    found = rows(df.drop(columns="eq12.rhs"), "C2")
    assert found["note"].iloc[-1] == "The table of runs has no column eq12.rhs"
    without = rows(df.drop(columns="nmls"), "C2")  # the others are tested all the same
    assert without["verdict"].tolist() == ["inconclusive", *4 * ["supported"]]


def test_both_volumes_are_shown_and_the_papers_decides():
    columns = {"sharpness": related(3.0), "mls": related(3.01), "log_volume": related(3.02)}
    df = table(**columns, log_volume_top3=related(-3.03))
    found = rows(df, "C3")
    top = found["part"].str.contains("top3")
    assert set(found.loc[top, "verdict"]) == {"not supported"}
    assert set(found.loc[~top, "verdict"]) == {"supported"}
    assert verdict(df, "C3") == "supported"


@pytest.mark.parametrize(("claim", "stronger"), [("C6", "mls"), ("C7", "mls")])
@pytest.mark.parametrize("right", [True, False])
def test_which_of_two_correlations_is_stronger(claim, stronger, right):
    strong, weak = related(-8.0), related(0.5)
    columns = {"sharpness": related(8.01), "test_loss": related(8.02)}
    names = {"C6": ("mls", "log_volume"), "C7": ("mls", "local_dimension")}[claim]
    columns |= {"log_volume": related(8.03)} if claim == "C7" else {}
    columns |= dict(zip(names, (strong, weak) if right else (weak, strong), strict=True))
    found = rows(table(**columns), claim)
    assert found["verdict"][0] == ("supported" if right else "not supported")


@pytest.mark.parametrize(
    ("strength", "expected"), [(-3, "supported"), (0.001, "supported"), (4, "not supported")]
)
def test_relative_sharpness(strength, expected):
    df = table(seeds=40, relative_flatness=related(strength), generalization_gap=related(4.1))
    assert verdict(df, "C9") == expected


def test_c_and_d_against_mls():
    df = table(**{"eq48_bc.rhs": related(3.0), "eq48_cd.rhs": related(-3.01), "mls": related(3.02)})
    assert verdict(df, "T3") == "supported"
    df = table(**{"eq48_bc.rhs": related(3.0), "eq48_cd.rhs": related(3.01), "mls": related(3.02)})
    assert verdict(df, "T3") == "not supported"


def test_runs_without_a_finite_volume_are_left_out_and_counted():
    df = table(sharpness=related(3.0), mls=related(3.01), log_volume=related(3.02))
    df.loc[df["run"] == "mlp/0.1-8-3", "log_volume"] = -np.inf
    found = rows(df, "C3")
    assert found["n"][0] == 39
    assert found["note"][0] == "1 of 40 runs left out: no finite value"


# ------------------------------------------------------------------ the table


@pytest.mark.slow
def test_every_claim_is_tested_on_the_networks_it_is_about():
    df = pd.concat(
        [ends_like(1), ends_like(1).assign(model="vgg"), ends_like(1).assign(model="lenet")]
    )
    df["run"] = df["model"] + df["run"]
    short = verdicts(claims(df))
    for network, part in short.groupby("network"):
        model = network.split(" on ")[0]
        expected = [c for c in TEXTS if model in ABOUT.get(c, (model,))]
        assert part["claim"].tolist() == expected
    assert set(short["claim"]) == set(TEXTS)
    assert set(short["verdict"]) <= set(VERDICTS.values())


@pytest.mark.slow
def test_the_same_records_give_the_same_table():
    df = ends_like(1)
    shuffled = df.sample(frac=1, random_state=0)
    pd.testing.assert_frame_equal(claims(df), claims(shuffled))


def test_markdown_has_every_row_and_one_line_each():
    df = ends_like(1)
    found = claims(df)
    lines = markdown(found).splitlines()
    short, parts = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert len(short) == 2 + len(verdicts(found))
    assert len(parts) == 2 + len(found)
    assert len({line.replace(r"\|", "").count("|") for line in parts}) == 1
    assert any(line.startswith("| D1 | mlp on digits |") and "| < 0 |" in line for line in parts)


def test_unknown_claims_are_refused():
    with pytest.raises(FlatlensError, match="no claim D9; there are D1, D2"):
        claims(ends_like(1), only=["D1", "D9"])


def test_an_empty_table_is_refused():
    with pytest.raises(FlatlensError, match="is empty"):
        claims(pd.DataFrame({"run": [], "step": []}))
    with pytest.raises(FlatlensError, match="no column run, step"):
        claims(pd.DataFrame({"mls": [1.0]}))
