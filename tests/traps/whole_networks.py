"""Small versions of whole architectures."""

import torch
import torch.nn.functional as F
from torch import nn

from traps.cases import Net, case, made


@case
def swiglu_gate():
    parts = {
        "gate": nn.Linear(3, 4, bias=False),
        "up": nn.Linear(3, 4, bias=False),
        "down": nn.Linear(4, 3, bias=False),
    }
    return made(Net(lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x)).mean(1), **parts), 3, 2, 3)


@case
def softmax_head():
    return made(nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3), nn.Softmax(1)), 3, 4)


@case
def sigmoid_head():
    return made(nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2), nn.Sigmoid()), 3, 4)


@case
def max_pool():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, stride=1), nn.Flatten(), nn.Linear(8, 3)
    )
    return made(net, 3, 1, 4, 4)


@case
def squeeze_excite():
    def run(s, x):
        h = torch.relu(s.conv(x))
        gate = torch.sigmoid(s.up(torch.relu(s.down(h.mean((2, 3))))))
        return s.out((h * gate[:, :, None, None]).flatten(1))

    parts = {
        "conv": nn.Conv2d(1, 3, 2),
        "down": nn.Linear(3, 2),
        "up": nn.Linear(2, 3),
        "out": nn.Linear(12, 3),
    }
    return made(Net(run, **parts), 3, 1, 3, 3)


@case
def lenet():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Conv2d(2, 3, 2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.ReLU(inplace=True),
        nn.Linear(5, 4),
    )
    return made(net, 3, 1, 4, 6)


@case
def densenet_concat():
    def run(s, x):
        h = s.a(x)
        h = torch.cat([h, s.b(torch.relu(s.norm(h)))], 1)
        return s.out(h.mean((2, 3)))

    parts = {
        "a": nn.Conv2d(1, 2, 2),
        "norm": nn.BatchNorm2d(2),
        "b": nn.Conv2d(2, 2, 3, padding=1),
        "out": nn.Linear(4, 3),
    }
    return made(Net(run, **parts), 3, 1, 3, 3)


@case
def unet():
    def run(s, x):
        fine = torch.tanh(s.a(x))
        coarse = torch.tanh(s.b(fine))
        up = s.up(coarse)
        return s.out(torch.cat([fine, up], 1)).mean((2, 3))

    parts = {
        "a": nn.Conv2d(1, 2, 3, padding=1),
        "b": nn.Conv2d(2, 3, 2, stride=2),
        "up": nn.ConvTranspose2d(3, 2, 2, stride=2),
        "out": nn.Conv2d(4, 3, 1),
    }
    return made(Net(run, **parts), 3, 1, 4, 4)


@case
def basic_block_with_projection():
    def run(s, x):
        h = torch.relu_(s.n1(s.a(x)))
        h = s.n2(s.b(h))
        h += s.short(x)
        return s.out(torch.relu_(h).mean((2, 3)))

    parts = {
        "a": nn.Conv2d(1, 2, 3, stride=2, padding=1, bias=False),
        "n1": nn.BatchNorm2d(2),
        "b": nn.Conv2d(2, 2, 3, padding=1, bias=False),
        "n2": nn.BatchNorm2d(2),
        "short": nn.Conv2d(1, 2, 1, stride=2, bias=False),
        "out": nn.Linear(2, 2),
    }
    return made(Net(run, **parts), 3, 1, 4, 4)


@case
def mixer_transposes_tokens():
    def run(s, x):
        x = x + s.tokens(x.transpose(1, 2)).transpose(1, 2)
        return (x + s.channels(x)).mean(1)

    return made(Net(run, tokens=nn.Linear(2, 2), channels=nn.Linear(3, 3)), 3, 2, 3)


@case
def soft_mixture_of_experts():
    def run(s, x):
        gate = torch.softmax(s.gate(x), 1)
        return sum(gate[:, e : e + 1] * expert(x) for e, expert in enumerate(s.experts))

    net = Net(run, gate=nn.Linear(3, 2), experts=nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]))
    return made(net, 3, 3)


@case
def double_backward_inside_the_forward():
    """The output contains a derivative (as energy models do)."""

    def run(s, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.clone().requires_grad_()
            energy = s.b(torch.tanh(s.a(x))).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force

    return made(Net(run, a=nn.Linear(3, 4), b=nn.Linear(4, 1)), 3, 3)
