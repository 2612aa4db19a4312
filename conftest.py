"""What holds for every test run: optional libraries may be absent, Ctrl-C is heard.

Of a test with many cases only a few count as fast.
"""

import importlib.util
import signal
from collections import defaultdict

import pytest

FAST_CASES = 2  # of one test, spread over all of its cases

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


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark all but a few cases of a test as slow, so that `make test-fast` runs every test."""
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for same_test in cases.values():
        step = -(-len(same_test) // FAST_CASES)
        for place, item in enumerate(same_test):
            if place % step:
                item.add_marker(pytest.mark.slow)
