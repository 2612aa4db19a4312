"""Places that records go to beside the run folder: CSV files and experiment loggers.

A sink has ``write(record)`` and ``close()``; any object with these two methods is one. The sinks
here open their file or connection at the first record, inside the tracker's guard, because some
libraries draw random names. The run folder stays the reference: only its records are cut back when
a training is resumed.

Loggers (TensorBoard, MLflow, Weights & Biases) receive the named set ``"headline"`` and the user's
own scalars, under the prefix ``flatlens/``. A CSV file receives the whole record without a prefix.
"""

from flatlens.track.sinks.base import Selection, Sink
from flatlens.track.sinks.csv import CSV
from flatlens.track.sinks.mlflow import MLflow
from flatlens.track.sinks.tensorboard import TensorBoard
from flatlens.track.sinks.wandb import WandB

__all__ = ["CSV", "MLflow", "Selection", "Sink", "TensorBoard", "WandB"]
