"""Everything that `flatlens reproduce` can name: the paper's figures and experiments of our own.

The figures of the paper that take a sweep each go to `reproduce`. `interventions`, `fig3` and
`panel` train other networks and leave their files in folders of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.errors import FlatlensError
from flatlens.reproduction import figure3, interventions, panel
from flatlens.reproduction.archive import read_records
from flatlens.reproduction.reproduce import Reproduction
from flatlens.reproduction.reproduce import reproduce as reproduce_figures

EXPERIMENTS: dict[str, Callable[..., Reproduction]] = {
    interventions.NAME: interventions.interventions,
    figure3.NAME: figure3.figure3,
    panel.NAME: panel.panel,
}
RECIPES = {
    interventions.NAME: interventions.RECIPES,
    figure3.NAME: figure3.RECIPES,
    panel.NAME: panel.RECIPES,
}


def reproduce(
    names: Sequence[str],
    *,
    source: Path | str | None = None,
    known: Path | str | None = None,
    **options: Any,
) -> Reproduction:
    """Train, draw and judge the figures and experiments called `names`.

    Args:
        names: figures of the paper, "all" of them, `interventions`, `fig3` or `panel`. Without
            names and with a source: all that the source holds.
        source: a file of records to redraw from.
        known: a file of records of finished runs, which are not trained again.
        options: further arguments of `reproduction.reproduce.reproduce`.

    Returns:
        All files, claims and problems.

    Raises:
        FlatlensError: if `known` is given for more than one experiment, or for one whose records
            alone do not suffice.
    """
    own = [name for name in names if name in EXPERIMENTS]
    if source is not None and not names:
        there = set(read_records(Path(source)))
        own = [name for name, recipes in RECIPES.items() if there & set(recipes)]
    figures = [name for name in names if name not in EXPERIMENTS]
    if known is not None:
        _check_known(own, figures)
        options["known"] = known
    results = []
    if figures or not own:
        results.append(reproduce_figures(figures, source=source, **options))
    options["scale"] = options.get("scale") or "desk"
    results += [EXPERIMENTS[name](source=source, **options) for name in dict.fromkeys(own)]
    return Reproduction(
        [file for result in results for file in result.files],
        pd.concat([result.claims for result in results], ignore_index=True),
        [problem for result in results for problem in result.problems],
    )


def _check_known(own: Sequence[str], figures: Sequence[str]) -> None:
    """Refuse known records for what needs more than records, and for two experiments at once."""
    for name in own:
        if name != interventions.NAME:
            raise FlatlensError(f"{name} measures weights, which a file of records does not hold.")
    if own and figures:
        raise FlatlensError(f"Known records belong to one experiment; call {own[0]} by itself.")
