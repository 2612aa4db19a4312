"""Run code inside a training without a trace in its random numbers or grad mode."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Turn gradients on and inference mode off; set all random numbers back at the end.

    ``measure`` guards its own pass. This guard also covers sinks, which may draw random names.

    >>> before = torch.get_rng_state()
    >>> with undisturbed():
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
