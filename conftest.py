"""What holds for every test run: optional libraries may be absent, Ctrl-C is heard."""

import importlib.util
import signal

# A run in the background is started deaf to Ctrl-C, and its children with it; tests of it need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same holds for the end of a terminal, to which nohup is deaf.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# doctests are collected by importing every module; these two need an extra
NEEDS = {"lightning": ("lightning", "pytorch_lightning"), "transformers": ("transformers",)}
collect_ignore = ["src/flatlens/experiments/data.py"]  # it warns when it is imported
collect_ignore += [
    f"src/flatlens/track/{name}.py"
    for name, libraries in NEEDS.items()
    if not any(importlib.util.find_spec(library) for library in libraries)
]
