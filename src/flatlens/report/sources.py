"""Read the source of a report: records, and the files beside them.

A run folder that cannot be read is left out and listed with the reason. A damaged file of records,
claims or provenance raises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.model_trend import AXES
from flatlens.errors import FlatlensError
from flatlens.files.schema import is_number
from flatlens.report.measurement_files import parse_measurement
from flatlens.reproduction.archive import read_records
from flatlens.reproduction.call_log import PROVENANCE, read_provenance
from flatlens.reproduction.judgement import CLAIMS, read_claims
from flatlens.reproduction.reproduce import RECORDS
from flatlens.runs import read_runs
from flatlens.runs.layout import CONFIG
from flatlens.runs.layout import RECORDS as LINES
from flatlens.runs.run_config import flattened, read_content
from flatlens.training.config import Config

# Config fields that say how a run is measured or executed, not what is trained.
EXECUTION = {
    "seed", "measure", "quantities", "device", "threads", "snapshots", "run", "out", "config",
    "measured_loss", "measured_precision",
}  # fmt: skip
# Fields that a Tracker adds to the config of its user.
ADDED = {"measured_loss", "measured_precision"}


@dataclass(frozen=True)
class Source:
    """Everything that a report shows from one path."""

    path: Path
    frames: dict[str, pd.DataFrame]  # training runs by recipe; "" for runs without a recipe
    zoo: pd.DataFrame | None
    claims: pd.DataFrame | None  # verdicts that `reproduce` wrote
    provenance: list[dict[str, Any]]
    settings: list[str] = field(default_factory=list)  # columns that are part of a config
    unreadable: list[str] = field(default_factory=list)  # a sentence per run folder

    @property
    def base(self) -> Path:
        """The folder of the records."""
        return self.path if self.path.is_dir() else self.path.parent

    def folder(self, recipe: str, run: str) -> Path:
        """Return the folder of a run."""
        return self.base / "runs" / recipe / run if recipe else self.base / run

    def measured(
        self, models: Collection[str] = (), trust: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Measure one finished run of each configuration at its last checkpoint.

        Args:
            models: model factories of the user that may run.
            trust: whether every factory that a run names may run.
        """
        from flatlens.training.measure_run import measure_run

        measurements: dict[str, dict[str, Any]] = {}
        families = list(self.families())
        for recipe, network, df in families:
            last = df.groupby("run").tail(1)
            keys = run_table.configurations(last)
            for key in run_table.ordered(last):
                folder = self.folder(recipe, str(last.loc[keys == key, "run"].iloc[0]))
                words = [network] * (len(families) > 1 or key == "all") + [key] * (key != "all")
                m = measure_run(folder, models=models, trust=trust)
                measurements[": ".join(words)] = parse_measurement(m.to_json())
        if not measurements:
            raise FlatlensError(f"{self.path} has no training run to measure.")
        return measurements

    def families(self) -> Iterator[tuple[str, str, pd.DataFrame]]:
        """Yield recipe, network and its runs: the finished runs, or all if none is finished."""
        for recipe, frame in self.frames.items():
            for network, df in run_table.families(run_table.prepared(frame)):
                yield recipe, network or "runs", run_table.finished(df)


def read(path: Path) -> Source:
    """Read the records at a path, and the files beside them.

    Args:
        path: a folder of runs, a folder that `flatlens reproduce` made, or its records.

    Raises:
        FlatlensError: if there is nothing to read, or a file is damaged.
    """
    if not path.exists():
        raise FlatlensError(f"There is no folder {path}.")
    archive = path / RECORDS if path.is_dir() else path
    if archive.exists():
        return _read_archive(path, archive)
    return _read_folder(path)


def _read_archive(path: Path, archive: Path) -> Source:
    frames = read_records(archive)
    log, claims = archive.parent / PROVENANCE, archive.parent / CLAIMS
    calls = read_provenance(log)["calls"] if log.exists() else []
    table = read_claims(claims) if claims.exists() else None
    settings = list(dict.fromkeys(name for df in frames.values() for name in _settings(df)))
    return Source(path, frames, None, table, calls, settings)


