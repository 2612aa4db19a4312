"""Tables of a zoo: which models are precise enough, what was measured, what a zoo would cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flatlens.errors import FlatlensError
from flatlens.training.timm_models import family, select, size
from flatlens.zoo.settings import check_source

if TYPE_CHECKING:
    import pandas as pd

AXES = ("adaptive_sharpness", "normalized_mls")
SHOWN = ("class", "parameters", *(f"{a}{e}" for a in AXES for e in ("", "_se")), "top1")
FEWEST_CORRELATED = 8  # fewest models for a meaningful rank correlation
COUNTS = ("parameters",)  # columns that are printed as whole numbers
# rough costs for a listing: an image takes this many forward passes; memory is counted in what one
# forward pass saves
FORWARDS, IMAGES_AT_ONCE, SECOND_DERIVATIVE = 100, 5, 4


def precise_models(
    frame: pd.DataFrame, max_se: float | None
) -> tuple[pd.DataFrame, dict[str, float]]:
    """Split models by the relative standard errors of both axes.

    Args:
        frame: the records of a zoo.
        max_se: a model stays if both errors are below this; None keeps all that converged.

    Returns:
        The models that stay, and the larger error of each of the others: infinity where Lanczos did
        not converge, since its error is unknown.
    """
    if max_se is not None and not max_se > 0:
        raise FlatlensError(f"max_se={max_se} would drop every model; give a number above 0.")
    if frame.empty:
        return frame, {}
    errors = [frame[f"{axis}_se"] / frame[axis] for axis in AXES]
    worst = np.maximum(*(np.asarray(e, float) for e in errors))
    worst[~converged(frame)] = np.inf
    good = ~np.isposinf(worst) if max_se is None else worst < max_se
    models = frame["model"].to_numpy()[~good].tolist()
    return frame[good], dict(zip(models, worst[~good].tolist(), strict=True))


def converged(frame: pd.DataFrame) -> Any:
    """Return for each model whether Lanczos reached its tolerance for every image.

    Models without this field in their record count as converged.
    """
    if "spectra_converged" not in frame:
        return np.ones(len(frame), dtype=bool)
    return ~frame["spectra_converged"].eq(False).to_numpy(dtype=bool)


def listing(models: Sequence[str], source: str, n: int) -> list[list[str]]:
    """List the models that would run, their sizes, and a rough estimate of memory and time."""
    check_source(source)
    a = torch.randn(512, 512)
    start = time.perf_counter()
    for _ in range(8):
        a @ a
    speed = 8 * 2 * 512**3 / (time.perf_counter() - start)
    lines = [["model", "class", "parameters", "pixels", "memory", "time"]]
    for name in select(models, source):
        try:
            s = size(name)
        except Exception:  # a model that does not run on shapes alone
            lines.append([name, family(name), *"????"])
            continue
        memory = 8 * s.parameters + IMAGES_AT_ONCE * SECOND_DERIVATIVE * s.bytes
        seconds = n * FORWARDS * s.flops / speed
        sizes = [f"{s.parameters:,}", str(s.pixels), f"{memory / 1e9:.1f} GB"]
        duration = f"{seconds / 60:,.0f} min" if seconds > 90 else f"{seconds:.0f} s"
        lines.append([name, family(name), *sizes, duration])
    return lines


def summary(frame: pd.DataFrame, good: pd.DataFrame, dropped: dict[str, float]) -> dict[str, Any]:
    """Collect which models were measured, dropped, skipped, and left to another process."""
    shown = [c for c in SHOWN if c in good]
    return {
        "models": {row["model"]: row for row in good[["model", *shown]].to_dict("records")},
        "dropped": dropped,
        "skipped": frame.attrs["skipped"],
        "busy": frame.attrs["busy"],
    }


def text(summary: Mapping[str, Any]) -> str:
    """Write a summary as lines of text: a table of the models, then one line for each other."""
    from flatlens.measurement.printing import columns

    lines: list[str] = []
    if summary["models"]:
        names = list(dict.fromkeys(k for row in summary["models"].values() for k in row))
        body = [[_cell(k, row.get(k, "")) for k in names] for row in summary["models"].values()]
        lines += columns([names, *body])
    for name, e in summary["dropped"].items():
        why = "Lanczos did not converge" if np.isposinf(e) else f"relative standard error {e:.2f}"
        lines.append(f"dropped {name}: {why}")
    lines += [f"skipped {name}: {reason}" for name, reason in summary["skipped"].items()]
    lines += [f"left to another process: {name}" for name in summary["busy"]]
    for name, claim in summary.get("claims", {}).items():
        lines.append(f"{name}, {claim['says']}: {claim['verdict']} ({claim['found']})")
    lines += summary.get("notes", [])
    lines += [summary["figure"]] if "figure" in summary else []
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    from flatlens.measurement.printing import number

    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if name in COUNTS else number(value)
