"""The paper's figures and claims again: train what is missing, draw, test, keep the records.

What a folder holds afterwards:

| file                         | what                                                             |
|------------------------------|------------------------------------------------------------------|
| `runs/RECIPE/...`            | one folder a network, resumed by the next call                   |
| `fig1.pdf`, `fig1.png`, ...  | the figures asked for; `fig1_authors.*` with the definitions of  |
|                              | the authors' code where these differ from the paper's            |
| `claims.md`, `claims.json`   | a verdict on each claim, for each figure that has records        |
| `summary.md`                 | quantities at the end of training, by configuration              |
| `records.jsonl.gz`           | all records in one file, from which all of the above is redrawn  |
| `provenance.json`            | commands, versions, machine, wall time, networks                 |
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatlens.analysis import tables as records
from flatlens.errors import FlatlensError
from flatlens.figures.correlations import QUANTITIES, correlations
from flatlens.figures.style import save
from flatlens.figures.tightness import tightness
from flatlens.figures.trends import trends
from flatlens.reproduction import claims, timing
from flatlens.reproduction.archive import read_records, write_records
from flatlens.reproduction.recipe import Drawing, Recipe, drawings, recipes
from flatlens.runs import read_runs
from flatlens.runs.files import replacing
from flatlens.runs.run import provenance
from flatlens.training.sweep import SweepError, sweep
from flatlens.training.train import _load

RECORDS, PROVENANCE = "records.jsonl.gz", "provenance.json"
# the paper's definition, and the authors' code's
AUTHORS = {**claims.VARIANTS, "eq12.rhs": "bound_authors", "eq48_cd.rhs": "d_authors"}
# columns of the summary
ENDS = (
    "train_loss", "test_accuracy", "generalization_gap", "sqrt_sharpness", "nmls", "mls",
    "log_volume", "log_volume_top3", "local_dimension", "eq12.rhs", "bound_authors",
)  # fmt: skip

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
    holds (all of it without `names`). `engine` are further arguments of `sweep`. Runs that fail
    stop nothing else: they are told at the end. Figures are drawn as soon as their recipe is done.
    """
    out = Path(out)
    frames: Frames = {} if source is None else _redrawable(Path(source))
    known = recipes()
    if not names:
        names = [name for recipe in frames for name in known[recipe].figures]
    wanted = drawings(names)
    train = train and source is None
    for name in wanted if train else ():
        _load(known[name].configs(scale)[0])  # data that are not there are told at once, and once
    files: list[Path] = []
    problems: list[str] = []
    with _accounted(out, scale, source, problems):
        for name, figures in wanted.items():
            try:
                if train:
                    place = _folder(known[name], out)
                    sweep(*known[name].sweep(scale), out=place, progress=progress, **engine)
            except SweepError as error:
                problems.append(f"{name}: {error}")
            if source is None:
                frames = found(out, scale, problems)
            drawn, reasons = _drawn(name, figures, frames, out)
            files += drawn
            problems += reasons
        table = judged(frames)
        if frames:
            write_records(frames, out / RECORDS)
            files += [*write_claims(table, frames, out), write_summary(frames, out), out / RECORDS]
    return Reproduction(files, table, problems)


def _folder(recipe: Recipe, out: Path) -> Path:
    return out / "runs" / recipe.name


def _redrawable(source: Path) -> Frames:
    """The records in a file, all of known recipes and with the columns that all figures need."""
    frames, known = read_records(source), recipes()
    for name, df in frames.items():
        if name not in known:
            raise FlatlensError(
                f"{source} has records of the recipe {name!r}; those known are {', '.join(known)}."
            )
        for column in ("run", "step", "steps"):
            if column not in df or df[column].isna().any():
                raise FlatlensError(f"{source} has records of {name} without {column!r}.")
            if column != "run" and not pd.api.types.is_numeric_dtype(df[column]):
                raise FlatlensError(
                    f"{source} has records of {name} whose {column!r} is no number."
                )
    return frames


def found(out: Path, scale: str, problems: list[str] | None = None) -> Frames:
    """The records below `out` of every recipe that has some, at this scale.

    Runs that cannot be read are left out and told in `problems`, once each.
    """
    frames = {}
    damaged: list[str] = []
    for recipe in recipes().values():
        begun = any(_folder(recipe, out).glob("*/records.jsonl"))
        if not begun or scale not in recipe.scales:
            continue
        frame = read_runs(_folder(recipe, out), damaged=damaged)
        frame = frame[frame["run"].isin([config.name for config in recipe.configs(scale)])]
        if len(frame):
            frames[recipe.name] = frame.reset_index(drop=True)
    if problems is not None:
        problems += [text for text in damaged if not any(text in told for told in problems)]
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
        df, volume = followed(df), AUTHORS["log_volume"]
        return {"": trends(df, drawing.by), "_authors": trends(df, drawing.by, volume=volume)}
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


