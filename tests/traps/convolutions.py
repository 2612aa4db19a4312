"""Convolutions: strides, groups, dilation, padding of every kind, transposed ones."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from traps.cases import Net, case, conv_case, made, parameter


@case
def conv2d_plain():
    return conv_case(nn.Conv2d(2, 3, 3, padding=1), 2, 3, 3)


@case
def conv_without_bias():
    return conv_case(nn.Conv2d(2, 2, 2, bias=False), 2, 3, 3)


@case
def conv_grouped():
    return conv_case(nn.Conv2d(4, 6, 2, groups=2), 4, 3, 2)


@case
def conv_depthwise_with_multiplier():
    return conv_case(nn.Conv2d(2, 4, 2, groups=2), 2, 3, 3)


@case
def conv_strided_with_unread_border():
    return conv_case(nn.Conv2d(1, 2, 2, stride=2), 1, 5, 4)


@case
def conv_dilated():
    return conv_case(nn.Conv2d(1, 2, 2, dilation=2, padding=1), 1, 4, 3)


@case
def conv_rectangular_everything():
    return conv_case(
        nn.Conv2d(2, 2, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1)), 2, 3, 5
    )


@case
def conv_same_with_even_kernel():
    return conv_case(nn.Conv2d(1, 2, (2, 4), padding="same"), 1, 3, 4)


@case
def conv_same_dilated():
    return conv_case(nn.Conv1d(2, 2, 2, padding="same", dilation=3), 2, 5)


@case
def conv_valid():
    return conv_case(nn.Conv2d(1, 2, 2, padding="valid"), 1, 3, 3)


@case
def conv_one_by_one():
    return conv_case(nn.Conv2d(3, 2, 1), 3, 2, 2)


@case
def conv_kernel_larger_than_the_image():
    return conv_case(nn.Conv2d(1, 2, 5, padding=2), 1, 3, 3)


@case
def conv_circular():
    return conv_case(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), 1, 4, 3)


@case
def conv_circular_wrapping_almost_twice():
    return conv_case(nn.Conv1d(1, 2, 5, padding=3, padding_mode="circular"), 1, 3)


@case
def conv_reflect_strided():
    return conv_case(nn.Conv2d(1, 2, 3, padding=(2, 1), stride=2, padding_mode="reflect"), 1, 4, 4)


@case
def conv_replicate_3d():
    return conv_case(nn.Conv3d(1, 2, 2, padding=1, padding_mode="replicate"), 1, 2, 2, 2, outputs=2)


@case
def conv_same_with_even_kernel_reflected():
    return conv_case(nn.Conv1d(2, 2, 4, padding="same", padding_mode="reflect"), 2, 4)


@case
def conv_grouped_circular_same():
    return conv_case(nn.Conv1d(2, 4, 3, padding="same", groups=2, padding_mode="circular"), 2, 4)


@case
def padded_conv_inside_a_residual():
    """The layer's input is the tensor before the pad: the skip reads that very tensor."""

    def run(s, x):
        h = torch.tanh(s.a(x))
        return s.out((h + s.b(h)).flatten(1))

    b = nn.Conv2d(2, 2, 3, padding=1, padding_mode="replicate")
    return made(Net(run, a=nn.Conv2d(1, 2, 2), b=b, out=nn.Linear(8, 3)), 3, 1, 3, 3)


@case
def conv1d_strided():
    return conv_case(nn.Conv1d(2, 3, 3, stride=2, padding=1), 2, 5)


@case
def conv3d_grouped():
    return conv_case(nn.Conv3d(2, 2, 2, groups=2), 2, 2, 3, 2, outputs=2)


@case
def functional_conv_on_bare_parameters():
    return made(
        Net(
            lambda s, x: F.conv2d(
                torch.tanh(F.conv2d(x, s.w, stride=2)), s.v, s.c, padding=1
            ).flatten(1),
            w=parameter(2, 1, 2, 2),
            v=parameter(1, 2, 2, 2),
            c=parameter(1),
        ),
        3,
        1,
        3,
        3,
    )


@case
def conv_in_channels_last():
    net = nn.Sequential(nn.Conv2d(2, 2, 2), nn.ReLU(), nn.Conv2d(2, 2, 2), nn.Flatten())
    made_case = made(net.to(memory_format=torch.channels_last), 3, 2, 3, 4)
    return replace(made_case, x=made_case.x.to(memory_format=torch.channels_last))


@case
def transposed_conv1d_strided():
    return conv_case(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), 2, 3)


@case
def transposed_conv2d_overlapping():
    return conv_case(
        nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=(1, 0)), 2, 2, 3
    )


@case
def transposed_conv2d_grouped_dilated():
    return conv_case(nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2, bias=False), 4, 2, 2)


@case
def transposed_conv_cropping_whole_taps():
    return conv_case(nn.ConvTranspose1d(2, 2, 3, padding=2), 2, 4)


@case
def transposed_conv_output_padding_beyond_stride():
    return conv_case(nn.ConvTranspose1d(1, 2, 2, stride=1, dilation=3, output_padding=2), 1, 3)


@case
def transposed_conv3d():
    return conv_case(nn.ConvTranspose3d(2, 1, 2, stride=2), 2, 1, 2, 2, outputs=2)


@case
def transposed_conv_with_output_size():
    return made(
        Net(
            lambda s, x: s.b(torch.tanh(s.a(x, output_size=[6])).flatten(1)),
            a=nn.ConvTranspose1d(1, 2, 2, stride=2),
            b=nn.Linear(12, 3),
        ),
        3,
        1,
        3,
    )
