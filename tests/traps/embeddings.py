"""Embeddings, position tables and class tokens."""

import torch
from torch import nn

from traps.cases import Net, case, made, parameter


@case
def embedding_by_internal_indices():
    return made(
        Net(
            lambda s, x: s.a(x) + s.emb((x > 0).long()).sum(1),
            a=nn.Linear(4, 3),
            emb=nn.Embedding(3, 3),
        ),
        3,
        4,
    )


@case
def embedding_with_padding_index():
    return made(
        Net(
            lambda s, x: s.a(x) + s.emb((x > 0).long()).sum(1),
            a=nn.Linear(4, 3),
            emb=nn.Embedding(3, 3, padding_idx=0),
        ),
        3,
        4,
    )


@case
def embedding_into_a_linear():
    return made(
        Net(
            lambda s, x: s.a(s.emb((x > 0).long())).flatten(1) * x.sum(1, keepdim=True),
            emb=nn.Embedding(2, 3),
            a=nn.Linear(3, 2),
        ),
        3,
        2,
    )


@case
def embedding_bag():
    return made(
        Net(
            lambda s, x: s.a(x) + s.bag((x > 0).long()),
            a=nn.Linear(4, 3),
            bag=nn.EmbeddingBag(3, 3, mode="mean"),
        ),
        3,
        4,
    )


@case
def position_table_by_arange():
    def run(s, x):
        return s.a(torch.tanh(x + s.pos(torch.arange(x.shape[1])))).mean(1)

    return made(Net(run, pos=nn.Embedding(4, 3), a=nn.Linear(3, 3)), 3, 4, 3)


@case
def as_many_positions_as_samples():
    """The looked-up table has n rows by accident; they are positions, not samples."""

    def run(s, x):
        return s.a(torch.tanh(x + s.pos(torch.arange(x.shape[1])))).mean(1)

    return made(Net(run, pos=nn.Embedding(3, 3), a=nn.Linear(3, 3)), 3, 3, 3)


@case
def as_many_features_as_samples():
    """A shift of n entries and a square weight: nothing about their shapes is about samples."""
    return made(
        Net(
            lambda s, x: s.shift * torch.tanh(s.a(x)) + s.table[0],
            a=nn.Linear(3, 3),
            shift=parameter(3),
            table=parameter(3, 3),
        ),
        3,
        3,
    )


@case
def linear_on_a_position_table():
    """A layer whose input is the same for all samples, with n rows by accident."""

    def run(s, x):
        return s.a(torch.tanh(x + s.proj(s.pos))).mean(1)

    return made(Net(run, pos=parameter(3, 2), proj=nn.Linear(2, 3), a=nn.Linear(3, 3)), 3, 3, 3)


@case
def layernorm_on_a_position_table():
    return made(
        Net(
            lambda s, x: s.a(x * s.norm(s.pos)).mean(1),
            pos=parameter(3, 3),
            norm=nn.LayerNorm(3),
            a=nn.Linear(3, 2),
        ),
        3,
        3,
        3,
    )


@case
def cls_token_position_and_layerscale():
    def run(s, x):
        tokens = s.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([s.cls.expand(len(x), -1, -1), tokens], 1) + s.pos
        h = s.norm1(tokens)
        tokens = tokens + s.gamma1 * s.attn(h, h, h, need_weights=False)[0]
        tokens = tokens + s.gamma2 * s.mlp(s.norm2(tokens))
        return s.head(s.norm3(tokens)[:, 0])

    parts = {
        "patch": nn.Conv2d(1, 4, 2, stride=2),
        "cls": parameter(1, 1, 4),
        "pos": parameter(1, 5, 4),
        "norm1": nn.LayerNorm(4),
        "attn": nn.MultiheadAttention(4, 2, batch_first=True),
        "gamma1": parameter(4),
        "norm2": nn.LayerNorm(4),
        "mlp": nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)),
        "gamma2": parameter(4),
        "norm3": nn.LayerNorm(4),
        "head": nn.Linear(4, 3),
    }
    return made(Net(run, **parts), 3, 1, 4, 4)


@case
def position_table_sliced():
    def run(s, x):
        return s.a(torch.tanh(x + s.pos[:, : x.shape[1]])).mean(1)

    return made(Net(run, pos=parameter(1, 5, 3), a=nn.Linear(3, 2)), 3, 2, 3)


@case
def embedding_with_sparse_gradients():
    run = {"a": nn.Linear(4, 3), "emb": nn.Embedding(3, 3, sparse=True)}
    return made(Net(lambda s, x: s.a(x) + s.emb((x > 0).long()).sum(1), **run), 3, 4)