def judged(frames: Frames) -> pd.DataFrame:
    """The claims of every figure that has records, each on the runs that the figure shows."""
    tables = []
    for recipe in recipes().values():
        for drawing in recipe.figures.values() if recipe.name in frames else ():
            df = finished(frames[recipe.name])
            if drawing.by is not None:
                with suppress(FlatlensError):  # a single configuration so far: the claims say so
                    df = records.arm(df, drawing.by)
            table = claims.claims(df, drawing.claims, AUTHORS)
            tables.append(table.assign(figure=drawing.name))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def overview(table: pd.DataFrame) -> pd.DataFrame:
    """Verdicts, one row a claim and one column a figure."""
    short = [
        claims.verdicts(part).assign(figure=figure)
        for figure, part in table.groupby("figure", sort=False)
    ]
    wide = pd.concat(short).pivot_table(
        index="claim", columns="figure", values="verdict", aggfunc=" / ".join, sort=False
    )
    order = [name for name in claims.SAYS if name in wide.index]
    wide = wide.loc[order, list(dict.fromkeys(table["figure"]))].fillna("")
    wide.insert(0, "says", [claims.SAYS[name] for name in order])
    return wide.reset_index()


def write_claims(table: pd.DataFrame, frames: Frames, out: Path) -> list[Path]:
    """`claims.md` for people, `claims.json` for programs."""
    titles = {d.name: d.title for r in recipes().values() for d in r.figures.values()}
    counts = {name: _counts(df) for name, df in frames.items()}
    told = [f"{name} {c['finished']} of {c['runs']}" for name, c in counts.items()]
    parts = [
        "# The paper's claims on these runs\n",
        f"Networks that have come to their last step, of those begun: {', '.join(told)}.\n",
        claims._pipes(overview(table)) + "\n",
        *(
            f"## {titles[str(figure)]}\n\n{claims.markdown(part)}"
            for figure, part in table.groupby("figure", sort=False)
        ),
    ]
    rows = [{key: _plain(value) for key, value in row.items()} for row in table.to_dict("records")]
    texts = {"claims.md": "\n".join(parts), "claims.json": json.dumps(rows, indent=1) + "\n"}
    return [_written(out / name, text) for name, text in texts.items()]


def _written(path: Path, text: str) -> Path:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------ numbers at the end


def summary(df: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds at the last step, one row a configuration.

    `near zero at` is the median step where the training loss comes to 1 % of its start.
    """
    df = records.prepared(finished(df))
    keys, last = records.configurations(df), records.ends(df)
    rows = []
    for key in records.ordered(df):
        runs = df[keys == key]
        end = last[last["run"].isin(runs["run"])]
        row = {"configuration": key, "runs": str(len(end))}
        for name in [name for name in ENDS if name in last]:
            values = pd.Series(records.numbers(end, name))
            row[name] = f"{values.mean():.4g} ± {values.std():.2g}"
        steps = [records.interpolation(run) for _, run in followed(runs).groupby("run")]
        reached = [step for step in steps if step is not None]
        share = "" if len(reached) == len(steps) else f" ({len(reached)} of {len(steps)} runs)"
        row["near zero at"] = f"{np.median(reached):,.0f}{share}" if reached else "-"
        rows.append(row)
    return pd.DataFrame(rows)


def write_summary(frames: Frames, out: Path) -> Path:
    """`summary.md`: a table for each recipe that has a finished run."""
    parts = ["# At the end of training\n"]
    for recipe, df in frames.items():
        try:
            table = claims._pipes(summary(df))
        except FlatlensError as error:
            table = str(error)
        networks = ", ".join(name for name, _ in records.families(df))
        parts.append(f"## {recipe}: {networks}\n\n{table}\n")
    return _written(out / "summary.md", "\n".join(parts))


# ------------------------------------------------------------------ how it was made


@contextmanager
def _accounted(
    out: Path, scale: str, source: Path | str | None, problems: list[str]
) -> Iterator[None]:
    """Notes the call in `provenance.json`, also one that Ctrl-C ended.

    Redrawn results keep the provenance of their records.
    """
    before = time.perf_counter()
    try:
        yield
    except KeyboardInterrupt:
        problems += _note(out, scale, source, time.perf_counter() - before)
        raise
    problems += _note(out, scale, source, time.perf_counter() - before)


def _note(out: Path, scale: str, source: Path | str | None, seconds: float) -> list[str]:
    """Adds a call to the list; where that is damaged a new one is begun, and this is told."""
    old = (out if source is None else Path(source).parent) / PROVENANCE
    content: dict[str, Any] = {"calls": []}
    problems = []
    if old.exists():
        try:
            content = dict(json.loads(old.read_text()))
            content["calls"] = [*content["calls"]]
        except (ValueError, TypeError, KeyError):
            content = {"calls": []}
            problems.append(f"{old} was damaged; a new list of calls is begun.")
    if source is None:
        command = "flatlens " + shlex.join(sys.argv[1:])
        call = {"command": command, "scale": scale, "wall_time": timing.told(seconds)}
        content["calls"].append(provenance() | call)
        content["networks"] = {name: _counts(df) for name, df in found(out, scale).items()}
    _written(out / PROVENANCE, json.dumps(content, indent=1) + "\n")
    return problems


def _counts(df: pd.DataFrame) -> dict[str, int]:
    last = df.groupby("run").tail(1)
    return {
        "runs": len(last),
        "finished": int((last["step"] >= last["steps"]).sum()),
        "records": len(df),
    }
