"""Tensors without entries: a layer that is called on no row at all has no part in a number."""

import pytest
import torch
from oracles import oracle
from torch import nn
from traps import Case, Net, made, parameter

import flatlens as fl


def expert_that_never_gets_a_sample() -> Case:
    def run(s, x):
        unused = torch.relu_(s.b(x[x[:, 0] > 9]))
        return s.a(x) + unused.sum(0)

    return made(Net(run, a=nn.Linear(3, 2), b=nn.Linear(3, 2)), 3, 3)


def recurrence_that_never_gets_a_sample() -> Case:
    def run(s, x):
        states, _ = s.b(x[x[:, 0, 0] > 9])
        return s.a(x.flatten(1)) + states.sum((0, 1))

    return made(Net(run, a=nn.Linear(6, 2), b=nn.GRU(3, 2, batch_first=True)), 3, 2, 3)


def layer_without_outputs() -> Case:
    def run(s, x):
        return s.a(torch.cat([x, torch.tanh(nn.functional.linear(x, s.b, s.c))], 1))

    return made(Net(run, a=nn.Linear(3, 2), b=parameter(0, 3), c=parameter(0)), 3, 3)


def prefix_of_no_tokens() -> Case:
    def run(s, x):
        return s.a(torch.cat([s.b.expand(len(x), 0, 3), x], 1)).mean(1)

    return made(Net(run, a=nn.Linear(3, 2), b=parameter(1, 0, 3)), 3, 2, 3)


CASES = (
    expert_that_never_gets_a_sample,
    recurrence_that_never_gets_a_sample,
    layer_without_outputs,
    prefix_of_no_tokens,
)


@pytest.mark.parametrize("build", CASES)
@pytest.mark.parametrize("chunk", [None, 1])
def test_parameters_that_are_read_by_no_row_are_unused(build, chunk):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        case = build()
    finally:
        torch.set_default_dtype(torch.float32)
    p = fl.probe(case.model, case.x, chunk=chunk)
    assert p.unmeasured == []
    assert [layer.name for layer in p.layers] == ["a"]
    assert {q.path for q in p.parameters if q.name[0] != "a"} == {"unused"}
    for got, want in zip(p.parameters, oracle(case.model, case.x).parameters, strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=0)
