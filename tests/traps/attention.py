"""Attention, as torch writes it: fused, time first, cross, frozen."""

import torch
from torch import nn

from traps.cases import Net, case, frozen, made, parameter


@case
def attention_self_batch_first():
    return made(
        Net(
            lambda s, x: s.out(s.attn(x, x, x)[0].mean(1)),
            attn=nn.MultiheadAttention(4, 2, batch_first=True),
            out=nn.Linear(4, 3),
        ),
        3,
        2,
        4,
    )


@case
def attention_self_fused():
    return made(
        Net(
            lambda s, x: s.out((x + s.attn(x, x, x, need_weights=False)[0]).mean(1)),
            attn=nn.MultiheadAttention(4, 2, batch_first=True),
            out=nn.Linear(4, 3),
        ),
        3,
        3,
        4,
    )


@case
def attention_self_time_first_with_residual():
    def run(s, x):
        x = x.transpose(0, 1).contiguous()
        return s.out((x + s.attn(x, x, x)[0]).mean(0))

    return made(Net(run, attn=nn.MultiheadAttention(4, 2), out=nn.Linear(4, 3)), 3, 2, 4)


@case
def attention_as_many_tokens_as_samples_time_first():
    def run(s, x):
        x = x.transpose(0, 1)
        return s.out(s.attn(x, x, x, need_weights=False)[0][0])

    return made(Net(run, attn=nn.MultiheadAttention(4, 2), out=nn.Linear(4, 3)), 3, 3, 4)


@case
def attention_without_bias():
    return made(
        Net(
            lambda s, x: s.attn(x, x, x)[0].mean(1),
            attn=nn.MultiheadAttention(4, 1, bias=False, batch_first=True),
        ),
        3,
        2,
        4,
    )


@case
def attention_cross_with_other_widths():
    def run(s, x):
        return s.attn(s.a(x), x, x[..., :2])[0].mean(1)

    attn = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)
    return made(Net(run, a=nn.Linear(3, 4), attn=attn), 3, 2, 3)


@case
def attention_cross_with_one_width():
    def run(s, x):
        return s.attn(s.query.expand(len(x), -1, -1), x, x)[0].flatten(1)

    attn = nn.MultiheadAttention(4, 2, batch_first=True)
    return made(Net(run, query=parameter(1, 1, 4), attn=attn), 3, 3, 4)


@case
def attention_on_three_tensors():
    def run(s, x):
        return s.attn(x, torch.tanh(x), torch.sigmoid(x))[0].mean(1)

    return made(Net(run, attn=nn.MultiheadAttention(4, 2, batch_first=True)), 3, 2, 4)


@case
def attention_with_extra_key_and_value():
    attn = nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True)
    return made(Net(lambda s, x: s.attn(x, x, x)[0].mean(1), attn=attn), 3, 2, 4)


@case
def attention_with_frozen_in_projection():
    attn = nn.MultiheadAttention(4, 2, batch_first=True)
    frozen(attn.in_proj_weight)
    return made(Net(lambda s, x: s.attn(x, x, x)[0].mean(1), attn=attn), 3, 2, 4)


@case
def transformer_encoder_layer():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
    return made(nn.Sequential(layer, nn.Flatten(), nn.Linear(8, 3)), 3, 2, 4)


@case
def transformer_encoder_layer_norm_first_time_first():
    def run(s, x):
        return s.out(s.layer(x.transpose(0, 1)).mean(0))

    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, norm_first=True, activation="gelu")
    return made(Net(run, layer=layer, out=nn.Linear(4, 2)), 3, 2, 4)


@case
def transformer_encoder_all_frozen_but_head():
    """Nothing in the encoder asks for a gradient: the fused fast path would swallow its layers."""
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return made(nn.Sequential(frozen(encoder), nn.Flatten(), nn.Linear(8, 2)), 3, 2, 4)


@case
def transformer_decoder_layer():
    layer = nn.TransformerDecoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return made(
        Net(
            lambda s, x: s.out(s.layer(x[:, :1], x[:, 1:]).flatten(1)),
            layer=layer,
            out=nn.Linear(4, 2),
        ),
        3,
        3,
        4,
    )
