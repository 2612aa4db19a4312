"""What holds for every test run: optional libraries may be absent."""

import importlib.util

# doctests are collected by importing every module; these two need an extra
NEEDS = {"lightning": ("lightning", "pytorch_lightning"), "transformers": ("transformers",)}
collect_ignore = [
    f"src/flatlens/track/{name}.py"
    for name, libraries in NEEDS.items()
    if not any(importlib.util.find_spec(library) for library in libraries)
]
