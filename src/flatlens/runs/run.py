"""A Run is a folder that survives anything: killed at any moment, it reopens cleanly.

| file                     | what                                                              |
|--------------------------|-------------------------------------------------------------------|
| `config.json`            | `config` (which run it is) and `provenance` (how it was made)     |
| `records.jsonl`          | one measurement a line, appended and written through to the disk  |
| `checkpoint.safetensors` | tensors to go on from, and how many records were there by then    |
| `snapshots/`             | the weights of every record, where the config asks for them       |
| `done`                   | there when the run is finished                                    |
| `lock`                   | held by the writing process; the system frees it when that ends   |

All of it opens in pandas, DuckDB or a text editor. Numbers are written so that they read back bit
for bit; JSON has no infinities, so these are the strings "inf", "-inf" and "nan". Every quantity
of all runs below a folder, in DuckDB:

    SELECT * FROM read_json_auto('runs/**/records.jsonl', filename=true, union_by_name=true)

(a column with an infinity in it is no number there: `CAST(log_volume AS DOUBLE)` makes it one).
Records hold no times, so that two runs compare byte for byte; times go to `timing.jsonl`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

import flatlens
from flatlens.errors import FlatlensError

if TYPE_CHECKING:
    import pandas as pd

CONFIG, RECORDS, CHECKPOINT = "config.json", "records.jsonl", "checkpoint.safetensors"
SNAPSHOTS = "snapshots"
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

Record = dict[str, Any]


class RunBusyError(FlatlensError):
    """Another process (or another Run in this one) is writing to the folder."""


class Run:
    """One folder of one training, open for writing; ``with Run.open(...) as run`` closes it."""

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._defaults = dict(defaults or {})
        self.config: dict[str, Any] = {}
        self.records: list[Record] = []
        self._files: list[int] = []  # lock and records, as the system numbers them
        self._ends: list[int] = []  # where each line of records.jsonl ends
        try:
            with _told("open the run", self.folder):
                self._open(None if config is None else dict(config))
        except BaseException:
            self.close()
            raise
        _OPEN.add(self)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
    ) -> Run:
        """Create the folder, or reopen it; what is there must have the same ``config``.

        Without ``config`` any folder of a run is taken as it is. Keys that it lacks have the value
        of ``defaults``. A folder with neither records nor a checkpoint is as good as new: it takes
        any config. A last line that was cut short when the writer died is dropped.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp() + "/runs/a"
            >>> with Run.open(folder, {"lr": 0.1}) as run:
            ...     run.append({"step": 0, "sharpness": 2.5, "log_volume": float("-inf")})
            >>> with Run.open(folder) as run:
            ...     run.config, run.records
            ({'lr': 0.1}, [{'step': 0, 'sharpness': 2.5, 'log_volume': -inf}])
        """
        return cls(folder, config, defaults=defaults)

    def _open(self, config: dict[str, Any] | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self._file("lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError(
                f"The run {self.folder} is open elsewhere, in this process or another; wait for "
                "it, close it, or choose another folder."
            ) from None
        self._configure(config)
        for rest in self.folder.glob(".*.new"):  # of a writer that was killed
            rest.unlink()
        self._records = self._file(RECORDS)
        path = self.folder / RECORDS
        self.records, self._ends = _parse(path, path.read_bytes())
        self._truncate()

    def _configure(self, config: dict[str, Any] | None) -> None:
        path = self.folder / CONFIG
        wanted = None if config is None else _as_json(config, f"The config of {self.folder}")
        if path.exists():
            self.config = self._defaults | _read_config(path)
            differs = None if wanted is None else _difference(self.config, wanted)
            if differs is None:
                return
            if not self._is_empty():
                key, old, new = differs
                raise FlatlensError(
                    f"The run {self.folder} was made with {key}={old}, not {new}; choose another "
                    "folder, or the config it has."
                )
        elif (self.folder / RECORDS).exists():
            raise FlatlensError(
                f"{self.folder} has records but no {CONFIG}; restore it, or choose another folder."
            )
        self.config = wanted or {}
        content = {"config": self.config, "provenance": provenance()}
        _write_whole(path, (json.dumps(content, indent=2) + "\n").encode())

    def _is_empty(self) -> bool:
        records = self.folder / RECORDS
        begun = (self.folder / CHECKPOINT).exists() or self.done
        return not begun and not (records.exists() and records.stat().st_size)

    def _file(self, name: str) -> int:
        number = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o644)
        self._files.append(number)
        return number

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line and wait until the disk has it; it is there whole or not at all."""
        self._check_open()
        if self.done:
            raise FlatlensError(f"The run {self.folder} is finished; it takes no more records.")
        line = _line(record, f"The record of {self.folder}")
        end = self._ends[-1] if self._ends else 0
        path = self.folder / RECORDS
        with _told("write", path):
            try:
                _write_all(self._records, line, end)
                os.fsync(self._records)
            except BaseException:  # a full disk, Ctrl-C: the file is left as it was
                with contextlib.suppress(OSError):
                    os.ftruncate(self._records, end)
                raise
        self.records.append(_from_line(line))
        self._ends.append(end + len(line))

    def cut(self, count: int) -> None:
        """Keep the first ``count`` records; what follows is to be computed again."""
        self._check_open()
        del self.records[count:], self._ends[count:]
        with _told("write", self.folder / RECORDS):
            self._truncate()

    def _truncate(self) -> None:
        end = self._ends[-1] if self._ends else 0
        if os.fstat(self._records).st_size != end:
            os.ftruncate(self._records, end)
            os.fsync(self._records)

    def log(self, name: str, entry: Mapping[str, Any]) -> None:
        """Add a line to a file of its own beside the records, ``timing.jsonl`` for "timing".

        For what differs from one execution to the next; not written through to the disk.
        """
        self._check_open()
        path = self.folder / f"{name}.jsonl"
        with _told("write", path), path.open("ab") as file:
            file.write(_line(entry, f"The entry of {path}"))

    def checkpoint(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Replace the checkpoint, at one instant; ``meta`` is anything that JSON can hold."""
        self._check_open()
        path = self.folder / CHECKPOINT
        try:
            told = json.dumps({"records": len(self.records), "meta": dict(meta)})
        except (TypeError, ValueError) as error:
            raise FlatlensError(f"The meta of {path} is not plain JSON: {error}.") from None
        data = save(_unshared(tensors), {"flatlens": told})  # one entry: several vary in order
        with _told("write", path):
            _write_whole(path, data)

    def snapshot(self, step: int, tensors: Mapping[str, Tensor]) -> Path:
        """Write the weights of one step to ``snapshots/STEP.safetensors``, at one instant."""
        self._check_open()
        path = self.folder / SNAPSHOTS / f"{step:08d}.safetensors"
        with _told("write", path):
            path.parent.mkdir(exist_ok=True)
            _write_whole(path, save(_unshared(tensors), {"flatlens": json.dumps({"step": step})}))
        return path

    def restore(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint (tensors on the CPU, meta), or None; later records are cut off.

        A run that goes on from the checkpoint then writes the same records again. Without a
        checkpoint all records go, for the run starts again; a finished run keeps them all.
        """
        self._check_open()
        path = self.folder / CHECKPOINT
        if not path.exists():
            if not self.done:
                self.cut(0)
            return None
        try:
            with safe_open(path, "pt") as file:
                facts = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = json.loads(facts["flatlens"])
            meta, count = told["meta"], told["records"]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise FlatlensError(
                f"{path} is damaged ({error}); delete it to start the run again."
            ) from error
        if count > len(self.records):
            raise FlatlensError(
                f"{path} belongs to {count} records, but {RECORDS} has {len(self.records)}; delete "
                "the checkpoint to start the run again."
            )
        if not self.done:
            self.cut(count)
        return tensors, meta

    def finish(self) -> None:
        """Mark the run as done."""
        self._check_open()
        with _told("write", self.folder / "done"):
            _write_whole(self.folder / "done", b"")

    @property
    def done(self) -> bool:
        return (self.folder / "done").exists()

    def close(self) -> None:
        """Free the lock; records and checkpoint are on the disk already."""
        files = getattr(self, "_files", [])  # a refused argument leaves none
        while files:
            os.close(files.pop())

    __del__ = close

    def _check_open(self) -> None:
        if not self._files:
            raise FlatlensError(f"The run {self.folder} is closed; open it again with Run.open.")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {len(self.records)} records)"


