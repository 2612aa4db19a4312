"""The preload module that a Dask worker of a local cluster runs when it starts."""

from __future__ import annotations

import signal
import threading


def dask_setup(worker: object) -> None:
    """Ignore Ctrl-C: it reaches every process of a terminal, but the driver stops its workers.

    A worker that dies of Ctrl-C prints the traceback of its event loop. Before this function runs,
    Ctrl-C is masked (``lifetime.deferring_signals``), except on Windows, which has no signal masks.
    Dask calls this function in the main thread of the worker's process.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
