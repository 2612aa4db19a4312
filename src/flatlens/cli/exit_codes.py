"""The exit codes of every command."""

FAILED = 1  # some of the work failed, or an error of flatlens itself
BAD_INPUT = 2  # bad input, before or during the work; the message is one sentence
BUSY = 3  # runs are left to another process that is writing them
INTERRUPTED = 130  # Ctrl-C, as shells count it