# A forked child (a worker that loads data) would hold the lock on after its parent was killed.
_OPEN: weakref.WeakSet[Run] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for run in list(_OPEN):
        run.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def read_runs(folder: str | Path, *, damaged: list[str] | None = None) -> pd.DataFrame:
    """Every record of every run below ``folder``, one tidy table: run x step x quantity.

    Columns are ``run`` (the path below ``folder``), ``step``, the quantities, and the config of
    each run; a config key with the name of another column becomes ``config.KEY``, an option inside
    an option ``outer.inner``. Runs that are being written are read as far as they are. With a list
    ``damaged``, runs that cannot be read are told there and left out.
    """
    import pandas as pd

    folder = Path(folder)
    found: list[tuple[str, pd.DataFrame, dict[str, Any]]] = []
    for path in sorted(folder.rglob(RECORDS)):
        try:
            with _told("read", path):
                records, _ = _parse(path, path.read_bytes())
            config = _flat(_read_config(path.parent / CONFIG))
        except FlatlensError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
            continue
        found.append((path.parent.relative_to(folder).as_posix(), pd.DataFrame(records), config))
    if not found and not damaged:
        raise FlatlensError(f"There is no run below {folder} (no {RECORDS}).")
    quantities = dict.fromkeys(name for _, frame, _ in found for name in frame if name != "step")
    taken = {"run", "step", *quantities}
    frames = []
    for run, frame, config in found:
        named = {f"config.{key}" if key in taken else key: v for key, v in config.items()}
        # one object a cell: a tuple as it is would be a column
        cells = {key: [v] * len(frame) for key, v in ({"run": run} | named).items()}
        frames.append(pd.concat([frame, pd.DataFrame(cells, index=frame.index)], axis=1))
    table = pd.concat(
        [f for f in frames if len(f)] or frames or [pd.DataFrame()], ignore_index=True
    )
    return table.reindex(columns=list(dict.fromkeys(["run", "step", *quantities, *table])))


