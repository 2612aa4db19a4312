"""Records as metrics of an MLflow run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError
from flatlens.track.sinks.base import PREFIX, Selection, need

EXPERIMENT = "flatlens"  # of a run that this sink starts, unless MLflow is told another one


class MLflow:
    """Log metrics to the active MLflow run, or to a new run if none is active.

    The tracking store is MLflow's own choice: ``mlflow.set_tracking_uri``, else the environment
    variable ``MLFLOW_TRACKING_URI``, else MLflow's default. A SQL store clips infinities to the
    largest float.

    Args:
        uri: another tracking store. The active run is used only if it lives there.
        experiment: experiment of a new run. None takes ``MLFLOW_EXPERIMENT_NAME`` or "flatlens".
        run: id of a run to log to, instead of the active run.
        names: which values of a record, see ``Selection``.
        prefix: put in front of every name.

    Raises:
        FlatlensError: if MLflow is not installed, or an argument has the wrong type.

    Example:
        >>> with mlflow.start_run():  # doctest: +SKIP
        ...     tracker = fl.Tracker(net, x, sinks=[MLflow()])
    """

    @no_type_check
    def __init__(
        self,
        uri: str | None = None,
        experiment: str | None = None,
        run: str | None = None,
        *,
        names: str | Sequence[str] = "headline",
        prefix: str = PREFIX,
    ) -> None:
        self._mlflow = need("mlflow", "mlflow")
        for name, value in (("uri", uri), ("experiment", experiment), ("run", run)):
            if value is not None and not isinstance(value, str):
                raise FlatlensError(f"{name}={value!r} is not a string; give one or leave it out")
        self.uri, self.experiment, self.run = uri, experiment, run
        self.select = Selection(names, prefix)
        self.client: Any = None
        self.started_run = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Log every selected value at the record's step, in one request."""
        if self.client is None:
            self._connect()
        now = int(1000 * time.time())
        entity = self._mlflow.entities.Metric
        values = self.select(record)
        metrics = [entity(name, value, now, record["step"]) for name, value in values.items()]
        self.client.log_batch(self.run, metrics=metrics)

    def _connect(self) -> None:
        """Choose the store and the run at the first record: the user may start a run until then."""
        store = self._mlflow.get_tracking_uri()
        active = self._mlflow.active_run()
        self.client = self._mlflow.MlflowClient(self.uri or store)
        if self.run is None and active is not None and self.uri in (None, store):
            self.run = active.info.run_id
        if self.run is None:
            self.run = str(self.client.create_run(self._experiment_id()).info.run_id)
            self.started_run = True

    def _experiment_id(self) -> str:
        """Find the experiment of a new run, or create it."""
        chosen_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if self.experiment is None and chosen_id:
            return chosen_id
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self.client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self.client.create_experiment(name))

    def close(self) -> None:
        """End the run if this sink started it; a run of the user's stays open."""
        if self.started_run:
            self.client.set_terminated(self.run)
