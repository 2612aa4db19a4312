"""Tiny networks, each named after the trap it holds, one file for each family of traps.

`ZOO[name]()` builds a fresh Case: float64, a seed of its own, three samples or so. A network is a
`Net`: parts by keyword and a forward written as a plain function, so that one reads the trap.
A new family is a new file and one line in `FAMILIES`, whose order is the order of `ZOO`.
"""

from importlib import import_module

from traps.cases import (
    UNEVEN,
    ZOO,
    Case,
    Net,
    Once,
    case,
    enter,
    frozen,
    made,
    parameter,
    shaken,
    uneven,
)

__all__ = [
    "UNEVEN",
    "ZOO",
    "Case",
    "Net",
    "Once",
    "case",
    "enter",
    "frozen",
    "made",
    "parameter",
    "shaken",
    "uneven",
]

FAMILIES = (
    "inplace",
    "skips",
    "reuse",
    "frozen_unused",
    "bare_parameters",
    "convolutions",
    "norm_layers",
    "embeddings",
    "attention",
    "token_layouts",
    "routing",
    "recurrent",
    "parametrised",
    "sizes",
    "inputs_outputs",
    "wrappers",
    "whole_networks",
    "narrow_heads",
    "turned_weights",
    "lookups",
    "sample_ownership",
    "bias_and_padding",
    "products",
    "nested",
    "branches",
    "no_layers",
)

for family in FAMILIES:
    import_module(f"traps.{family}")
