"""Decide whether runs are a sweep that a claim of the paper can be judged on.

The paper's claims compare learning rates and batch sizes of networks that interpolate: their
training loss has come to 1 % of its start. Runs of anything else say nothing about them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pandas as pd

from flatlens.analysis import run_table
from flatlens.errors import FlatlensError

NETWORKS = ("mlp", "lenet", "vgg", "vgg11")  # the networks of the paper
VARIED = {"D1": "lr", "D2": "batch_size"}  # claims on one setting; others take either


def varied_settings(df: pd.DataFrame) -> list[str]:
    """Return which of learning rate and batch size vary while all else but the seed is equal."""
    varied = []
    for name in ("lr", "batch_size"):
        if name in df and pd.api.types.is_numeric_dtype(df[name]):
            with suppress(FlatlensError):
                run_table.arm(df, name)
                varied.append(name)
    return varied


def reached_interpolation(df: pd.DataFrame) -> dict[str, bool | None]:
    """Return for each configuration whether the training loss came to 1 % of its start.

    All runs of the configuration that were followed must get there. The value is None if no run of
    the configuration has more than one record with a training loss.
    """
    keys = dict(zip(df["run"], run_table.configurations(df), strict=True))
    steps = run_table.interpolation_steps(run_table.followed(df))
    reached = steps.notna().groupby(steps.index.map(keys)).all()
    there: dict[Any, bool] = dict(reached) if "train_loss" in df else {}
    return {name: bool(there[name]) if name in there else None for name in run_table.ordered(df)}


def judgeable(df: pd.DataFrame, claims: list[str]) -> tuple[pd.DataFrame, list[str], str]:
    """Select the runs of one family, and the claims that they can be judged on.

    Args:
        df: the runs of one family.
        claims: names of the claims that are about this network.

    Returns:
        The runs of the configurations that interpolate, the claims, and a sentence on what was
        left out and why (empty if nothing was).
    """
    nothing = df[:0]
    model = str(df["model"].iloc[0]) if "model" in df else ""
    if model not in NETWORKS:
        return nothing, [], "the network is none of the paper's (mlp, lenet, vgg)"
    if not varied_settings(df):
        return nothing, [], "neither the learning rate nor the batch size varies by itself"
    reached = reached_interpolation(df)
    good = [name for name, there in reached.items() if there]
    unknown = [name for name, there in reached.items() if there is None]
    late = [name for name, there in reached.items() if there is False]
    share = f"{100 * run_table.INTERPOLATION:g} % of its start"
    if not good:
        why = f"the training loss of no configuration came to {share}"
        if unknown:
            why = f"the records do not show whether the training loss came to {share}"
        return nothing, [], why
    sentence = f"left out, because their loss did not come to {share}: {', '.join(late)}"
    df = df[run_table.configurations(df).isin(good)]
    varied = varied_settings(df)
    if not varied:
        return nothing, [], f"only {', '.join(good)} came to {share}"
    chosen = [name for name in claims if VARIED.get(name, varied[0]) in varied]
    return df, chosen, sentence if late else ""
