"""Select runs, steps and configurations from the table that `read_runs` returns.

The table has one row per run and step. Its columns are `run`, `step`, the measured quantities and
the config of the run. Three words are used throughout:

- A *configuration* is everything that was set except the seed. A run without a config is a
  configuration of its own, named after its folder: nothing says that it repeats another run.
- A *family* is one network on one data set, trained for the same number of steps and measured on
  the same number of samples. Optimiser, learning rate and batch size may differ within it.
- An *arm* is the part of a family in which a single setting varies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.training.config import Config

# Config fields that make a different experiment. Those that vary name a configuration.
SETTINGS = (
    "model", "model_options", "data", "data_options", "classes", "train_size", "loss",
    "label_smoothing", "optimizer", "lr", "lr_schedule", "momentum", "rho", "penalty",
    "weight_decay", "augment", "batch_size", "steps", "dtype", "samples", "evaluate",
)  # fmt: skip
# Settings that may differ within a family, written as `label` writes them.
TRAINING = (
    "lr", "lr schedule", "batch size", "optimizer", "momentum", "rho", "label smoothing", "penalty",
    "weight decay", "augment",
)  # fmt: skip
DEFAULTS = Config()
# fields that older records lack and whose default is not None
NEWER = ("weight_decay", "lr_schedule")
# A column that a reader of run folders may add: the settings of a run that flatlens does not know,
# as text ("dropout 0.1"), missing for a run without a config. Configurations are named by it, too.
OTHER_SETTINGS = "other_settings"
LONGEST_FLOAT = 8  # characters of a float that is shown as it is
INTERPOLATION = 0.01  # The training loss is near zero at this share of its first recorded value.
NO_CONFIG = "runs without a config"  # The name of the family of such runs.


def prepared(df: pd.DataFrame) -> pd.DataFrame:
    """Return a sorted copy with `sqrt_sharpness`, the square root of Eq. 3 that the paper plots.

    Raises:
        FlatlensError: if the table is empty or has no columns `run` and `step`.
    """
    require(df, ["run", "step"])
    if df.empty:
        raise FlatlensError("The table of runs is empty.")
    df = df.sort_values(["run", "step"]).reset_index(drop=True)
    if "sharpness" in df:
        df["sqrt_sharpness"] = np.sqrt(numbers(df, "sharpness"))
    return df


def require(df: pd.DataFrame, columns: Iterable[str]) -> None:
    """Raise a FlatlensError that names the columns which the table lacks."""
    if missing := [name for name in columns if name not in df]:
        raise FlatlensError(f"The table of runs has no column {', '.join(missing)}.")


def numbers(df: pd.DataFrame, column: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a column as floats, with NaN where a cell is not a number."""
    values = df[column]
    if values.dtype == np.float64:  # the usual case, and ten times as fast
        return values.to_numpy()
    return pd.to_numeric(values, errors="coerce").to_numpy(np.float64)


