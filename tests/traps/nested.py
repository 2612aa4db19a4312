"""Arguments and results that are nested: tuples, lists and dicts of tensors."""

import torch
from torch import nn

from traps.cases import Case, Net, case, parameter, shaken


def nested_case(net, x, output=None):
    return Case(shaken(net), x, output)


@case
def pair_as_one_argument():
    net = Net(lambda s, pair: pair[0] @ s.w + pair[1] @ s.v, w=parameter(3, 2), v=parameter(4, 2))
    return nested_case(net, ((torch.randn(3, 3), torch.randn(3, 4)),))


@case
def dict_as_one_argument_and_a_dict_of_results():
    def run(s, batch):
        hidden = torch.tanh(s.a(batch["image"]))
        return {"logits": s.b(hidden), "aux": (hidden, [batch["text"] @ s.w])}

    net = Net(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2), w=parameter(2, 3))
    return nested_case(net, ({"image": torch.randn(3, 3), "text": torch.randn(3, 2)},), "*")


@case
def deep_tree_of_tensors():
    def run(s, tree, more):
        deep = tree["one"][0][1][0]
        return torch.cat([deep @ s.w, s.a(tree["two"]), torch.tanh(more[0]) @ s.v], 1)

    tree = {
        "one": [(torch.randn(3, 2), [torch.randn(3, 3)]), torch.randn(3, 1)],
        "two": torch.randn(3, 4),
    }
    net = Net(run, w=parameter(3, 2), a=nn.Linear(4, 2), v=parameter(2, 1))
    return nested_case(net, (tree, [torch.randn(3, 2)]))


@case
def list_of_images_by_name():
    def run(s, views):
        return s.out(torch.stack([s.conv(v).mean((2, 3)) for v in views]).mean(0))

    net = Net(run, conv=nn.Conv2d(1, 3, 2), out=nn.Linear(3, 2))
    return nested_case(net, {"views": [torch.randn(3, 1, 4, 4), torch.randn(3, 1, 3, 5)]})


@case
def tuple_of_results_through_a_path():
    def run(s, x):
        hidden = torch.tanh(s.a(x))
        return hidden, {"heads": [s.b(hidden), s.c(hidden)]}

    net = Net(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(4, 3))
    return nested_case(net, torch.randn(3, 3), lambda out: out[1]["heads"][1])
