"""The paper's figures and claims again: train what is missing, draw, test, keep the records.

What a folder holds afterwards:

| file                         | what                                                             |
|------------------------------|------------------------------------------------------------------|
| `runs/RECIPE/...`            | one folder a network, resumed by the next call                   |
| `fig1.pdf`, `fig1.png`, ...  | the figures asked for; `fig1_authors.*` with the definitions of  |
|                              | the authors' code where these differ from the paper's            |
| `claims.md`, `claims.json`   | a verdict on each claim, for each figure that has records        |
| `records.jsonl.gz`           | all records in one file, from which all of the above is redrawn  |
| `provenance.json`            | commands, versions, machine, wall time, networks                 |
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatlens.errors import FlatlensError
from flatlens.experiments import claims, records
from flatlens.experiments.archive import read_records, write_records
from flatlens.experiments.files import replacing
from flatlens.experiments.recipe import Drawing, Recipe, drawings, recipes
from flatlens.experiments.runs import read_runs
from flatlens.experiments.sweep import SweepError, sweep
from flatlens.experiments.timing import told
from flatlens.experiments.train import _load
from flatlens.figures import correlations, save, tightness, trends
from flatlens.figures.correlations import QUANTITIES
from flatlens.track.runs import provenance

RECORDS, PROVENANCE = "records.jsonl.gz", "provenance.json"
# the paper's definition, and the authors' code's
AUTHORS = {**claims.VARIANTS, "eq12.rhs": "bound_authors", "eq48_cd.rhs": "d_authors"}

Frames = dict[str, pd.DataFrame]  # of each recipe


@dataclass(frozen=True)
class Reproduction:
    """What was made: files, the table of claims, and what could not be done and why."""

    files: list[Path]
    claims: pd.DataFrame
    problems: list[str]


def reproduce(
    names: Sequence[str],
    *,
    out: Path | str,
    scale: str = "desk",
    train: bool = True,
    source: Path | str | None = None,
    progress: bool | None = None,
    **engine: Any,
) -> Reproduction:
    """Trains what the figures `names` need below `out`, then draws them and tests the claims.

    Without `train` only what is there is drawn; with `source`, a file of records, only what that
    holds. `engine` are further arguments of `sweep`. Runs that fail stop nothing else: they are
    told at the end. Results are written after each recipe, so that there is something to look at.
    """
    out = Path(out)
    wanted = drawings(names)
    given = None if source is None else read_records(Path(source))
    files: dict[Path, None] = {}
    problems: list[str] = []
    table = pd.DataFrame()
    with _accounted(out, scale, source):
        for recipe in (r for r in recipes().values() if r.name in wanted):
            try:
                if train and given is None:
                    _train(recipe, scale, out, progress, engine)
            except SweepError as error:
                problems.append(f"{recipe.name}: {error}")
            frames = found(out, scale) if given is None else given
            drawn, reasons = _drawn(recipe.name, wanted[recipe.name], frames, out)
            files |= dict.fromkeys(drawn)
            problems += reasons
            if frames:
                table = tested(frames)
                write_records(frames, out / RECORDS)
                files |= dict.fromkeys([*write_claims(table, out), out / RECORDS])
    return Reproduction([*files], table, problems)


def _train(
    recipe: Recipe, scale: str, out: Path, progress: bool | None, engine: Mapping[str, Any]
) -> None:
    base, grids = recipe.sweep(scale)
    _load(recipe.configs(scale)[0])  # data that are not there are told once, not by every run
    sweep(base, grids, out=_folder(recipe, out), progress=progress, **engine)


def _folder(recipe: Recipe, out: Path) -> Path:
    return out / "runs" / recipe.name


def found(out: Path, scale: str) -> Frames:
    """The records below `out` of every recipe that has some, at this scale."""
    frames = {}
    for recipe in recipes().values():
        if not any(_folder(recipe, out).glob("*/records.jsonl")):
            continue
        frame = read_runs(_folder(recipe, out))
        frame = frame[frame["run"].isin([config.name for config in recipe.configs(scale)])]
        if len(frame):
            frames[recipe.name] = frame.reset_index(drop=True)
    return frames


# ------------------------------------------------------------------ which runs


def finished(df: pd.DataFrame) -> pd.DataFrame:
    """The runs that have come to their last step; if there is none yet, all as far as they are."""
    last = df.groupby("run")["step"].transform("max")
    done = df[last >= df["steps"]]
    return df if done.empty else done


def followed(df: pd.DataFrame) -> pd.DataFrame:
    """The runs that were measured on the way and not at the end alone."""
    return df[df.groupby("run")["step"].transform("size") > 1]


# ------------------------------------------------------------------ figures


def draw(drawing: Drawing, df: pd.DataFrame) -> dict[str, Figure]:
    """A figure, and what comes behind its name; "_authors" with the authors' definitions."""
    df = finished(df)
    if drawing.draw == "tightness":
        return {"": tightness(followed(df))}
    if drawing.draw == "trends":
        assert drawing.by is not None
        df = followed(df)
        volume = AUTHORS["log_volume"]
        return {
            "": trends(df, drawing.by),
            "_authors": trends(df, drawing.by, volume=volume),
        }
    return {"": correlations(df), "_authors": correlations(df, _authors(df))}


