"""Everything that `flatlens reproduce` can name: the paper's figures and experiments of our own.

The figures of the paper that take a sweep each go to `reproduce`. `interventions`, `fig3` and
`panel` train other networks and leave their files in folders of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

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
    names: Sequence[str], *, source: Path | str | None = None, **options: Any
) -> Reproduction:
    """Train, draw and judge the figures and experiments called `names`.

    Args:
        names: figures of the paper, "all" of them, `interventions`, `fig3` or `panel`. Without
            names and with a source: all that the source holds.
        source: a file of records to redraw from.
        options: further arguments of `reproduction.reproduce.reproduce`.

    Returns:
        All files, claims and problems.
    """
    own = [name for name in names if name in EXPERIMENTS]
    if source is not None and not names:
        there = set(read_records(Path(source)))
        own = [name for name, recipes in RECIPES.items() if there & set(recipes)]
    figures = [name for name in names if name not in EXPERIMENTS]
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
