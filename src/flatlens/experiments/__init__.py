"""Experiments that stand on the core: data, networks, checkpoints, the demo.

Nothing in the core imports from here (imports go one way: core <- experiments <- command line).
"""
