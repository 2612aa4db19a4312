"""Products with a parameter outside of nn.Linear: matmul, bmm, mm, mv, einsum, bilinear."""

import torch
from torch import nn

from traps.cases import Net, case, made, parameter


@case
def textbook_mlp_of_bare_matrices():
    def run(s, x):
        return torch.relu(x @ s.w1 + s.b1) @ s.w2 + s.b2

    parts = {"w1": parameter(4, 5), "b1": parameter(5), "w2": parameter(5, 2), "b2": parameter(2)}
    return made(Net(run, **parts), 3, 4)


@case
def matrix_on_tokens():
    net = Net(lambda s, x: torch.tanh(x @ s.w).mean(1) @ s.v, w=parameter(3, 4), v=parameter(4, 2))
    return made(net, 3, 5, 3)


@case
def one_matrix_expanded_to_the_batch():
    """With one sample the matrix has no dimension of samples; with two it has."""

    def run(s, x):
        return torch.bmm(x.unsqueeze(1), s.w.expand(len(x), 3, 4)).squeeze(1).tanh() @ s.v

    return made(Net(run, w=parameter(3, 4), v=parameter(4, 2)), 3, 3)


@case
def matrix_from_the_left():
    """W @ x mixes tokens; the samples stand in the middle of nothing it sums over."""
    net = Net(
        lambda s, x: torch.tanh(s.w @ x).flatten(1) @ s.v, w=parameter(2, 3), v=parameter(8, 2)
    )
    return made(net, 3, 3, 4)


@case
def samples_in_the_last_dimension():
    net = Net(lambda s, x: (s.v @ torch.tanh(s.w @ x.T)).T, w=parameter(4, 3), v=parameter(2, 4))
    return made(net, 3, 3)


@case
def transposed_matrix_and_the_same_matrix_upright():
    net = Net(lambda s, x: torch.tanh(x @ s.w) @ s.w.T @ s.v, w=parameter(3, 4), v=parameter(3, 2))
    return made(net, 3, 3)


@case
def experts_in_one_parameter():
    """bmm with one matrix for each expert, experts first."""

    def run(s, x):
        tokens = x.transpose(0, 1).contiguous()  # expert, sample, features
        hidden = torch.tanh(torch.bmm(tokens, s.up))
        return torch.baddbmm(s.bias, hidden, s.down).sum(0)

    parts = {"up": parameter(2, 3, 4), "down": parameter(2, 4, 2), "bias": parameter(2, 1, 2)}
    return made(Net(run, **parts), 3, 2, 3)


@case
def every_expert_on_every_token():
    """Broadcast: x has no dimension of experts, so the experts are outputs of one matrix."""

    def run(s, x):
        hidden = torch.tanh(x.unsqueeze(1) @ s.up)  # [n, expert, token, 4]
        return (hidden @ s.down).mean(2).sum(1)

    return made(Net(run, up=parameter(3, 2, 4), down=parameter(3, 4, 2)), 3, 5, 2)


@case
def heads_in_an_einsum():
    def run(s, x):
        q = torch.einsum("bti,hid->bhtd", x, s.q)
        k = torch.einsum("bti,hid->bhtd", x, s.k)
        mixed = torch.softmax(q @ k.mT, -1) @ torch.einsum("bti,hid->bhtd", x, s.v)
        return torch.einsum("bhtd,hdo->bto", mixed, s.o).mean(1)

    parts = {name: parameter(2, 3, 2) for name in "qkv"}
    return made(Net(run, **parts, o=parameter(2, 2, 3)), 3, 4, 3)


@case
def einsum_with_a_matrix_for_each_group():
    def run(s, x):
        return torch.einsum("bgi,gio->bgo", torch.tanh(x), s.w).flatten(1) @ s.v

    return made(Net(run, w=parameter(2, 3, 2), v=parameter(4, 2)), 3, 2, 3)


@case
def einsum_that_only_scales():
    """Nothing is summed over: the parameter is a scale, not a layer."""
    net = Net(lambda s, x: s.a(torch.einsum("bi,i->bi", x, s.p)), a=nn.Linear(3, 2), p=parameter(3))
    return made(net, 3, 3)


@case
def vector_as_a_weight():
    net = Net(lambda s, x: torch.tanh(x @ s.w) @ s.v, w=parameter(3, 4, 2), v=parameter(2))
    return made(net, 3, 3, 2, 4)


@case
def loop_over_samples_with_mv():
    def run(s, x):
        return torch.stack([torch.mv(s.w, sample) for sample in x]).tanh() @ s.v

    return made(Net(run, w=parameter(4, 3), v=parameter(4, 2)), 3, 3)


@case
def matrix_computed_from_parameters():
    """A low-rank weight: the product of two parameters is no layer, but the weight of one."""
    net = Net(
        lambda s, x: s.out(x @ (s.a @ s.b)),
        a=parameter(3, 2),
        b=parameter(2, 4),
        out=nn.Linear(4, 2),
    )
    return made(net, 3, 3)


@case
def matrix_reshaped_before_use():
    net = Net(
        lambda s, x: torch.tanh(x @ s.w.view(3, 4)) @ s.v.reshape(2, 4).T,
        w=parameter(12),
        v=parameter(8),
    )
    return made(net, 3, 3)


@case
def slice_of_a_matrix():
    net = Net(lambda s, x: torch.tanh(x @ s.w[:3]) @ s.w[3:, :2], w=parameter(7, 4))
    return made(net, 3, 3)


@case
def frozen_matrix_between_trained_ones():
    net = Net(
        lambda s, x: torch.tanh(x @ s.w) @ s.f @ s.v,
        w=parameter(3, 4),
        f=parameter(4, 3),
        v=parameter(3, 2),
    )
    net.f.requires_grad_(False)
    return made(net, 3, 3)


@case
def product_of_data_is_no_layer():
    """The data's own Gram matrix meets a buffer: neither is a weight."""

    def run(s, x):
        return s.out((x @ x.mT @ s.mix).flatten(1))

    net = Net(run, out=nn.Linear(6, 2))
    net.register_buffer("mix", torch.randn(2, 3))
    return made(net, 3, 2, 4)


@case
def bilinear_of_one_tensor_with_itself():
    net = Net(
        lambda s, x: s.out(torch.tanh(s.mix(x, x))), mix=nn.Bilinear(3, 3, 4), out=nn.Linear(4, 2)
    )
    return made(net, 3, 3)


@case
def bilinear_on_tokens_without_a_bias():
    def run(s, x):
        return s.mix(torch.tanh(x[..., :2]), x[..., 2:]).mean(1)

    return made(Net(run, mix=nn.Bilinear(2, 3, 2, bias=False)), 3, 4, 5)


@case
def matrix_of_addmm_from_the_left():
    net = Net(lambda s, x: torch.addmm(s.b, s.w, x.T).T, w=parameter(2, 3), b=parameter(2, 1))
    return made(net, 3, 3)


@case
def linear_with_a_vector_as_weight():
    """F.linear takes a vector, too: a dot product with one output."""
    net = Net(
        lambda s, x: nn.functional.linear(torch.tanh(s.a(x)), s.w).unsqueeze(1),
        a=nn.Linear(3, 4),
        w=parameter(4),
    )
    return made(net, 3, 3)
