"""``flatlens sweep``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.exit_codes import BUSY, FAILED
from flatlens.cli.guard import refuse
from flatlens.cli.options import (
    NO_OPTIONS,
    EngineName,
    Json,
    Natural,
    Positive,
    Quiet,
    SweepOptions,
    Trust,
    show_progress,
)
from flatlens.cli.outputs import check_output_folder
from flatlens.cli.printing import as_json_text, cell, print_table
from flatlens.errors import FlatlensError
from flatlens.training.options import LISTS, chosen

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("train_loss", "sharpness", "nmls", "mls", "log_volume")
EXAMPLES = """Examples:
  flatlens sweep --model mlp --data fashion-mnist --lr 0.05 0.1 0.2 --seeds 5 --out runs/mlp
  flatlens sweep sweep.toml --out runs/vgg
  flatlens sweep sweep.toml --out runs/vgg --engine dask --address tcp://10.0.0.1:8786

sweep.toml holds a table [base] of settings and a table [grid] of lists (or several [[grid]]):
  [base]
  model = "vgg"
  data = "cifar10"
  classes = [0, 1]
  [grid]
  lr = [0.05, 0.1, 0.2]
  seed = [0, 1, 2]

Exit code 3 means that another process is still writing some of the runs."""


def sweep(
    file: Path | None = None,
    /,
    *,
    out: Path = Path("runs"),
    seeds: Positive | None = None,
    engine: EngineName = "local",
    workers: Positive | None = None,
    address: str | None = None,
    retries: Natural = 1,
    gpus: Positive | None = None,
    trust: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
    given: Annotated[SweepOptions, Parameter(name="*")] = NO_OPTIONS[1],
) -> int:
    """Train every combination of settings; finished runs are skipped and stopped ones continue.

    An option with several values is an axis of the grid. A single value holds for all runs.

    Parameters
    ----------
    file
        A TOML file with the tables [base] and [grid]; options on the command line override it.
    out
        The folder for the runs, one folder each.
    seeds
        The number of seeds: 0, 1, 2 and so on.
    engine
        Where to train: local starts processes on this machine, dask uses a Dask scheduler.
    workers
        The number of worker processes; by default as many as the machine has cores.
    address
        The address of a running Dask scheduler; by default one is started for the sweep.
    retries
        How often a run that failed is tried again.
    gpus
        The number of GPUs that each run takes of a Dask worker that declares the resource GPU.
    trust
        Run the code of model factories and own quantities that the TOML file names.
    as_json
        Print one JSON object with the last record of every finished run instead of a table.
    quiet
        Show no progress and print nothing but errors.
    """
    from flatlens.training.sweep import SweepError, sweep

    check_output_folder(out)
    base, grids = _settings(file, chosen(given), seeds, trust)
    try:
        frame = sweep(
            base,
            grids,
            out=out,
            engine=engine,
            workers=workers,
            address=address,
            retries=retries,
            resources=None if gpus is None else {"GPU": gpus},
            progress=show_progress(quiet),
            code=Path.cwd(),
        )
    except SweepError as error:
        return refuse(str(error), FAILED)
    if not quiet:
        _print(frame, out, as_json)
    return _left(frame.attrs["busy"])


def _settings(
    file: Path | None, options: dict[str, Any], seeds: int | None, trust: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Lay the options over the file: several values are an axis of the grid, one is for all."""
    from flatlens.training.grid import read_sweep

    base, grids = ({}, [{}]) if file is None else read_sweep(file)
    for name, value in options.items():
        axis = isinstance(value, list) and name not in LISTS
        if axis and not value:
            raise FlatlensError(f"Give a value after --{name.replace('_', '-')}.")
        if axis and len(value) > 1:
            grids = [{**grid, name: value} for grid in grids]
        else:
            base[name] = value[0] if axis else value
            grids = [{k: v for k, v in grid.items() if k != name} for grid in grids]
    if seeds is not None:
        if "seed" in options:
            raise FlatlensError("Give either --seeds or --seed, not both.")
        grids = [{**grid, "seed": range(seeds)} for grid in grids]
    _check_code(file, [base, *grids], options, trust)
    return base, grids


def _check_code(
    file: Path | None, tables: list[dict[str, Any]], options: dict[str, Any], trust: bool
) -> None:
    """Refuse factories and functions that only the file names, unless the user trusts the file."""
    from flatlens.training.trust import check_trusted

    fields: tuple[Literal["model", "quantities"], ...] = ("model", "quantities")
    for field in fields:
        names = [name for table in tables for name in _texts(table.get(field))]
        named = list(_texts(options.get(field)))
        check_trusted(names, str(file), trust=trust, named=named, option=field)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value: a list may hold lists of names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


def _print(frame: pd.DataFrame, out: Path, as_json: bool) -> None:
    """Print the last record of every finished run; half-trained numbers are not shown."""
    from flatlens.runs import is_finished

    last = frame.groupby("run").tail(1).to_dict("records")
    last = [record for record in last if is_finished(out / record["run"])]
    if as_json:
        print(as_json_text({record["run"]: record for record in last}))
        return
    shown = [k for k in COLUMNS if k in frame]
    lines = [[record["run"], *(cell(k, record[k]) for k in shown)] for record in last]
    print_table([["run", *shown], *lines])


def _left(busy: list[str]) -> int:
    """Name the runs that another process is writing, and return the exit code."""
    if not busy:
        return 0
    more = f" and {len(busy) - 3:,} more" if len(busy) > 3 else ""
    count = "1 run is" if len(busy) == 1 else f"{len(busy):,} runs are"
    return refuse(
        f"{count} left to another process that is writing them: {', '.join(busy[:3])}{more}; start "
        "the same sweep again when it has ended",
        BUSY,
    )
