"""Summarise the quantities at the end of training, by configuration: `summary.md`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
    keys, last = run_table.configurations(df), run_table.ends(df)
    return pd.DataFrame([
        _summary_row(key, df[keys == key], last) for key in run_table.ordered(df)
    ])  # fmt: skip


def _summary_row(key: str, runs: pd.DataFrame, last: pd.DataFrame) -> dict[str, str]:
    end = last[last["run"].isin(runs["run"])]
    row = {"configuration": key, "runs": str(len(end))}
    for name in [name for name in QUANTITIES if name in last]:
        values = pd.Series(run_table.numbers(end, name))
        row[name] = f"{values.mean():.4g} ± {values.std():.2g}"
    steps = [run_table.interpolation(run) for _, run in run_table.followed(runs).groupby("run")]
    reached = [step for step in steps if step is not None]
    share = "" if len(reached) == len(steps) else f" ({len(reached)} of {len(steps)} runs)"
    row["near zero at"] = f"{np.median(reached):,.0f}{share}" if reached else "-"
    return row


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
