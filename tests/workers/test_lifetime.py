"""Signals wait while workers are started."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from flatlens.workers.lifetime import deferring_signals, stopping_on_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupted(reached: list[str], error: type[Exception] | None = None) -> None:
    with deferring_signals():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the end of the block")
        if error is not None:
            raise error


def test_ctrl_c_waits_until_the_block_has_ended():
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(reached)
    assert reached == ["the end of the block"]


def test_ctrl_c_is_raised_after_an_error_too():
    with pytest.raises(KeyboardInterrupt) as raised:
        interrupted([], ValueError)
    assert isinstance(raised.value.__context__, ValueError)


def test_handlers_and_masks_are_restored():
    before = [signal.getsignal(number) for number in NUMBERS]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with stopping_on_signals(), deferring_signals():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert [signal.getsignal(number) for number in NUMBERS] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_a_process_started_in_the_block_is_deaf_to_ctrl_c():
    with deferring_signals():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.send_signal(signal.SIGINT)
    child.communicate(b"\n", timeout=30)
    assert child.returncode == 0


def test_in_another_thread_it_does_nothing():
    failures = []

    def start() -> None:
        try:
            with deferring_signals():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert not failures
