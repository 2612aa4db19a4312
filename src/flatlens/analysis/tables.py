"""Which runs, which steps: the questions that figures and claims ask of `read_runs`' table.

The table has one row per run and step: columns `run`, `step`, the quantities, and the config of
the run. A *configuration* is everything that was set but the seed; a *family* is one network on
one data set for so many steps, measured on so many samples, whatever the optimiser, its learning
rate and its batch size; an *arm* is the part of a family in which one setting alone varies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.training.config import Config

# config fields that make a different experiment; those that vary name a configuration
SETTINGS = (
    "model", "model_options", "data", "data_options", "classes", "train_size", "loss",
    "label_smoothing", "optimizer", "lr", "momentum", "rho", "penalty", "weight_decay", "augment",
    "batch_size", "steps", "dtype", "samples", "evaluate",
)  # fmt: skip
# those that may differ within a family, as people write them
TRAINING = (
    "lr", "batch size", "optimizer", "momentum", "rho", "label smoothing", "penalty",
    "weight decay", "augment",
)  # fmt: skip
DEFAULTS = Config()
INTERPOLATION = 0.01  # the training loss is near zero at this share of its value at the start


def prepared(df: pd.DataFrame) -> pd.DataFrame:
    """A sorted copy with `sqrt_sharpness`, the square root of Eq. 3 that the paper plots."""
    require(df, ["run", "step"])
    if df.empty:
        raise FlatlensError("The table of runs is empty.")
    df = df.sort_values(["run", "step"]).reset_index(drop=True)
    if "sharpness" in df:
        df["sqrt_sharpness"] = np.sqrt(numbers(df, "sharpness"))
    return df


def require(df: pd.DataFrame, columns: Iterable[str]) -> None:
    """Refuses a table that lacks a column."""
    if missing := [name for name in columns if name not in df]:
        raise FlatlensError(f"The table of runs has no column {', '.join(missing)}.")


def numbers(df: pd.DataFrame, column: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A column as floats; what is no number is nan."""
    return pd.to_numeric(df[column], errors="coerce").to_numpy(np.float64)


def ends(df: pd.DataFrame) -> pd.DataFrame:
    """The last record of each run; runs that have not yet come to their last step are left out."""
    last = df.loc[df.groupby("run", sort=True)["step"].idxmax()].reset_index(drop=True)
    if "steps" in last:
        last = last[last["step"] >= last["steps"]].reset_index(drop=True)
    if last.empty:
        raise FlatlensError("No run of the table has come to its last step.")
    return last


def settings(df: pd.DataFrame) -> list[str]:
    """The settings that vary in a table."""
    runs = df.drop_duplicates("run")  # a setting is the same in all records of a run
    return [
        name for name in map(str, df) if _is_setting(df, name) and len(set(_values(runs, name))) > 1
    ]


def _is_setting(df: pd.DataFrame, name: str) -> bool:
    """A field of the config. `loss` may also be a measured number."""
    field = name.removeprefix("config.").split(".")[0]
    measured = name == "loss" and pd.api.types.is_numeric_dtype(df[name])
    return field in SETTINGS and not measured and f"config.{name}" not in df


def configurations(df: pd.DataFrame, without: str | None = None) -> pd.Series[str]:
    """The name of each row's configuration, such as "lr 0.1, batch size 20".

    Settings that are the same for all are left out; so is `without`.

    >>> df = pd.DataFrame({"run": ["a", "b"], "lr": [0.1, 0.2], "seed": [0, 0]})
    >>> configurations(df).tolist()
    ['lr 0.1', 'lr 0.2']
    """
    return _named(df, [name for name in settings(df) if name != without], "all")


def _named(df: pd.DataFrame, names: Sequence[str], nothing: str) -> pd.Series[str]:
    runs = df.drop_duplicates("run")
    parts = [[f"{label(name)} {value}" for value in _values(runs, name)] for name in names]
    texts = [", ".join(row) for row in zip(*parts, strict=True)] or [nothing] * len(runs)
    return df["run"].map(dict(zip(runs["run"], texts, strict=True)))


