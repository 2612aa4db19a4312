"""What a report is about: records, and what was written beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.analysis import tables as records
from flatlens.errors import FlatlensError
from flatlens.figures.zoo import AXES
from flatlens.files.plain_json import NON_FINITE
from flatlens.reproduction import claims
from flatlens.reproduction.archive import read_records
from flatlens.reproduction.reproduce import PROVENANCE, RECORDS, finished
from flatlens.runs import read_runs
from flatlens.runs.layout import CONFIG
from flatlens.runs.layout import RECORDS as LINES
from flatlens.runs.run_config import flattened
from flatlens.training.config import Config

# columns of `claims.json` that are shown
PARTS = (
    "part", "scope", "statistic", "claimed", "value", "low", "high", "effect", "n", "verdict",
    "note",
)  # fmt: skip
# what is shown of a measurement
SHOWN = {
    "layers": {
        "name", "kind", "positions", "mls", "sharpness", "sharing_ratio", "eq5_lhs", "eq5_rhs",
        "eq5_slack", "eq5_verdict", "eq5_why",
    },
    "inequalities": {"name", "equation", "lhs", "rhs", "slack", "holds", "verdict", "why"},
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Everything that was found in a place."""

    path: Path
    frames: dict[str, pd.DataFrame]  # of training, by recipe; "" where there is none
    zoo: pd.DataFrame | None
    claims: pd.DataFrame | None  # as `reproduce` wrote them
    provenance: list[dict[str, Any]]
    settings: list[str] = field(default_factory=list)  # columns that are part of a config

    @property
    def base(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def folder(self, recipe: str, run: str) -> Path:
        return self.base / "runs" / recipe / run if recipe else self.base / run

    def measured(self) -> dict[str, dict[str, Any]]:
        """One finished run of each configuration, measured at its last checkpoint."""
        from flatlens.training.measure_run import measure_run

        found: dict[str, dict[str, Any]] = {}
        families = list(self.families())
        for recipe, network, df in families:
            last = df.groupby("run").tail(1)
            keys = records.configurations(last)
            for key in records.ordered(last):
                folder = self.folder(recipe, str(last.loc[keys == key, "run"].iloc[0]))
                parts = [network] * (len(families) > 1 or key == "all") + [key] * (key != "all")
                found[": ".join(parts)] = _parsed(measure_run(folder).to_json())
        if not found:
            raise FlatlensError(f"{self.path} has no training run to measure.")
        return found

    def families(self) -> Iterator[tuple[str, str, pd.DataFrame]]:
        """Recipe, network and its runs: the finished ones, or all where none is."""
        for recipe, frame in self.frames.items():
            for network, df in records.families(records.prepared(frame)):
                yield recipe, network or "runs", finished(df) if "steps" in df else df


def read(path: Path) -> Source:
    """The records at `path`, and what was written beside them."""
    if not path.exists():
        raise FlatlensError(f"There is no folder {path}.")
    archive = path / RECORDS if path.is_dir() else path
    if archive.is_file():
        frames = read_records(archive)
        beside = archive.parent / PROVENANCE
        made = _json(beside) if beside.exists() else {}
        calls = made.get("calls", []) if isinstance(made, dict) else []
        settings = list(dict.fromkeys(name for df in frames.values() for name in _settings(df)))
        return Source(path, frames, None, _judgement(archive.parent), calls, settings)
    df = read_runs(path)
    if df.empty:
        raise FlatlensError(f"The runs below {path} have no records yet.")
    files = [file.parent / CONFIG for file in sorted(path.rglob(LINES))]
    configs = [_json(file) for file in files]
    made = [c["provenance"] for c in configs if isinstance(c.get("provenance"), dict)]
    keys = dict.fromkeys(key for c in configs for key in flattened(c["config"]))
    settings = [f"config.{key}" if f"config.{key}" in df else key for key in keys]
    zoo = None
    if {"class", *AXES, *(f"{axis}_se" for axis in AXES)} <= set(df):
        models = df["class"].notna()
        zoo, df = df[models], df[~models].dropna(axis=1, how="all")
    return Source(path, {"": df} if len(df) else {}, zoo, None, made, settings)


def _settings(df: pd.DataFrame) -> list[str]:
    """The columns that are settings of a training."""
    names = [f.name for f in fields(Config)]
    found = [c for c in map(str, df) if c.removeprefix("config.").split(".")[0] in names]
    return [c for c in found if f"config.{c}" not in df and not (c == "loss" and _numeric(df[c]))]


def _numeric(column: Any) -> bool:
    return bool(pd.api.types.is_numeric_dtype(column))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FlatlensError(f"Cannot read {path}: {error}.") from error


def _judgement(folder: Path) -> pd.DataFrame | None:
    """The table in `claims.json`, if there is one."""
    path = folder / "claims.json"
    if not path.exists():
        return None
    rows = _json(path)
    found = pd.DataFrame(rows if isinstance(rows, list) else [])
    needed = {"claim", "network", "main", "figure", *PARTS}
    if not needed <= set(found) or not set(found["claim"]) <= set(claims.TEXTS):
        raise FlatlensError(f"{path} is no table of claims; make it again with flatlens reproduce.")
    numbers = ["value", "low", "high", "effect"]
    return found.assign(**{name: records.numbers(found, name) for name in numbers})


def read_measurement(file: Path) -> dict[str, Any]:
    """What `flatlens measure --json` printed."""
    try:
        found = _parsed(file.read_text(encoding="utf-8"))
        complete = all(SHOWN[part] <= set(row) for part in SHOWN for row in found[part])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlatlensError(f"Cannot read a measurement from {file}: {error}.") from error
    if not complete:
        raise FlatlensError(f"{file} is not what flatlens measure --json gives.")
    return found


def label(file: Path, among: Sequence[Path | str]) -> str:
    """A file's name, with its folder where names repeat."""
    same = [other for other in among if Path(other).stem == file.stem]
    return file.stem if len(same) == 1 else str(file)


def _parsed(content: str) -> dict[str, Any]:
    return dict(json.loads(content, object_pairs_hook=_numbers))


def _numbers(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Numbers that JSON does not have are strings in it; a name may be any string."""
    words = ("name", "kind", "weight", "why", "equation")
    return {
        k: v if k in words or not isinstance(v, str) else NON_FINITE.get(v, v) for k, v in pairs
    }