def provenance() -> dict[str, Any]:
    """How a run was made: versions, command, machine. It does not decide which run it is."""
    return {
        "flatlens": flatlens.__version__,
        "git": _git_hash(),
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _git_hash() -> str | None:
    """The commit of the folder that the command runs in, if git knows it."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@contextlib.contextmanager
def _told(action: str, path: Path) -> Iterator[None]:
    """A failure of the system in one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise FlatlensError(
            f"Cannot {action} {path}: {reason}; what was written before is kept."
        ) from error


def _write_all(file: int, data: bytes, offset: int) -> None:
    """A full disk shortens a write before it refuses one."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU; safetensors refuses tensors that share memory, as tied ones do."""
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def _write_whole(path: Path, data: bytes) -> None:
    """The old file or the new one, never a part: written beside its place, then renamed."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, must outlive a loss of power
    finally:
        os.close(folder)


def _parse(path: Path, data: bytes) -> tuple[list[Record], list[int]]:
    """Records and where each line ends; a last line without its end is dropped."""
    records, ends, end = [], [], 0
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        end += len(line) + 1
        try:
            record = _from_line(line)
        except (ValueError, AttributeError):
            raise FlatlensError(
                f"Line {number} of {path} is damaged; repair it, or delete it and all that follow."
            ) from None
        records.append(record)
        ends.append(end)
    return records, ends


def _line(record: Mapping[str, Any], what: str) -> bytes:
    return (json.dumps(_as_json(dict(record), what)) + "\n").encode()


def _from_line(line: bytes) -> Record:
    """Strings that stand for infinities and NaN become floats again."""
    found = json.loads(line)
    return {k: NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in found.items()}


def _as_json(value: dict[str, Any], what: str) -> dict[str, Any]:
    """As JSON gives it back: lists for tuples, strings for infinities; or a refusal."""
    try:
        return json.loads(json.dumps(_finite(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise FlatlensError(f"{what} is not plain JSON: {error}.") from None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text())["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlatlensError(f"{path} is missing or damaged ({error}); restore it.") from error


def _difference(
    old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> tuple[str, str, str] | None:
    """The first key that differs, and both values."""
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if a == b and (key in old) == (key in new):
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            return _difference(a, b, f"{prefix}{key}.")
        told = [repr(side[key]) if key in side else "nothing" for side in (old, new)]
        return prefix + key, told[0], told[1]
    return None


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by dotted names; tuples for lists, for a table must be able to group them."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = tuple(value) if isinstance(value, list) else value
    return flat