def seeds(df: pd.DataFrame) -> list[Any]:
    """The seed of each row; where it is not known, the run, which then stands for itself."""
    if "seed" not in df:
        return df["run"].tolist()
    return df["seed"].astype(object).where(df["seed"].notna(), df["run"]).tolist()


def ordered(df: pd.DataFrame) -> list[str]:
    """The configurations of a table, by the values of their settings."""
    runs = df.drop_duplicates("run")
    columns = [_values(runs, name) for name in settings(df)]
    keys = [[(isinstance(v, str), v) for v in row] for row in zip(*columns, strict=True)]
    texts = configurations(runs).tolist()
    found = sorted(zip(keys, texts, strict=True)) if keys else [([], text) for text in texts]
    return list(dict.fromkeys(text for _, text in found))


def label(setting: str) -> str:
    """A setting as a person writes it."""
    return setting.removeprefix("config.").replace("_", " ")


def arm(df: pd.DataFrame, by: str) -> pd.DataFrame:
    """The runs in which `by` alone varies: of all choices, the one with most values of it.

    `arm_name` says which.
    """
    others, name = _arm(df, by)
    return df[others == name]


def arm_name(df: pd.DataFrame, by: str) -> str:
    """What the runs of an arm have in common and others of the table have not.

    >>> grid = {"run": list("abcd"), "lr": [0.1, 0.2] * 2, "batch_size": [8, 8, 32, 32]}
    >>> arm_name(pd.DataFrame(grid), "lr")
    'batch size 32'
    """
    others, name = _arm(df, by)
    return "" if (others == name).all() else name


def _arm(df: pd.DataFrame, by: str) -> tuple[pd.Series[str], str]:
    """What is set of each row apart from `by`, and the choice with most values of it."""
    require(df, [by])
    others = configurations(df, without=by)
    values = df[by].groupby(others).nunique()
    if values.max() < 2:
        raise FlatlensError(f"No two runs of the table differ in {by} and in nothing but the seed.")
    return others, str(values.idxmax())


def families(df: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Runs that differ in how they were trained alone, by name: "mlp on digits, steps 200"."""
    first = [name for name in ("model", "data") if name in df]
    others = [name for name in settings(df) if label(name) not in TRAINING and name not in first]
    runs = df.drop_duplicates("run")
    heads = [" on ".join(map(str, row)) for row in runs[first].to_numpy().tolist()]
    both = zip(heads, _named(runs, others, ""), strict=True)
    names = dict(zip(runs["run"], (", ".join(filter(None, pair)) for pair in both), strict=True))
    return [(str(name), part) for name, part in df.groupby(df["run"].map(names))]


def require_one_family(df: pd.DataFrame) -> None:
    """Refuses to draw curves of different networks or data as if they were seeds of one."""
    names = [name for name, _ in families(df)]
    if len(names) > 1:
        raise FlatlensError(
            f"The table has runs of {', '.join(names)}; choose one, as in df[df.model == 'mlp']."
        )


def interpolation(run: pd.DataFrame, share: float = INTERPOLATION) -> int | None:
    """The first recorded step of one run whose training loss is near zero, None if there is none.

    Near zero is a share of the loss at the first record.

    >>> run = pd.DataFrame({"step": [0, 10, 20, 30], "train_loss": [0.1, 0.05, 0.001, 0.0005]})
    >>> interpolation(run)
    20
    """
    if "train_loss" not in run:
        return None
    loss = numbers(run, "train_loss")
    below = np.flatnonzero(loss <= share * loss[0])
    return int(run["step"].to_numpy()[below[0]]) if len(below) else None


def _values(runs: pd.DataFrame, name: str) -> list[Any]:
    """A setting of each run as something that can be counted: lists as text.

    A run from before a field was added has no value of it; it was trained with the default.
    """
    default = getattr(DEFAULTS, name.removeprefix("config."), None)
    values = [v if isinstance(v, Collection) or not pd.isna(v) else default for v in runs[name]]
    return [v if np.isscalar(v) else str(v) for v in values]
