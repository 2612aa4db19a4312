"""Compare runs that were trained to be flatter or less sensitive with plain runs.

An *arm* is one way to intervene (SAM, ASAM, a penalty, weight decay) at one strength. Runs of one
seed begin with the same weights in all arms, so an arm is compared with plain SGD within each seed.
The number compared is a change of a logarithm; a volume is a logarithm already. Two moments are
compared. One is the *end* of training. The other is *equal training loss*: take the larger of the
lowest training losses of both runs, and the first moment at which each run reaches it. Between two
records the logarithm is interpolated linearly in the logarithm of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import run_table as records
from flatlens.analysis.curve_statistics import logarithm
from flatlens.analysis.statistics import Interval, averaged, correlation, fisher, ranks
from flatlens.errors import FlatlensError
from flatlens.training.config import RHO

PLAIN = "plain"
LOWER_SHARPNESS = ("sam", "asam", "sharpness")  # interventions that lower S directly
KINDS = (*LOWER_SHARPNESS, "sensitivity", "weight decay")
TITLES = {
    "sam": "SAM", "asam": "ASAM", "sharpness": "sharpness penalty",
    "sensitivity": "sensitivity penalty", "weight decay": "weight decay",
}  # fmt: skip
MOMENTS = ("end", "equal loss")
FITTED = 100.0  # per cent of the training samples that are classified correctly
EFFECTS = (
    "sqrt_sharpness", "adaptive_sharpness", "mls", "nmls", "log_volume", "log_volume_top3",
    "eq12.rhs", "test_loss",
)  # fmt: skip
PREDICTORS = ("sqrt_sharpness", "adaptive_sharpness", "mls", "nmls", "eq12.rhs")


def with_arms(df: pd.DataFrame) -> pd.DataFrame:
    """Add the columns `arm` (the kind of intervention) and `strength`, read from the config.

    >>> df = pd.DataFrame({"run": ["a", "b"], "step": [1, 1], "optimizer": ["sgd", "sam"],
    ...                    "rho": [None, 0.1]})
    >>> with_arms(df)[["arm", "strength"]].values.tolist()
    [['plain', 0.0], ['sam', 0.1]]
    """
    df = records.prepared(df)
    pairs = {row["run"]: _arm(row) for row in df.drop_duplicates("run").to_dict("records")}
    return df.assign(
        arm=[pairs[run][0] for run in df["run"]], strength=[pairs[run][1] for run in df["run"]]
    )


def _arm(row: dict[Any, Any]) -> tuple[str, float]:
    """Return the kind and strength of the intervention of one run."""
    arms: list[tuple[str, float]] = []
    if row.get("optimizer") in ("sam", "asam"):
        optimizer, rho = str(row["optimizer"]), row.get("rho")
        # a run without a radius was trained with the default
        arms.append((optimizer, RHO[optimizer] if pd.isna(rho) else float(rho)))
    if isinstance(penalty := row.get("penalty"), str):
        kind, _, strength = penalty.partition(":")
        arms.append((kind, float(strength)))
    if (decay := row.get("weight_decay", 0.0)) and not pd.isna(decay):
        arms.append(("weight decay", float(decay)))
    if len(arms) > 1:
        raise FlatlensError(f"The run {row['run']} intervenes in more than one way.")
    return arms[0] if arms else (PLAIN, 0.0)


def fitted(df: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Keep the finished runs of arms that classify all training samples correctly at the end.

    Args:
        df: a table with arms.

    Returns:
        The remaining records, and a sentence for each arm that is left out.
    """
    last = records.ends(df)
    df = df[df["run"].isin(last["run"])]
    reasons = []
    groups: Any = last.groupby(["arm", "strength"], sort=True)
    for (arm, strength), runs in groups:
        lowest = records.numbers(runs, "train_accuracy").min()
        if not lowest >= FITTED:
            name = arm_name(arm, strength)
            reasons.append(f"{name} is left out: training accuracy {lowest:.4g} % at the end")
            df = df[(df["arm"] != arm) | (df["strength"] != strength)]
    return df.reset_index(drop=True), reasons


def arm_name(arm: str, strength: float) -> str:
    """Return a readable name of an arm, such as "sam 0.1"."""
    return arm if arm == PLAIN else f"{arm} {strength:g}"


