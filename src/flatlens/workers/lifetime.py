"""Workers end when their driver ends, for whatever reason.

A driver that gets SIGTERM or SIGHUP first stops its workers and then dies of the signal. A driver
that is killed with SIGKILL cannot do that, so every worker watches its parent process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

WATCH = 0.5  # seconds between two checks of the parent process
ENDING = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class TerminatedError(BaseException):
    """Raised if a signal asks this process to end. Not an Exception, so that no task catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that workers are stopped; then die of them.

    A handler that the program installed itself stays, and so does ``nohup``, which ignores SIGHUP.
    Only the main thread can handle signals; in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]

    def stop(number: int, _: Any) -> None:
        for each in numbers:  # a second signal must not interrupt the cleanup
            signal.signal(each, signal.SIG_IGN)
        raise TerminatedError(number)

    for number in numbers:
        signal.signal(number, stop)
    received = None
    try:
        yield
    except TerminatedError as error:
        received = error.number
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
    if received is not None:
        signal.raise_signal(received)


@contextlib.contextmanager
def deferring_signals() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait until the block has ended.

    Processes that start in the block, or in threads that it starts, ignore Ctrl-C from their first
    moment on. Only the main thread can handle signals; in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, *(getattr(signal, name) for name in ENDING if hasattr(signal, name))]
    handlers = {number: signal.getsignal(number) for number in numbers}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    waiting: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: waiting.append(number))
    masked = hasattr(signal, "pthread_sigmask")  # Windows has none
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if masked else set()
    try:
        yield
    finally:
        if masked:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])


def start_tracker(ensure_running: Callable[[], object]) -> None:
    """Start the process that removes shared memory, so that it ignores SIGHUP.

    It ends by itself after the last process that uses it. If SIGHUP ended it earlier, those
    processes would start a new one, which prints a traceback for every semaphore that it does not
    know.

    Args:
        ensure_running: starts the process unless it is running.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or not hasattr(signal, "SIGHUP"):
        ensure_running()
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a new process inherits this
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGHUP, before or signal.SIG_DFL)


def prepare_worker(driver: int) -> None:
    """Set up a worker process: ignore Ctrl-C and end when the driver is gone.

    Ctrl-C reaches every process of a terminal, but the driver decides when its workers stop.

    Args:
        driver: process id of the driver, which is the parent of this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(driver,), daemon=True, name="watch-driver").start()


def _watch(driver: int) -> None:
    """End this process once its parent has changed. Runs may be killed at any moment."""
    while os.getppid() == driver:
        time.sleep(WATCH)
    os._exit(1)
