"""The command line: ``flatlens demo`` and the other commands, each with its own ``--help``.

Each command has a file. torch, pandas and matplotlib take seconds to import, so a command imports
what it needs when it runs, and ``flatlens --help`` answers at once. This file imports almost
nothing, so that Ctrl-C is handled from the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatlens.cli.exit_codes import BAD_INPUT, BUSY, FAILED, INTERRUPTED

__all__ = ["BAD_INPUT", "BUSY", "FAILED", "INTERRUPTED", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: the words after ``flatlens``. By default those of the process.

    Returns:
        0; 1 if some work failed; 2 for bad input; 3 if runs were left to another process; 130
        after Ctrl-C. Errors are one sentence on standard error.
    """
    from flatlens.cli.guard import guarded

    return guarded(_run, argv)


def _run(argv: Sequence[str] | None) -> object:
    from flatlens.cli.app import app

    return app(argv, exit_on_error=False, print_error=False)
