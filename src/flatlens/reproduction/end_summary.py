"""Summarise the quantities at the end of training, by configuration: `summary.md`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import run_table
from flatlens.errors import FlatlensError
from flatlens.reproduction.claims import markdown_table
from flatlens.reproduction.json_files import write_text

# The columns of the summary.
QUANTITIES = (
    "train_loss", "test_accuracy", "generalization_gap", "sqrt_sharpness", "nmls", "mls",
    "log_volume", "log_volume_top3", "local_dimension", "eq12.rhs", "bound_authors",
)  # fmt: skip


def summary(df: pd.DataFrame) -> pd.DataFrame:
    """Return mean and standard deviation over seeds at the last step, a row per configuration.

    The column `near zero at` has the median step at which the training loss comes to 1 % of its
    start.
    """
    df = run_table.prepared(run_table.finished(df))
    keys = dict(zip(df["run"], run_table.configurations(df), strict=True))
    last = run_table.ends(df)
    names = [name for name in QUANTITIES if name in last]
    ends = pd.DataFrame({name: run_table.numbers(last, name) for name in names})
    ends.index = pd.Index(last["run"].map(keys).to_numpy())  # also where there is no column
    ends_of: dict[Any, pd.DataFrame] = dict(iter(ends.groupby(level=0)))
    steps = run_table.interpolation_steps(run_table.followed(df))
    steps_of: dict[Any, Any] = dict(iter(steps.groupby(steps.index.map(keys))))
    nothing = ends[:0], steps[:0]
    return pd.DataFrame([
        _summary_row(key, ends_of.get(key, nothing[0]), steps_of.get(key, nothing[1]))
        for key in run_table.ordered(df)
    ])  # fmt: skip


def _summary_row(key: str, ends: pd.DataFrame, steps: pd.Series[float]) -> dict[str, str]:
    """Return one row of the summary.

    Args:
        key: name of the configuration.
        ends: the quantities at the last step of each run.
        steps: the step at which each run that was followed comes near zero loss, or NaN.
    """
    row = {"configuration": key, "runs": str(len(ends))}
    for name in ends:
        row[str(name)] = _mean_and_deviation(ends[name])
    reached = steps.dropna()
    share = _share(reached, steps)
    row["near zero at"] = f"{np.median(reached):,.0f}{share}" if len(reached) else "-"
    return row


def _mean_and_deviation(values: pd.Series[float]) -> str:
    """Say over how many runs a mean goes where some lack the quantity.

    >>> _mean_and_deviation(pd.Series([1.0, 3.0])), _mean_and_deviation(pd.Series([1.0, np.nan]))
    ('2 ± 1.4', '1 (1 of 2 runs)')
    """
    known = values.dropna()
    if known.empty:
        return "-"
    deviation = f" ± {known.std():.2g}" if len(known) > 1 else ""
    return f"{known.mean():.4g}{deviation}{_share(known, values)}"


def _share(known: pd.Series[float], values: pd.Series[float]) -> str:
    return "" if len(known) == len(values) else f" ({len(known)} of {len(values)} runs)"


def write_summary(frames: Mapping[str, pd.DataFrame], out: Path) -> Path:
    """Write `summary.md`, a table for each recipe that has a finished run."""
    sections = ["# At the end of training\n"]
    for recipe, df in frames.items():
        try:
            table = markdown_table(summary(df))
        except FlatlensError as error:
            table = str(error)
        networks = ", ".join(name for name, _ in run_table.families(df))
        sections.append(f"## {recipe}: {networks}\n\n{table}\n")
    return write_text(out / "summary.md", "\n".join(sections))