def _authors(df: pd.DataFrame) -> list[str]:
    """The paper's nine quantities by the authors' definitions, as far as there are such numbers."""
    last = records.ends(records.prepared(df))
    names = [AUTHORS.get(name, name) for name in QUANTITIES]
    return [n for n in names if n in last and np.isfinite(records.numbers(last, n)).any()]


def _drawn(
    recipe: str, wanted: Sequence[Drawing], frames: Frames, out: Path
) -> tuple[list[Path], list[str]]:
    """Files of the figures, and why others could not be drawn."""
    files: list[Path] = []
    problems = []
    for drawing in wanted:
        try:
            if recipe not in frames:
                raise FlatlensError(f"there are no records of the recipe {recipe}.")
            for suffix, figure in draw(drawing, frames[recipe]).items():
                files += save(figure, out / f"{drawing.name}{suffix}").values()
        except FlatlensError as error:
            problems.append(f"{drawing.name} is not drawn: {error}")
    return files, problems


# ------------------------------------------------------------------ claims


def tested(frames: Frames) -> pd.DataFrame:
    """The claims of every figure that has records, each on the runs that the figure shows."""
    tables = []
    for recipe in recipes().values():
        for drawing in recipe.figures.values() if recipe.name in frames else ():
            df = finished(frames[recipe.name])
            try:
                if drawing.by is not None:
                    df = records.arm(df, drawing.by)
            except FlatlensError:  # a single configuration so far: that is told by the claims
                pass
            table = claims.claims(df, drawing.claims, AUTHORS)
            tables.append(table.assign(figure=drawing.name))
    return pd.concat(tables, ignore_index=True)


def overview(table: pd.DataFrame) -> pd.DataFrame:
    """Verdicts, one row a claim and one column a figure."""
    short = [
        claims.verdicts(part).assign(figure=figure)
        for figure, part in table.groupby("figure", sort=False)
    ]
    wide = pd.concat(short).pivot_table(
        index="claim", columns="figure", values="verdict", aggfunc=" / ".join, sort=False
    )
    order = [name for name in claims.TEXTS if name in wide.index]
    wide = wide.loc[order, list(dict.fromkeys(table["figure"]))].fillna("")
    wide.insert(0, "says", [claims.TEXTS[name] for name in order])
    return wide.reset_index()


def write_claims(table: pd.DataFrame, out: Path) -> list[Path]:
    """`claims.md` for people, `claims.json` for programs."""
    titles = {d.name: d.title for r in recipes().values() for d in r.figures.values()}
    parts = [
        "# The paper's claims on these runs\n",
        claims._pipes(overview(table)) + "\n",
        *(
            f"## {titles[str(figure)]}\n\n{claims.markdown(part)}"
            for figure, part in table.groupby("figure", sort=False)
        ),
    ]
    rows = [{key: _plain(value) for key, value in row.items()} for row in table.to_dict("records")]
    texts = {"claims.md": "\n".join(parts), "claims.json": json.dumps(rows, indent=1) + "\n"}
    for name, text in texts.items():
        with replacing(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------ how it was made


@contextmanager
def _accounted(out: Path, scale: str, source: Path | str | None) -> Iterator[None]:
    """Notes the call in `provenance.json`, also one that Ctrl-C ended.

    Redrawn results keep the provenance of their records.
    """
    before = time.perf_counter()
    try:
        yield
    except KeyboardInterrupt:
        _note(out, scale, source, time.perf_counter() - before)
        raise
    _note(out, scale, source, time.perf_counter() - before)


def _note(out: Path, scale: str, source: Path | str | None, seconds: float) -> None:
    old = (out if source is None else Path(source).parent) / PROVENANCE
    content = json.loads(old.read_text()) if old.exists() else {"calls": []}
    if source is None:
        command = "flatlens " + shlex.join(sys.argv[1:])
        call = {"command": command, "scale": scale, "wall_time": told(seconds)}
        content["calls"].append(provenance() | call)
        content["networks"] = {name: _counts(df) for name, df in found(out, scale).items()}
    with replacing(out / PROVENANCE) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def _counts(df: pd.DataFrame) -> dict[str, int]:
    last = df.groupby("run").tail(1)
    return {
        "runs": len(last),
        "finished": int((last["step"] >= last["steps"]).sum()),
        "records": len(df),
    }
