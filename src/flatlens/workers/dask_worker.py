"""What a Dask worker of our own cluster runs when it starts (a preload module of Dask)."""

from __future__ import annotations

import signal
import threading


def dask_setup(worker: object) -> None:
    """Ignore Ctrl-C: it reaches every process of a terminal, but the driver stops its workers.

    A worker that dies of it prints the traceback of its event loop. Where signals can be masked the
    process is deaf to Ctrl-C before this, see ``lifetime.deferring_signals``; Windows has no masks.
    Dask calls this function in the main thread of the worker's process.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