def changes(df: pd.DataFrame, moment: str) -> pd.DataFrame:
    """Return the change of every quantity against plain SGD, a row for each intervention run.

    Args:
        df: a table with arms.
        moment: "end" or "equal loss".

    Returns:
        Columns `arm`, `strength`, `seed`, and the change of the logarithm of each quantity. A seed
        without a plain run has no row.
    """
    columns = [name for name in EFFECTS if name in df]
    runs = {str(name): run for name, run in df.groupby("run")}
    plain = {run["seed"].iloc[0]: run for run in runs.values() if run["arm"].iloc[0] == PLAIN}
    lines = []
    for run in runs.values():
        arm, strength, seed = (run[name].iloc[0] for name in ("arm", "strength", "seed"))
        if arm == PLAIN or seed not in plain:
            continue
        level = _common_loss([run, plain[seed]]) if moment == "equal loss" else None
        with np.errstate(invalid="ignore"):  # -inf - -inf of volumes
            change = values(run, columns, level) - values(plain[seed], columns, level)
        named = dict(zip(columns, change, strict=True))
        lines.append({"arm": arm, "strength": strength, "seed": seed, **named})
    return pd.DataFrame(lines, columns=["arm", "strength", "seed", *columns])


def _common_loss(runs: Sequence[pd.DataFrame]) -> float:
    """Return the lowest training loss that all of the runs reach."""
    return max(float(records.numbers(run, "train_loss").min()) for run in runs)


def values(run: pd.DataFrame, columns: Sequence[str], level: float | None = None) -> Any:
    """Return log quantities of one run, at its end or where its loss first reaches a level."""
    curves = np.stack([logarithm(run, name) for name in columns])
    if level is None:
        return curves[:, -1]
    loss = records.numbers(run, "train_loss")
    reached = np.flatnonzero(loss <= level)
    if not len(reached):
        return np.full(len(columns), math.nan)
    k = int(reached[0])
    if k == 0 or not loss[k] > 0:
        return curves[:, k]
    # loss[k - 1] > level >= loss[k]
    share = math.log(loss[k - 1] / level) / math.log(loss[k - 1] / loss[k])
    with np.errstate(invalid="ignore"):
        return (1 - share) * curves[:, k - 1] + share * curves[:, k]


@dataclass(frozen=True)
class Effect:
    """The change of one quantity in some arms, with its interval over seeds."""

    estimate: Interval
    left_out: int  # pairs without a finite change


def effect(table: pd.DataFrame, column: str) -> Effect:
    """Average a change over strengths (equal weight) and seeds, paired within each seed.

    Args:
        table: rows of `changes`, of one kind of intervention.
        column: the quantity, or any other column of numbers.
    """
    change = table[column].to_numpy(np.float64)
    good = np.isfinite(change)
    used = table[good]
    estimate = averaged(change[good], used["strength"].tolist(), used["seed"].tolist())
    return Effect(estimate, int((~good).sum()))


def predictions(df: pd.DataFrame, moment: str) -> pd.DataFrame:
    """Return Spearman's coefficient of each predictor with the test loss, a row for each seed.

    At equal loss all arms of a seed are compared where each comes to the lowest training loss that
    all of them reach.
    """
    predictors = [name for name in PREDICTORS if name in df]
    lines = []
    for seed, runs in df.groupby("seed"):
        arms = [run for _, run in runs.groupby("run")]
        level = _common_loss(arms) if moment == "equal loss" else None
        points = np.stack([values(run, [*predictors, "test_loss"], level) for run in arms], axis=1)
        rho = [float(_spearman(row, points[-1])) for row in points[:-1]]
        lines.append({"seed": seed, "arms": len(arms)} | dict(zip(predictors, rho, strict=True)))
    return pd.DataFrame(lines)


def _spearman(x: Any, y: Any) -> float:
    good = np.isfinite(x) & np.isfinite(y)
    if good.sum() < 3:
        return math.nan
    return float(correlation(ranks(x[good]), ranks(y[good])))


def mean_correlation(table: pd.DataFrame, column: str) -> Interval:
    """Return the mean of rank correlations over seeds, with an interval on Fisher's z."""
    return fisher(mean_over_seeds(table, table[column].to_numpy(np.float64)))


def mean_over_seeds(table: pd.DataFrame, numbers: Any) -> Interval:
    """Return the mean of one number per seed, with Student's interval."""
    good = np.isfinite(numbers)
    return averaged(numbers[good], ["all"] * int(good.sum()), table["seed"][good].tolist())
