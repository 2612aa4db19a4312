"""A head narrower than the outputs: fewer products than outputs may be enough."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from traps.cases import Case, Net, case, made


def behind_a_narrow_head(run: Callable[..., Any], **parts: Any) -> Case:
    parts = {"a": nn.Conv1d(1, 2, 3), "head": nn.Linear(4, 6), **parts}
    return made(Net(run, **parts), 3, 1, 4)


def narrow(s: Any, x: Tensor) -> Tensor:
    return s.head(torch.tanh(s.a(x)).flatten(1))


@case
def narrow_head():
    return behind_a_narrow_head(narrow)


@case
def narrow_head_then_sigmoid():
    return behind_a_narrow_head(lambda s, x: torch.sigmoid(narrow(s, x)))


@case
def narrow_head_then_softmax_reshaped():
    return behind_a_narrow_head(lambda s, x: torch.softmax(narrow(s, x), 1).reshape(-1, 2, 3))


@case
def narrow_head_then_learned_temperature():
    temperature = nn.Parameter(torch.tensor(1.5))
    return behind_a_narrow_head(lambda s, x: narrow(s, x) / s.t, t=temperature)


@case
def narrow_head_beside_a_skip_from_the_input():
    return behind_a_narrow_head(lambda s, x: narrow(s, x) + x.sum((1, 2))[:, None])


@case
def narrow_head_used_twice():
    return behind_a_narrow_head(lambda s, x: narrow(s, x) * narrow(s, x.flip(-1)))


@case
def narrow_head_of_lower_rank():
    net = behind_a_narrow_head(narrow)
    with torch.no_grad():
        net.model.head.weight[:, 1] = net.model.head.weight[:, 0]
        net.model.head.weight[3] = 0
    return net


@case
def narrow_head_frozen():
    net = behind_a_narrow_head(narrow)
    net.model.head.requires_grad_(False)
    return net


@case
def narrow_head_weight_normed():
    head = parametrizations.weight_norm(nn.Linear(4, 6))
    return behind_a_narrow_head(narrow, head=head)


@case
def narrow_head_on_tokens():
    return made(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 5)), 3, 2, 2)
