"""Compare the verdicts of several scales: one table of claim x figure x scale.

Each folder holds a `claims.json` that `flatlens reproduce` wrote; its `provenance.json` names the
scale. The scale nearest to the paper comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from flatlens.analysis.claim_tests import FEWEST_SEEDS_WITHIN
from flatlens.errors import FlatlensError
from flatlens.reproduction.call_log import scale_of
from flatlens.reproduction.claims import SAYS, markdown_table, verdicts
from flatlens.reproduction.judgement import CLAIMS, read_claims
from flatlens.reproduction.recipe import COVERED, SCALES

CORRELATIONS = ("T3", "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9")


def compare(folders: Sequence[Path]) -> pd.DataFrame:
    """Return the verdicts of several folders side by side.

    Args:
        folders: folders that `flatlens reproduce` wrote, one per scale.

    Returns:
        One row per claim and figure. The columns are `claim`, `figure`, one per scale with the
        verdict and the number of seeds, and `differs`: "yes" if two scales have different verdicts.

    Raises:
        FlatlensError: if fewer than two folders are given, two have the same scale, or a
            `claims.json` is missing or damaged.
    """
    if len(folders) < 2:
        raise FlatlensError("Give two folders or more to compare, one for each scale.")
    tables: dict[str, pd.DataFrame] = {}
    for folder in folders:
        scale = scale_of(folder)
        if scale in tables:
            raise FlatlensError(f"{folder} is at scale {scale}, as another folder is; name one.")
        tables[scale] = read_claims(folder / CLAIMS)
    scales = sorted(tables, key=_distance)
    cells = {scale: _cells(tables[scale]) for scale in scales}
    pairs = dict.fromkeys(pair for scale in scales for pair in cells[scale])
    order = sorted(pairs, key=lambda pair: list(SAYS).index(pair[0]))
    return pd.DataFrame([_line(pair, scales, cells) for pair in order])


def _distance(scale: str) -> int:
    """Return the place of a scale, counted from the paper's own."""
    return SCALES[::-1].index(scale) if scale in SCALES else len(SCALES)


def _cells(table: pd.DataFrame) -> dict[tuple[str, str], tuple[str, int]]:
    """Return verdict and number of independent units by claim and figure."""
    cells = {}
    for (claim, figure), results in table.groupby(["claim", "figure"], sort=False):
        words = " / ".join(verdicts(results)["verdict"])
        cells[str(claim), str(figure)] = (words, int(results.loc[results["main"], "units"].max()))
    return cells


def _line(
    pair: tuple[str, str],
    scales: Sequence[str],
    cells: Mapping[str, Mapping[tuple[str, str], tuple[str, int]]],
) -> dict[str, str]:
    claim, figure = pair
    line = {"claim": claim, "figure": figure}
    judged = [scale for scale in scales if pair in cells[scale]]
    for scale in scales:
        if pair in cells[scale]:
            word, units = cells[scale][pair]
            line[scale] = f"{word} ({units} seeds)" if units else word
        elif other := COVERED.get((figure, scale)):
            line[scale] = f"see {other}"
        else:
            line[scale] = f"stays at {judged[0]}"
    different = len({cells[scale][pair][0] for scale in judged}) > 1
    return line | {"differs": "yes" if different else ""}


def comparison_text(folders: Sequence[Path]) -> str:
    """Return the comparison in Markdown, with a note on what some scales cannot judge."""
    table = compare(folders)
    text = markdown_table(table)
    if set(table["claim"]) & set(CORRELATIONS):
        text += (
            "\n\nCorrelations (T3, C1 to C9) are judged pooled over configurations. Within "
            f"configurations they need {FEWEST_SEEDS_WITHIN} seeds and are in `claims.md` of the "
            "scales that have as many."
        )
    return text
