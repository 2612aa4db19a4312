"""Networks that send samples or tokens to different layers."""

import torch
from torch import nn

from traps.cases import Case, Net, case, made, uneven


def routed(s, x):
    """Each token goes to the expert that the sign of its first entry names."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_zeros(len(rows), 2)
    for e, expert in enumerate(s.experts):
        chosen = torch.nonzero((rows[:, 0] > 0) == bool(e)).squeeze(1)
        out = out.index_add(0, chosen, expert(rows[chosen]))
    return out.reshape(len(x), -1, 2).sum(1) + s.a(x).mean(1)


def routed_case(signs: list[list[int]]) -> Case:
    net = Net(routed, experts=nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), a=nn.Linear(3, 2))
    made_case = made(net, len(signs), len(signs[0]), 3)
    made_case.x[..., 0] = made_case.x[..., 0].abs() * torch.tensor(signs)
    return made_case


@case
def experts_with_as_many_tokens_of_each_sample():
    return routed_case([[1, 1, -1], [-1, 1, 1], [1, -1, 1]])


@uneven
def experts_with_more_tokens_of_one_sample():
    return routed_case([[1, 1, -1], [-1, 1, 1], [-1, -1, 1]])


@uneven
def experts_whose_rows_divide_evenly_by_accident():
    """Expert 1 gets 2, 2, 1, 3 tokens: 8 rows for 4 samples, but not 2 of each."""
    return routed_case([[1, 1, -1], [-1, 1, 1], [-1, -1, 1], [1, 1, 1]])


@uneven
def samples_scattered_over_experts():
    return routed_case([[1], [-1], [1], [1]])


@uneven
def images_of_which_some_experts_get_none():
    """Each expert is called, with no image where none was sent to it."""

    def run(s, x):
        chosen = (x[:, 0, 0, 0] > 0).long()
        out = x.new_zeros(len(x), 2)
        for e, expert in enumerate(s.experts):
            out[chosen == e] = torch.tanh(expert(x[chosen == e])).flatten(1)
        return s.a(out)

    experts = nn.ModuleList([nn.Conv2d(1, 2, 2), nn.Conv2d(1, 2, 2)])
    made_case = made(Net(run, experts=experts, a=nn.Linear(2, 2)), 3, 1, 2, 2)
    made_case.x[:, 0, 0, 0] = torch.tensor([1.0, -1.0, 2.0])
    return made_case


@uneven
def depth_that_depends_on_the_sample():
    def run(s, x):
        for _ in range(1 + int(x[0, 0] > 0)):
            x = torch.tanh(s.a(x))
        return x

    made_case = made(Net(run, a=nn.Linear(3, 3)), 3, 3)
    made_case.x[:, 0] = torch.tensor([1.0, -1.0, 2.0])
    return made_case
