"""``flatlens report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flatlens.cli.options import AboveZero, Quiet, Trust, Words, words_of
from flatlens.cli.outputs import begins_with, check_output_file

EXAMPLES = """Examples:
  flatlens report runs/mlp -o report.html
  flatlens report runs/mlp --measure
  flatlens report runs/mine --measure --model mymodel:build
  flatlens report docs/reproduction/records.jsonl.gz
  flatlens report runs --measurements resnet.json vit.json"""
MARK = "<title>flatlens"  # near the beginning of every report


def report(
    runs: Path,
    /,
    *,
    out: Annotated[Path, Parameter(("--out", "-o"))] = Path("report.html"),
    measure: Annotated[bool, Parameter(negative="")] = False,
    model: Words = None,
    trust: Trust = False,
    measurements: Annotated[
        list[Path] | None, Parameter(consume_multiple=True, negative="")
    ] = None,
    max_se: AboveZero = 0.15,
    quiet: Quiet = False,
) -> None:
    """Write everything that runs hold into one interactive HTML file that needs no network.

    Parameters
    ----------
    runs
        A folder of runs, the results of flatlens reproduce (the folder, or its records.jsonl.gz),
        or the folder of a zoo.
    out
        The file to write, which must be new or a report that flatlens wrote.
    measure
        Measure the last checkpoint of one run of each configuration, for the view by layers.
    model
        The model factories of your own that --measure may run; the runs name them.
    trust
        Run the code of every model factory that the runs name.
    measurements
        The files that flatlens measure --json printed, for the same view.
    max_se
        Leave out zoo models whose relative standard error on either axis is not below this number.
    quiet
        Print nothing but errors.
    """
    from flatlens.report import report

    check_output_file(out, begins_with(MARK), "a report")
    if measure:
        _prepare_models(runs, words_of(model), trust)
    path = report(
        runs, out, measure=measure, models=words_of(model), trust=trust,
        measurements=measurements or (), max_se=max_se,
    )  # fmt: skip
    if not quiet:
        print(path)


def _prepare_models(runs: Path, named: list[str], trust: bool) -> None:
    """Check which factories the runs name, and import those that the user asked for."""
    from flatlens.training.trust import check_trusted, import_factory

    base = runs if runs.is_dir() else runs.parent
    for file in sorted(base.rglob("config.json")):
        if (model := _model(file)) is not None:
            check_trusted([model], str(file.parent), trust=trust, named=named)
            import_factory(model, Path.cwd())


def _model(file: Path) -> str | None:
    """Read the model that a run's config names; a damaged config is refused later."""
    from flatlens.errors import FlatlensError
    from flatlens.runs.run_config import read_config

    try:
        model = read_config(file).get("model")
    except FlatlensError:
        return None
    return model if isinstance(model, str) else None
