"""Process settings that a training changes and restores: threads, random numbers, Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch

from flatlens.training.config import Config


@contextlib.contextmanager
def torch_settings(config: Config) -> Iterator[None]:
    """Use the threads of a config inside a block; threads and generators are restored."""
    threads = torch.get_num_threads()
    devices = [config.device] if config.device.startswith("cuda") else []
    try:
        torch.set_num_threads(config.threads)
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, so that the step is finished and saved.

    A second Ctrl-C interrupts at once. Only the main thread receives signals.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.getsignal(signal.SIGINT)

    def press(*_: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
