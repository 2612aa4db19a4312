"""Where records go beside the run folder: thin doors to what people already use.

A sink has ``write(record)`` and ``close()``; anything with these two methods is one. All here open
their file or connection at the first record, inside the tracker's guard, because some of them draw
random names. The run folder stays the truth: it alone is cut back when a training is resumed.
"""

from __future__ import annotations

import csv
import importlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError


class CSV:
    """A CSV file with one line a record; numbers read back bit for bit.

    The header grows when a record brings a new name. In a file that is there already, lines from
    the first new step on are replaced.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.columns: list[str] | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self.columns is None or not record.keys() <= set(self.columns):
            self._begin(record)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns or []).writerow(record)

    def _begin(self, record: Mapping[str, Any]) -> None:
        """Write the lines before ``record`` under a header that has all its names."""
        rows: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                whole = [line for line in file if line.endswith("\n")]  # else torn
            reader = csv.DictReader(whole)
            self.columns = list(reader.fieldnames or [])
            rows = [row for row in reader if float(row["step"]) < record["step"]]
        self.columns = list(dict.fromkeys([*(self.columns or []), *record]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.new")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self.path)

    def close(self) -> None:
        """Every line is in the file already."""


class TensorBoard:
    """Scalars in a TensorBoard log (which keeps them in single precision)."""

    def __init__(self, log_dir: str | Path) -> None:
        _need("tensorboard", "tensorboard")
        self.log_dir = Path(log_dir)
        self.writer: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.log_dir)
        for name, value in _values(record):
            self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class MLflow:
    """Metrics of an MLflow run: the one of id ``run``, or a new one in ``experiment``.

    By default in a SQLite file ``mlflow.db`` here; ``uri`` is any tracking address. (A SQL store
    clips infinities to the largest float.)
    """

    def __init__(
        self, uri: str | None = None, experiment: str = "flatlens", run: str | None = None
    ) -> None:
        self._mlflow = _need("mlflow", "mlflow")
        self.uri, self.experiment, self.run = uri or "sqlite:///mlflow.db", experiment, run
        self.client: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self.client is None:
            self.client = self._mlflow.MlflowClient(self.uri)
            self.run = self.run or self._new_run()
        now = int(1000 * time.time())
        entity = self._mlflow.entities.Metric
        metrics = [entity(name, value, now, record["step"]) for name, value in _values(record)]
        self.client.log_batch(self.run, metrics=metrics)

    def _new_run(self) -> str:
        found = self.client.get_experiment_by_name(self.experiment)
        number = found.experiment_id if found else self.client.create_experiment(self.experiment)
        return str(self.client.create_run(number).info.run_id)

    def close(self) -> None:
        if self.client is not None:
            self.client.set_terminated(self.run)


class WandB:
    """A Weights & Biases run; the arguments are those of ``wandb.init``.

    ``WandB(project="flatness", mode="offline")`` needs no account.
    """

    def __init__(self, **init: Any) -> None:
        self._wandb = _need("wandb", "wandb")
        self.init = init
        self.run: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self.run is None:
            self.run = self._wandb.init(**self.init)
        self.run.log(dict(_values(record)), step=record["step"])

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in record.items() if name != "step")


def _need(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FlatlensError(
            f"{module} is not installed; it comes with pip install 'flatlens[{extra}]'"
        ) from error
