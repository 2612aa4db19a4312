"""``flatlens reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from flatlens.cli.exit_codes import FAILED
from flatlens.cli.guard import refuse
from flatlens.cli.options import EngineName, Positive, Quiet, show_progress
from flatlens.cli.outputs import check_output_folder
from flatlens.cli.printing import print_table
from flatlens.errors import FlatlensError

EXAMPLES = """Examples:
  flatlens reproduce --list --scale desk
  flatlens reproduce fig1 --scale smoke --out smoke
  flatlens reproduce all --scale desk --out desk
  flatlens reproduce --from docs/reproduction/records.jsonl.gz --out redrawn
  flatlens reproduce h8 --scale night --with docs/reproduction/night/records.jsonl.gz --out night
  flatlens reproduce --compare docs/reproduction docs/reproduction/night"""


def reproduce(
    *names: str,
    scale: Literal["smoke", "desk", "night", "paper"] | None = None,
    out: Path = Path("reproduction"),
    workers: Positive | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    train: Annotated[bool, Parameter(negative="--no-train", name="", show_default=False)] = True,
    source: Annotated[Path | None, Parameter("--from")] = None,
    known: Annotated[Path | None, Parameter("--with")] = None,
    compare: Annotated[list[Path] | None, Parameter(consume_multiple=True, negative="")] = None,
    show: Annotated[bool, Parameter("--list", negative="")] = False,
    quiet: Quiet = False,
) -> int:
    """Redraw the paper: train, measure, draw, and give a verdict on each of its claims.

    A call that was stopped continues where it was, and figures share their networks.

    Parameters
    ----------
    names
        The figures to draw: fig1, fig2, g4, g5, g6, g7, h8, h9, all (these eight), d3 (a longer
        training), interventions (networks trained to be flatter), fig3 (vision transformers), or
        panel (curvature, local and global compression over training).
    scale
        The size of the experiment: smoke needs no data and takes a minute or so for each figure,
        desk takes fewer steps, images and seeds than the paper, night takes one night, and paper is
        as published. The default is desk; with --from it is the scale of the records.
    out
        The folder for runs, figures, claims and records.
    workers
        The number of worker processes; by default as many as the machine has cores.
    engine
        Where to train: local starts processes on this machine, dask uses a Dask scheduler.
    address
        The address of a running Dask scheduler; by default one is started.
    train
        Train nothing and draw what is there.
    source
        A file of records to redraw from without any training; without names everything that it
        holds is drawn.
    known
        A file of records of finished runs, such as docs/reproduction/night/records.jsonl.gz. They
        are drawn and judged with the others, and are not trained again.
    compare
        Folders of several scales: their verdicts are printed side by side, and nothing else is
        done.
    show
        List the recipes with the time that each would take on this machine.
    quiet
        Show no progress and print nothing but errors.
    """
    from flatlens.reproduction import experiments
    from flatlens.reproduction import reproduce as module
    from flatlens.reproduction.listing import listing

    if compare:
        from flatlens.reproduction.compare import comparison_text

        print(comparison_text(compare))
        return 0
    if show:
        print_table(listing(scale or "desk", workers))
        return 0
    if not names and source is None:
        raise FlatlensError("Name what to reproduce, such as fig1 or all; see --list.")
    if known is not None and source is not None:
        raise FlatlensError("Give either --from, to train nothing, or --with, to train the rest.")
    check_output_folder(out)
    result = experiments.reproduce(
        names, out=out, scale=scale, train=train, source=source, known=known, workers=workers,
        engine=engine, address=address, progress=show_progress(quiet),
    )  # fmt: skip
    if not quiet:
        if len(result.claims):
            table = module.overview(result.claims).drop(columns="says")
            print_table([[*table], *table.to_numpy().tolist()])
            print()
        print("\n".join(map(str, result.files)))
    return refuse("; ".join(result.problems), FAILED) if result.problems else 0
