"""Read many run folders into one table."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatlens.arguments import no_type_check, typed_arguments
from flatlens.errors import FlatlensError
from flatlens.files.reading import LARGEST_LINES, read_bytes
from flatlens.runs import done_file, record_file
from flatlens.runs.layout import CHECKPOINT, CONFIG, DONE, RECORDS
from flatlens.runs.run_config import flattened, read_config

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class StoredRun:
    """A run that was read from its folder.

    Args:
        name: path of the folder below the folder that was searched.
        records: the records, in order.
        config: the config with dotted names for nested options.
    """

    name: str
    records: list[record_file.Record]
    config: dict[str, Any]


@no_type_check
@typed_arguments
def read_runs(folder: str | Path, *, damaged: list[str] | None = None) -> pd.DataFrame:
    """Read every record of every run below a folder into one table: run x step x quantity.

    Columns are ``run`` (the path below ``folder``), ``step``, the quantities, and the config of
    each run. A config key with the name of another column becomes ``config.KEY``, and an option
    inside an option becomes ``outer.inner``. A run that is being written is read as far as it is.
    Symbolic links are not followed.

    Args:
        folder: the folder to search.
        damaged: a list that takes a sentence for each run that cannot be read. Without it a
            warning is given for each of them.

    Returns:
        The table. ``attrs["unreadable"]`` maps the name of each run that was left out to the
        reason.

    Raises:
        FlatlensError: if there is no run, or (without ``damaged``) if none of them can be read.

    Example:
        >>> import tempfile
        >>> from flatlens.runs import Run
        >>> folder = tempfile.mkdtemp()
        >>> with Run.open(folder + "/a", {"lr": 0.1}) as run:
        ...     run.append({"step": 0, "sharpness": 2.5})
        >>> read_runs(folder).to_dict("records")
        [{'run': 'a', 'step': 0, 'sharpness': 2.5, 'lr': 0.1}]
    """
    folder = Path(folder)
    runs: list[StoredRun] = []
    unreadable: dict[str, str] = {}
    for place in run_folders(folder, unreadable):
        name = place.relative_to(folder).as_posix()
        try:
            runs.append(read_run(place, name))
        except FlatlensError as error:
            unreadable[name] = str(error)
    if not runs and not unreadable:
        raise FlatlensError(f"There is no run below {folder} (no {RECORDS}).")
    if damaged is not None:
        damaged += unreadable.values()
    elif not runs:
        more = f" ({len(unreadable) - 1} other runs cannot be read)" if len(unreadable) > 1 else ""
        raise FlatlensError(next(iter(unreadable.values())).rstrip(".") + more + ".")
    else:
        for name, reason in unreadable.items():
            warnings.warn(f"The run {name} is left out. {reason}", stacklevel=2)
    table = _table(runs)
    table.attrs["unreadable"] = unreadable
    return table


def run_folders(folder: Path, unreadable: dict[str, str] | None = None) -> Iterator[Path]:
    """Yield every folder of a run at or below a folder, in the order of their names.

    A folder is a run if it has `records.jsonl`. It is also a run if it has a config and a
    checkpoint or `done`; its records are then lost, which the reader of the folder reports.

    Args:
        folder: the folder to search. Symbolic links to folders are not followed.
        unreadable: takes the folders that may not be listed, with the reason.
    """

    def note(error: OSError) -> None:
        if unreadable is not None and error.filename != str(folder):
            unreadable[str(error.filename)] = f"Cannot read {error.filename}: {error.strerror}."

    places = []
    for place, folders, files in os.walk(folder, onerror=note):
        names = {*files, *folders}
        if RECORDS in names or (CONFIG in names and names & {DONE, CHECKPOINT}):
            places.append(Path(place))
    yield from sorted(places, key=lambda place: place / RECORDS)


def read_run(folder: Path, name: str) -> StoredRun:
    """Read one run folder.

    Raises:
        FlatlensError: if a file is missing, damaged or no regular file, or if a finished run has
            lost records.
    """
    path = folder / RECORDS
    promise = done_file.read(folder)
    content = read_bytes(path, LARGEST_LINES)
    lines = record_file.parse(path, content)
    if lines.damage is not None:
        raise lines.damage
    config = flattened(read_config(folder / CONFIG))
    done_file.check(path, promise, content)
    return StoredRun(name, lines.records, config)


def _table(runs: list[StoredRun]) -> pd.DataFrame:
    import pandas as pd

    frames = [pd.DataFrame(run.records) for run in runs]
    quantities = dict.fromkeys(name for frame in frames for name in frame if name != "step")
    taken = {"run", "step", *quantities}
    tables = []
    for run, frame in zip(runs, frames, strict=True):
        config = {f"config.{k}" if k in taken else k: value for k, value in run.config.items()}
        # one list per row, because pandas would spread a bare tuple over the rows
        cells = {key: [v] * len(frame) for key, v in ({"run": run.name} | config).items()}
        tables.append(pd.concat([frame, pd.DataFrame(cells, index=frame.index)], axis=1))
    filled = [table for table in tables if len(table)] or tables or [pd.DataFrame()]
    table = pd.concat(filled, ignore_index=True)
    return table.reindex(columns=list(dict.fromkeys(["run", "step", *quantities, *table])))
