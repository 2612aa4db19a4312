"""The engine "dask": a running scheduler, or a cluster of local processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from flatlens.errors import FlatlensError, first_line
from flatlens.workers.engine import Engine
from flatlens.workers.lifetime import deferring_signals, start_tracker, stopping_on_signals

CONNECT = 10.0  # seconds in which a Dask scheduler must answer
SCHEMES = ("tcp", "tls", "ucx", "ws", "wss")
PLAIN_SCHEMES = ("tcp", "tls")  # protocols whose port can be tried with a plain socket


class SchedulerGoneError(FlatlensError):
    """The Dask scheduler stopped while tasks were running."""


@contextlib.contextmanager
def dask_engine(
    workers: int, address: str | None, resources: Mapping[str, int | float] | None
) -> Iterator[Engine]:
    """Connect to the scheduler at ``address``, or start a cluster of local processes."""
    try:
        import distributed
    except ImportError as error:
        raise FlatlensError(
            "The engine dask needs the package distributed: pip install 'flatlens[dask]'."
        ) from error
    if address is None and getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # a worker that runs the user's script again; the driver explains
    if address is not None:
        _check_address(address)
    needs = dict(resources or {})
    with stopping_on_signals(), contextlib.ExitStack() as stack:
        cluster = None if address else stack.enter_context(_local_cluster(workers, needs))
        client = stack.enter_context(_client(address, cluster))

        def submit(*task: Any) -> Any:
            return client.submit(*task, pure=False, resources=needs or None)

        def wait(futures: list[Any]) -> list[Any]:
            try:
                with client.as_current():
                    return list(distributed.wait(futures, return_when="FIRST_COMPLETED").done)
            except distributed.CancelledError as error:  # raised once the connection is given up
                raise SchedulerGoneError(
                    "The Dask scheduler went away; start the same sweep again to go on."
                ) from error

        yield Engine(submit, wait, None, 0)  # Dask restarts the tasks of lost workers by itself


def _check_address(address: str) -> None:
    """Raise if no scheduler answers at an address, before Dask starts to retry and to log."""
    address_parts = urlsplit(address if "://" in address else f"tcp://{address}")
    try:
        host, port = address_parts.hostname, address_parts.port
    except ValueError:  # the port is not a number
        host, port = None, None
    if address_parts.scheme not in SCHEMES or not host or not port:
        raise FlatlensError(
            f"{address!r} is not the address of a scheduler; write it as tcp://HOST:PORT."
        )
    try:
        if address_parts.scheme in PLAIN_SCHEMES:
            socket.create_connection((host, port), CONNECT).close()
        # in its own thread, because a notebook has an event loop in this one
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, _greet(address)).result()
    except (OSError, ValueError, TypeError, ImportError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise FlatlensError(
            f"No Dask scheduler answers at {address}: {reason.rstrip('.')}."
        ) from error


async def _greet(address: str) -> None:
    """Connect as a Dask client does, with its TLS settings, and hang up."""
    from distributed.comm.core import connect
    from distributed.security import Security

    settings = Security().get_connection_args("client")
    comm = await connect(address, timeout=CONNECT, **settings)
    comm.abort()


@contextlib.contextmanager
def _client(address: str | None, cluster: Any) -> Iterator[Any]:
    """Connect to the scheduler; close the connection at the end."""
    import distributed

    with _quiet():
        try:
            client = distributed.Client(address or cluster, timeout=CONNECT, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            reason = first_line(error).rstrip(".")
            raise FlatlensError(f"No Dask scheduler answers at {address}: {reason}.") from error
        with client:
            yield client


@contextlib.contextmanager
def _local_cluster(workers: int, resources: dict[str, int | float]) -> Iterator[Any]:
    """Start a scheduler and worker processes on this machine."""
    from multiprocessing.resource_tracker import ensure_running

    import distributed

    start_tracker(ensure_running)
    with contextlib.ExitStack() as stack:
        # A signal during the start would leave workers that nobody stops.
        with keeping_memory(), _started(), deferring_signals():
            cluster = distributed.LocalCluster(
                n_workers=workers,
                processes=True,
                threads_per_worker=1,
                dashboard_address="127.0.0.1:0",  # any free port
                silence_logs=logging.CRITICAL,  # a worker reports that its driver has left
                resources=resources,
                preload=["flatlens.workers.dask_worker"],
            )
            stack.enter_context(cluster)
        yield cluster


@contextlib.contextmanager
def _started() -> Iterator[None]:
    """Explain in one sentence why workers do not start."""
    try:
        yield
    except RuntimeError as error:
        raise FlatlensError(
            f"Dask's workers do not start ({first_line(error).rstrip('.')}); each of them imports "
            'the script that is run, so the sweep has to stand below if __name__ == "__main__".'
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Dask's own messages; important errors are raised as one sentence."""
    loggers = [logging.getLogger(name) for name in ("distributed", "tornado", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def keeping_memory() -> contextlib.AbstractContextManager[Any]:
    """Start Dask workers with the normal memory allocator.

    Dask starts its workers with an allocator that returns freed memory at once. That doubles the
    CPU time of a training, because every step has to map its pages again.
    """
    import dask

    key = "distributed.nanny.pre-spawn-environ"
    environment = {k: v for k, v in dask.config.get(key).items() if k != "MALLOC_TRIM_THRESHOLD_"}
    return dask.config.set({key: environment})
