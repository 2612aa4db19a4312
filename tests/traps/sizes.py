"""Degenerate sizes, ranks and scales."""

import torch
from torch import nn

from traps.cases import Case, Net, case, made, shaken


@case
def one_output():
    return made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), 3, 4)


@case
def one_sample():
    return made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), 1, 4)


@case
def one_sample_one_token_one_feature():
    return made(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Flatten(), nn.Linear(1, 1)), 1, 1, 1)


@case
def more_outputs_than_inputs():
    return made(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 5)), 3, 2)


@case
def bottleneck_makes_rank_deficient():
    return made(nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 4)), 3, 4)


@case
def bottleneck_in_the_middle():
    net = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4))
    return made(net, 3, 5)


@case
def dead_relu():
    net = shaken(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    with torch.no_grad():
        net[0].bias.fill_(-50.0)
    return Case(net, torch.randn(3, 3))


@case
def relu_dead_at_one_sample():
    net = shaken(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    with torch.no_grad():
        net[0].weight.abs_()
        net[0].bias.fill_(0.1)
    x = torch.rand(3, 3)
    x[1] = -9.0
    return Case(net, x)


@case
def zero_sample():
    made_case = made(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 3, 3)
    made_case.x[1] = 0.0
    return made_case


@case
def zero_sample_without_bias():
    made_case = made(
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)), 3, 3
    )
    made_case.x[1] = 0.0
    return made_case


@case
def coordinates_nobody_reads():
    return made(Net(lambda s, x: s.a(x[:, 1:3]), a=nn.Linear(2, 3)), 3, 5)


@case
def ill_conditioned_jacobian():
    net = shaken(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    with torch.no_grad():
        net[2].weight.mul_(torch.tensor([[1.0], [1e-3], [1e-6]]))
    return Case(net, torch.randn(3, 4))


@case
def tiny_and_huge_scales():
    net = shaken(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    with torch.no_grad():
        net[0].weight.mul_(1e-9)
        net[2].weight.mul_(1e6)
    return Case(net, torch.randn(3, 4))


@case
def noncontiguous_input():
    model = shaken(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    return Case(model, torch.randn(4, 3).t())


@case
def samples_that_are_dead_but_for_the_tail_of_gelu():
    """The derivative of two samples is 1e-230: it has a dimension, but its square is 0."""
    net = Net(
        lambda s, x: nn.functional.gelu(x @ s.w) @ s.w.T,
        w=nn.Parameter(torch.tensor([[0.3], [0.5]])),
    )
    x = torch.tensor([[10.0, 6.0], [-29.0, -46.0], [5.0, 9.0], [-40.0, -40.0]])
    return Case(net, x)


@case
def second_input_without_entries():
    net = shaken(Net(lambda s, x, y: s.a(torch.cat([x, y], 1)), a=nn.Linear(3, 2)))
    return Case(net, (torch.randn(3, 3), torch.randn(3, 0)))