def _read_folder(path: Path) -> Source:
    unreadable: list[str] = []
    try:
        df = read_runs(path, damaged=unreadable)
    except (RecursionError, OverflowError, ValueError, TypeError) as error:
        raise FlatlensError(f"The runs below {path} cannot be read: {error}.") from error
    configs = _configs(path, set(df["run"]) if "run" in df else set())
    df = _readable(df, configs, path, unreadable)
    if df.empty:
        if unreadable:
            raise FlatlensError(
                f"No run below {path} can be read. The reason for the first: {unreadable[0]}"
            )
        raise FlatlensError(f"The runs below {path} have no records yet.")
    calls = [c["provenance"] for c in configs.values() if isinstance(c.get("provenance"), dict)]
    keys = dict.fromkeys(key for c in configs.values() for key in flattened(c["config"]))
    settings = [f"config.{key}" if f"config.{key}" in df else key for key in keys]
    zoo = None
    if {"class", *AXES, *(f"{axis}_se" for axis in AXES)} <= set(df):
        models = df["class"].notna()
        zoo, df = df[models], df[~models].dropna(axis=1, how="all")
    if len(df):
        df = df.assign(**{run_table.OTHER_SETTINGS: df["run"].map(_other_settings(configs))})
    frames = {"": df} if len(df) else {}
    return Source(path, frames, zoo, None, calls, settings, unreadable)


def _configs(path: Path, runs: set[str]) -> dict[str, dict[str, Any]]:
    """Return the content of `config.json` of each run that could be read."""
    configs = {}
    for file in sorted(path.rglob(LINES)):
        run = file.parent.relative_to(path).as_posix()
        if run in runs:
            configs[run] = read_content(file.parent / CONFIG)
    return configs


def _readable(
    df: pd.DataFrame, configs: dict[str, dict[str, Any]], path: Path, unreadable: list[str]
) -> pd.DataFrame:
    """Drop runs with a step or a quantity that is no number; add the reason to `unreadable`."""
    if "run" not in df:
        return df
    set_by_user = {key for c in configs.values() for key in flattened(c["config"])}
    measured = [
        c for c in df if c not in ("run", "class", "model", "why") and c not in set_by_user
        and not str(c).startswith("config.")
    ]  # fmt: skip
    bad: dict[str, str] = {}
    for column in measured:
        if column != "step" and pd.api.types.is_numeric_dtype(df[column]):
            continue
        for run, step, value in zip(df["run"], df["step"], df[column], strict=True):
            missing = value is None or (isinstance(value, float) and value != value)
            if column == "step":
                fine = is_number(value, low=0, whole=True)
            else:  # text columns, such as verdicts in a user's records, are allowed
                huge = isinstance(value, int) and abs(value) > 2**63
                fine = missing or not (huge or isinstance(value, list | dict | tuple))
            if not fine:
                shown = f"{value!r}"
                where = f"at step {step!r} " if column != "step" else ""
                bad.setdefault(str(run), f"has {shown[:40]} for {str(column)!r} {where}".strip())
    unreadable += [f"{path / run / LINES} {why}; a number is expected." for run, why in bad.items()]
    df = df[~df["run"].isin(list(bad))]
    return df.infer_objects().astype({"step": int}) if len(df) else df


def _other_settings(configs: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    """Return for each run the settings that flatlens does not know and that vary, as text.

    The value is None for a run whose config is empty, or holds only what flatlens added.
    """
    known_names = {*run_table.SETTINGS, *EXECUTION, *(f.name for f in fields(Config))}
    flat = {run: flattened(content["config"]) for run, content in configs.items()}
    names = dict.fromkeys(key for config in flat.values() for key in config)
    unknown = [name for name in names if name.split(".")[0] not in known_names]
    varying = [n for n in unknown if len({str(config.get(n)) for config in flat.values()}) > 1]
    return {
        run: ", ".join(f"{run_table.label(n)} {config[n]}" for n in varying if n in config)
        if config.keys() - ADDED
        else None
        for run, config in flat.items()
    }


def _settings(df: pd.DataFrame) -> list[str]:
    """Return the columns that are settings of a training."""
    names = [f.name for f in fields(Config)]
    columns = [c for c in map(str, df) if c.removeprefix("config.").split(".")[0] in names]
    numeric = pd.api.types.is_numeric_dtype
    return [c for c in columns if f"config.{c}" not in df and not (c == "loss" and numeric(df[c]))]