def finite_columns(df: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Return the columns that the table has with at least one finite value."""
    return [name for name in columns if name in df and np.isfinite(numbers(df, name)).any()]


def ends(df: pd.DataFrame) -> pd.DataFrame:
    """Return the last record of each run that reached its last step.

    Raises:
        FlatlensError: if no run did.
    """
    last = df.loc[df.groupby("run", sort=True)["step"].idxmax()].reset_index(drop=True)
    if "steps" in last:
        last = last[~(last["step"] < numbers(last, "steps"))].reset_index(drop=True)
    if last.empty:
        raise FlatlensError("No run of the table has come to its last step.")
    return last


def finished(df: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that reached their last step, or all runs if none did."""
    if "steps" not in df:
        return df
    last = df.groupby("run")["step"].transform("max")
    done = df[~(last < numbers(df, "steps"))]  # a run that names no last step counts as finished
    return df if done.empty else done


def followed(df: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that have more than one record."""
    return df[df.groupby("run")["step"].transform("size") > 1]


def settings(df: pd.DataFrame) -> list[str]:
    """Return the settings that vary between the runs of a table."""
    runs = df.drop_duplicates("run")  # a setting is the same in all records of a run
    return [
        name for name in map(str, df) if _is_setting(df, name) and len(set(_values(runs, name))) > 1
    ]


def _is_setting(df: pd.DataFrame, name: str) -> bool:
    """Return whether a column is a field of the config. `loss` may also be a measured number."""
    field = name.removeprefix("config.").split(".")[0]
    measured = name == "loss" and pd.api.types.is_numeric_dtype(df[name])
    return field in SETTINGS and not measured and f"config.{name}" not in df


def without_config(df: pd.DataFrame) -> pd.Series[bool]:
    """Return for each row whether its run has no setting at all."""
    if OTHER_SETTINGS in df:
        return df[OTHER_SETTINGS].isna()
    known = [name for name in map(str, df) if _is_setting(df, name) or name == "seed"]
    return df[known].isna().all(axis=1)


def configurations(df: pd.DataFrame, without: str | None = None) -> pd.Series[str]:
    """Return the name of each row's configuration, such as "lr 0.1, batch size 20".

    Settings that are the same for all runs are left out, and so is the setting `without`. A run
    without a config has the name of its folder.

    >>> df = pd.DataFrame({"run": ["a", "b"], "lr": [0.1, 0.2], "seed": [0, 0]})
    >>> configurations(df).tolist()
    ['lr 0.1', 'lr 0.2']
    >>> configurations(df[["run"]]).tolist()
    ['a', 'b']
    """
    return _named(df, [name for name in settings(df) if name != without], "all")


def _named(df: pd.DataFrame, names: Sequence[str], nothing: str) -> pd.Series[str]:
    runs = df.drop_duplicates("run")
    words = [[_words(name, value) for value in _short(_values(runs, name))] for name in names]
    if OTHER_SETTINGS in df:
        words.append(runs[OTHER_SETTINGS].fillna("").tolist())
    texts = [", ".join(filter(None, run)) for run in zip(*words, strict=True)]
    texts = [text or nothing for text in texts or [""] * len(runs)]
    pairs = zip(texts, runs["run"].astype(str), without_config(runs), strict=True)
    texts = [run if alone else text for text, run, alone in pairs]
    return df["run"].map(dict(zip(runs["run"], texts, strict=True)))


def _short(values: Sequence[Any]) -> list[Any]:
    """Write long floats with four digits, or with as many as keep different values different.

    >>> _short([0.1, 0.010476157527896646, "cosine"])
    [0.1, '0.01048', 'cosine']
    >>> _short([0.010476157527896646, 0.010476257527896646])
    ['0.0104762', '0.0104763']
    """

    def rounded(value: Any, digits: int) -> Any:
        text = str(value)
        try:
            long = len(text) > LONGEST_FLOAT and "." in text
            return f"{float(text):.{digits}g}" if long else value
        except ValueError:
            return value

    different = len(set(map(str, values)))
    choices = ([rounded(value, digits) for value in values] for digits in range(4, 18))
    return next((c for c in choices if len(set(map(str, c))) == different), list(values))


def _words(setting: str, value: Any) -> str:
    missing = value in ("None", "nan")
    return f"no {label(setting)}" if missing else f"{label(setting)} {value}"


def seeds(df: pd.DataFrame) -> list[Any]:
    """Return the seed of each row, or the run where the seed is unknown."""
    if "seed" not in df:
        return df["run"].tolist()
    return df["seed"].astype(object).where(df["seed"].notna(), df["run"]).tolist()


def ordered(df: pd.DataFrame) -> list[str]:
    """Return the configurations of a table, sorted by the values of their settings."""
    runs = df.drop_duplicates("run")
    columns = [_values(runs, name) for name in settings(df)]
    if OTHER_SETTINGS in df:
        columns.append(runs[OTHER_SETTINGS].fillna("").tolist())
    keys = [[(isinstance(v, str), v) for v in run] for run in zip(*columns, strict=True)]
    texts = configurations(runs).tolist()
    pairs = sorted(zip(keys, texts, strict=True)) if keys else [([], text) for text in texts]
    return list(dict.fromkeys(text for _, text in pairs))


def label(setting: str) -> str:
    """Return a setting as a person writes it: "batch size" for `batch_size`."""
    return setting.removeprefix("config.").replace("_", " ")


def arm(df: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return the runs in which `by` alone varies; of several such arms the one with most values.

    `arm_name` returns what these runs have in common.
    """
    others, name = _arm(df, by)
    return df[others == name]


def arm_name(df: pd.DataFrame, by: str) -> str:
    """Return the settings that the runs of an arm share and other runs of the table do not.

    >>> grid = {"run": list("abcd"), "lr": [0.1, 0.2] * 2, "batch_size": [8, 8, 32, 32]}
    >>> arm_name(pd.DataFrame(grid), "lr")
    'batch size 32'
    """
    others, name = _arm(df, by)
    return "" if (others == name).all() else name


def _arm(df: pd.DataFrame, by: str) -> tuple[pd.Series[str], str]:
    """Return each row's settings apart from `by`, and the choice of them with most values of it."""
    require(df, [by])
    others = configurations(df, without=by)
    values = df[by].groupby(others).nunique()
    if values.max() < 2:
        raise FlatlensError(f"No two runs of the table differ in {by} and in nothing but the seed.")
    return others, str(values.idxmax())


def families(df: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Split a table into families, each with a name such as "mlp on digits, steps 200"."""
    network = [name for name in ("model", "data") if name in df]
    others = [name for name in settings(df) if label(name) not in TRAINING and name not in network]
    runs = df.drop_duplicates("run")
    heads = [
        " on ".join(str(v) for v in run if v == v and v is not None)
        for run in runs[network].to_numpy().tolist()
    ]
    tails = _family_settings(runs, others)
    names = [", ".join(filter(None, pair)) for pair in zip(heads, tails, strict=True)]
    alone = without_config(runs)
    names = [NO_CONFIG if a else name for name, a in zip(names, alone, strict=True)]
    by_run = dict(zip(runs["run"], names, strict=True))
    return [(str(name), family) for name, family in df.groupby(df["run"].map(by_run))]


def _family_settings(runs: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return the settings of each run that separate families, as text."""
    words = [[_words(name, value) for value in _values(runs, name)] for name in names]
    return [", ".join(run) for run in zip(*words, strict=True)] or [""] * len(runs)


def require_one_family(df: pd.DataFrame) -> None:
    """Raise a FlatlensError if the table has several families: their curves are not comparable."""
    names = [name for name, _ in families(df)]
    if len(names) > 1:
        raise FlatlensError(
            f"The table has runs of {', '.join(names)}; choose one, as in df[df.model == 'mlp']."
        )


def main_configuration(df: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the runs and the name of the configuration with most runs, of several the middle."""
    keys = configurations(df)
    runs = df["run"].groupby(keys).nunique()
    most = [key for key in ordered(df) if runs[key] == runs.max()]
    name = most[len(most) // 2]
    return df[keys == name], name


def curve_table(df: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the values of a column with one row per run and one column per shared step.

    Raises:
        FlatlensError: if the runs have no step in common at which the column was recorded.
    """
    row, runs = pd.factorize(df["run"], sort=True)
    place, steps = pd.factorize(df["step"], sort=True)
    # pivot_table takes a hundred times as long, and a report asks for thousands of tables
    table = np.full((len(runs), len(steps)), np.nan)
    table[row, place] = numbers(df, column)
    shared = ~np.isnan(table).any(axis=0)
    if not shared.any():
        raise FlatlensError(f"The runs have no step in common at which {column} was recorded.")
    index, columns = pd.Index(runs, name="run"), pd.Index(steps[shared], name="step")
    return pd.DataFrame(table[:, shared], index=index, columns=columns)


def interpolation(run: pd.DataFrame, share: float = INTERPOLATION) -> int | None:
    """Return the first recorded step of a run at which its training loss is near zero, or None.

    Near zero is a share of the loss in the first record.

    >>> run = pd.DataFrame({"step": [0, 10, 20, 30], "train_loss": [0.1, 0.05, 0.001, 0.0005]})
    >>> interpolation(run)
    20
    """
    if "train_loss" not in run:
        return None
    loss = numbers(run, "train_loss")
    below = np.flatnonzero(loss <= share * loss[0])
    return int(run["step"].to_numpy()[below[0]]) if len(below) else None


def interpolation_steps(df: pd.DataFrame, share: float = INTERPOLATION) -> pd.Series[float]:
    """Return `interpolation` of every run of a table, NaN for a run that never gets there.

    >>> loss = [0.1, 0.05, 0.001, 0.1, 0.1, 0.1]
    >>> df = pd.DataFrame({"run": list("aaabbb"), "step": [0, 10, 20] * 2, "train_loss": loss})
    >>> interpolation_steps(df).to_dict()
    {'a': 20.0, 'b': nan}
    """
    run, names = pd.factorize(df["run"])
    steps = np.full(len(names), np.nan)
    if "train_loss" in df and len(df):
        loss = numbers(df, "train_loss")
        start = loss[np.unique(run, return_index=True)[1]]
        below = np.flatnonzero(loss <= share * start[run])
        reached, where = np.unique(run[below], return_index=True)
        steps[reached] = df["step"].to_numpy(float)[below[where]]
    return pd.Series(steps, index=pd.Index(names, name="run"))


def median_interpolation(df: pd.DataFrame) -> float | None:
    """Return the median over runs of `interpolation`, or None if some run never gets there."""
    steps = interpolation_steps(df).to_numpy()
    return float(np.median(steps)) if len(steps) and not np.isnan(steps).any() else None


def _values(runs: pd.DataFrame, name: str) -> list[Any]:
    """Return a setting of each run as a hashable value: lists and missing values become text.

    A run from before a field was added has no value of it; it was trained with the default.
    """
    default = getattr(DEFAULTS, name.removeprefix("config."), None) if name in NEWER else None
    values = [default if default is not None and _missing(v) else v for v in runs[name]]
    return [v if np.isscalar(v) and v == v else str(v) for v in values]  # nan != nan


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)
