"""``flatlens demo``."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from flatlens.cli.options import Json, Natural, Positive, Quiet
from flatlens.cli.outputs import check_output_folder

EXAMPLES = """Example:
  flatlens demo --out figures --seed 1"""


def demo(
    *,
    out: Path = Path("flatlens-demo"),
    steps: Positive = 10_000,
    seed: Natural = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a small network on digits with two learning rates and follow flatness and compression.

    The demo takes less than a minute. It prints a table and saves a figure (PNG and PDF).

    Parameters
    ----------
    out
        The folder for the figure, which is created if it does not exist.
    steps
        The number of SGD steps of each run.
    seed
        The seed of the initial weights and of the order of the batches.
    as_json
        Print one JSON object with every record instead of tables.
    quiet
        Print nothing but errors.
    """
    from flatlens.reproduction.demo import main

    check_output_folder(out, ("demo.png", "demo.pdf"))
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
        main(out, steps, seed, as_json)
