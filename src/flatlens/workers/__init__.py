"""Run many tasks in worker processes: on this machine (loky) or on a Dask cluster.

A sweep or a zoo describes its tasks. This folder submits them, retries them and records which
workers died.

| file          | what                                                              |
|---------------|-------------------------------------------------------------------|
| `outcome.py`  | the result of a task, and how its files reach the driver          |
| `loop.py`     | submit, wait, retry, and single out the task that kills workers   |
| `engine.py`   | how the loop starts tasks and waits for them                      |
| `engines.py`  | choose an engine and the number of workers                        |
| `local.py`    | the engine "local": long-lived processes of this machine          |
| `dask.py`     | the engine "dask": a scheduler at an address, or a local cluster  |
| `lifetime.py` | workers end when their driver ends                                |
"""

from flatlens.workers.engine import Engine
from flatlens.workers.engines import open_engine
from flatlens.workers.loop import run_tasks
from flatlens.workers.outcome import Outcome

__all__ = ["Engine", "Outcome", "open_engine", "run_tasks"]
