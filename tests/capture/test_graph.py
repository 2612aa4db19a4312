"""Which operations leave the entries of a tensor as they are, in their order."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from flatlens.capture.graph import Graph

ALL = {
    "select": lambda x: x[0],
    "loop": lambda x: next(iter(x)),
    "slice": lambda x: x[0:1],
    "split": lambda x: x.split(1)[0],
    "index": lambda x: x[torch.tensor([0])],
    "mask": lambda x: x[torch.tensor([True])],
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "cat": lambda x: torch.cat([x]),
    "stack": lambda x: torch.stack([x[0]]),
}
SOME = {
    "one feature": lambda x: x[:, 0],
    "part": lambda x: x[:, 1:],
    "permuted": lambda x: x[:, torch.tensor([1, 0, 2])],
    "permuted by index_select": lambda x: x.index_select(1, torch.tensor([1, 0, 2])),
    "repeated": lambda x: x[torch.tensor([0, 0])],
    "with another": lambda x: torch.cat([x, x]),
}


@pytest.mark.parametrize("name", [*ALL, *SOME])
def test_a_selection_of_all_entries_is_a_reshape(name):
    x = torch.randn(1, 3, requires_grad=True).clone()
    y = {**ALL, **SOME}[name](x)
    below, _ = Graph(y.sum()).below_reshapes(get_gradient_edge(y))
    assert (below.node is get_gradient_edge(x).node) == (name in ALL)
