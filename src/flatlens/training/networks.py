"""The networks of the paper's experiments, and a few common ones.

Every constructor draws its random numbers from torch's global generator, so
`torch.manual_seed(0); lenet()` always gives the same network. Image networks read
`[n, 3, 32, 32]` (CIFAR-10), the MLP reads anything that flattens to `[n, widths[0]]`.

| name       | network                                           | parameters |
|------------|---------------------------------------------------|-----------:|
| `mlp`      | 784-500-500-500-10, the paper's 4-layer MLP       |    898,510 |
| `lenet`    | LeNet-5 with ReLU and max-pool                    |     62,006 |
| `vgg`      | the narrow network that the paper calls "VGG-11"  |     97,018 |
| `vgg11`    | VGG-11 at full width (64 to 512 channels)         |  9,750,922 |
| `resnet18` | ResNet-18 with the CIFAR stem                     | 11,173,962 |
| `vit`      | a small vision transformer                        |  2,693,578 |

`timm:NAME` is a model of timm, `hf:NAME` one of Transformers, and `package.module:factory` a model
of your own.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import textwrap
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flatlens.data.memory import refuse_beyond_memory
from flatlens.errors import FlatlensError
from flatlens.files.reading import shown
from flatlens.training import hf_models, timm_models
from flatlens.training.plain_networks import check_plain

LONGEST = 300  # characters of the message of an exception in a user's factory
DEEPEST = 10_000  # layers or blocks; building more takes minutes

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
}


def mlp(
    widths: Sequence[int] = (784, 500, 500, 500, 10),
    activation: str = "relu",
    depth: int | None = None,
) -> nn.Sequential:
    """Build a fully connected network; the default is the paper's 4-layer MLP on FashionMNIST.

    Widths 784-500-500-500-10 are those of the paper's runs: ReLU for the 100 networks of
    Figure G.6, probably tanh for the training curves H.8 and H.9. Initialised as torch does it.

    Args:
        widths: number of inputs, units of each hidden layer, number of outputs.
        activation: relu, tanh, gelu, silu, sigmoid or identity.
        depth: number of layers, in place of that of `widths`. All hidden layers are then as wide
            as the first one of `widths`.

    Raises:
        FlatlensError: if there are fewer than two widths, or too many layers.

    >>> sum(p.numel() for p in mlp().parameters())
    898510
    >>> sum(isinstance(layer, nn.Linear) for layer in mlp(depth=7))
    7
    """
    if len(widths) < 2:
        raise FlatlensError(f"mlp needs at least input and output width, got {shown(widths)}.")
    if depth is not None:
        if not 1 <= depth <= DEEPEST:
            raise FlatlensError(f"mlp needs a depth from 1 to {DEEPEST:,}, got {shown(depth)}.")
        widths = (widths[0], *[widths[1]] * (depth - 1), widths[-1])
    if len(widths) > DEEPEST + 1:
        raise FlatlensError(f"mlp takes at most {DEEPEST:,} layers, got {len(widths) - 1:,}.")
    if activation not in ACTIVATIONS:
        raise FlatlensError(f"Unknown activation {activation!r}; use {_or(*ACTIVATIONS)}.")
    layers: list[nn.Module] = [nn.Flatten()]
    for d_in, d_out in pairwise(widths):
        layers += [nn.Linear(d_in, d_out), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])  # the last layer is linear


def lenet() -> nn.Sequential:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max-pool, as in the paper's Figure G.7.

    Two 5x5 convolutions without padding (3-6-16 channels), then 400-120-84-10.
    Xavier-normal weights, zero biases.

    >>> sum(p.numel() for p in lenet().parameters())
    62006
    """
    net = nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),  # 32 -> 28 -> 14 pixels
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),  # 14 -> 10 -> 5
        nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    )  # fmt: skip
    for module in net:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(module.weight)
            _zero_bias(module)
    return net


def vgg() -> nn.Sequential:
    """The narrow five-convolution network that stands behind the paper's "VGG-11" figures.

    Channels 16, 16, 32, 64, 64; kernel 3 with padding **2**, so that 32 pixels shrink as
    34-17, 19-9, 11-5, 7-3, 5-2 and 64 * 2 * 2 = 256 features remain; then 256-128-10.
    Convolutions N(0, 2 / (9 C_out)) with zero bias, linear layers as torch initialises them.
    For the network of Simonyan & Zisserman see `vgg11`.

    >>> sum(p.numel() for p in vgg().parameters())
    97018
    """
    layers: list[nn.Module] = []
    for c_in, c_out in pairwise((3, 16, 16, 32, 64, 64)):
        layers += [nn.Conv2d(c_in, c_out, 3, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)]
    return _he_fan_out(nn.Sequential(*layers))


def vgg11(classes: int = 10) -> nn.Sequential:
    """VGG-11 at full width: configuration A of Simonyan & Zisserman (2015), for 32 x 32 pixels.

    Eight 3x3 convolutions (64, 128, 256, 256, 512, 512, 512, 512) and three linear layers. The
    published 4096-4096 head belongs to 224 pixels; here 512 features remain and the head is
    512-512-512-classes. Initialised as `vgg`.

    >>> sum(p.numel() for p in vgg11().parameters())
    9750922
    """
    layers: list[nn.Module] = []
    c_in = 3
    for widths in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for c_out in widths:
            layers += [nn.Conv2d(c_in, c_out, 3, padding=1), nn.ReLU()]
            c_in = c_out
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512, 512), nn.ReLU()]
    layers += [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, classes)]
    return _he_fan_out(nn.Sequential(*layers))


class BasicBlock(nn.Module):
    """relu(F(x) + shortcut(x)), F = conv-BN-ReLU-conv-BN (He et al., 2016, Figure 5 left)."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:  # projection shortcut, option B of the paper
            conv = nn.Conv2d(c_in, c_out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(self.bn1(self.conv1(x)))
        y: Tensor = self.relu2(self.bn2(self.conv2(h)) + self.shortcut(x))
        return y


def resnet18(classes: int = 10) -> nn.Sequential:
    """ResNet-18 (He et al., 2016, Table 1) with the stem that 32 x 32 pixels need.

    The 7x7 stride-2 convolution and the max-pool of the ImageNet stem become one 3x3
    convolution. Convolutions N(0, 2 / (k^2 C_out)), BatchNorm weight 1 and bias 0.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    blocks: list[nn.Module] = []
    c_in = 64
    for c_out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [BasicBlock(c_in, c_out, stride), BasicBlock(c_out, c_out, 1)]
        c_in = c_out
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return _he_fan_out(nn.Sequential(*stem, *blocks, *head))


class Attention(nn.Module):
    """Multi-head self-attention, softmax(q k^T / sqrt(d)) v, written out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # three tensors of shape [n, heads, tokens, d]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        out: Tensor = self.proj((attention @ v).transpose(1, 2).flatten(2))
        return out


class TransformerBlock(nn.Module):
    """Pre-norm block (Dosovitskiy et al., 2021, Equations 2 and 3)."""

    def __init__(self, dim: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_ratio * dim), nn.GELU(), nn.Linear(mlp_ratio * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class VisionTransformer(nn.Module):
    """Patches, a class token, learned positions, pre-norm blocks, a linear head."""

    def __init__(
        self, image: int, patch: int, dim: int, depth: int, heads: int, mlp_ratio: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (image // patch) ** 2, dim))
        self.blocks = nn.Sequential(
            *(TransformerBlock(dim, heads, mlp_ratio) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # [n, T, dim]
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1)
        tokens = self.norm(self.blocks(tokens + self.positions))
        out: Tensor = self.head(tokens[:, 0])  # the class token's
        return out


def vit(
    image: int = 32,
    patch: int = 4,
    dim: int = 192,
    depth: int = 6,
    heads: int = 3,
    mlp_ratio: int = 4,
    classes: int = 10,
) -> VisionTransformer:
    """Small vision transformer (Dosovitskiy et al., 2021): the block of DeiT-Ti, half as deep.

    Width 192, 3 heads and ratio 4 are DeiT-Ti's (Touvron et al., 2021); 64 patches of 4 pixels
    and depth 6 suit 32 x 32 images. Weights, class token and positions N(0, 0.02^2) as there,
    biases zero, LayerNorm weight 1.

    >>> sum(p.numel() for p in vit().parameters())
    2693578
    """
    if image % patch or dim % heads:
        raise FlatlensError(
            f"vit needs patch ({patch}) to divide image ({image}) and heads ({heads}) "
            f"to divide dim ({dim})."
        )
    if not 1 <= depth <= DEEPEST:
        raise FlatlensError(f"vit needs a depth from 1 to {DEEPEST:,}, got {shown(depth)}.")
    net = VisionTransformer(image, patch, dim, depth, heads, mlp_ratio, classes)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            _zero_bias(module)
    nn.init.normal_(net.cls_token, std=0.02)
    nn.init.normal_(net.positions, std=0.02)
    return net


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "vgg": vgg,
    "vgg11": vgg11,
    "resnet18": resnet18,
    "vit": vit,
}


def build(name: str, **options: Any) -> nn.Module:
    """Build a network by name.

    Args:
        name: one of `MODELS`, `timm:NAME`, `hf:NAME`, `hf:FOLDER`, or `package.module:factory`. If
            a module is named in place of a factory, the network is a copy of it with the weights
            that it has.
        options: keyword arguments of the constructor, of `timm.create_model`, of
            `hf_models.create` or of the factory.

    Raises:
        FlatlensError: if the name is unknown, the options do not fit, the network is larger than
            the memory of this machine, or its weights have no values yet.
        Exception: any error of a user's factory. Its attribute `sentence` describes the error in
            one sentence.

    >>> build("mlp", widths=(4, 3, 2))[1]
    Linear(in_features=4, out_features=3, bias=True)
    >>> build("torch.nn:Linear", in_features=3, out_features=2)
    Linear(in_features=3, out_features=2, bias=True)
    """
    factory = _factory(name)
    try:
        inspect.signature(factory).bind(**options)
    except (TypeError, ValueError) as error:  # ValueError: a builtin, which makes no module
        raise FlatlensError(f"Model {name!r} cannot take these options: {error}.") from error
    try:
        if name in MODELS:
            _refuse_too_large(name, factory, options)
        model = factory(**options)
    except FlatlensError:
        raise
    except Exception as error:  # not a FlatlensError: a sweep tries it again
        vars(error)["sentence"] = _described(f"Cannot build model {name!r}", error)
        raise
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise FlatlensError(f"Model {name!r} made a {kind}, but a torch.nn.Module is needed.")
    check_plain(model, name)
    return model


def _factory(name: str) -> Callable[..., Any]:
    """Return what builds the network; dots after the colon are attributes of attributes."""
    if name in MODELS:
        return MODELS[name]
    path, colon, rest = name.partition(":")
    if not colon:
        known = _or(*MODELS, "timm:NAME", "hf:NAME", "package.module:factory")
        raise FlatlensError(f"Unknown model {name!r}; use {known}.")
    if path == "timm":
        return partial(timm_models.create, rest)
    if path == "hf":
        return partial(hf_models.create, rest)
    try:
        target: Any = importlib.import_module(path)
        for attribute in rest.split("."):
            target = getattr(target, attribute)
    except Exception as error:  # the module is anyone's code and may raise anything
        raise FlatlensError(_described(f"Cannot import model {name!r}", error)) from error
    if isinstance(target, nn.Module):
        return lambda: copy.deepcopy(target)  # the next run in this process must get it untrained
    if not callable(target):
        raise FlatlensError(
            f"Model {name!r} is not callable; name a function, a class or a torch.nn.Module."
        )
    factory: Callable[..., Any] = target
    return factory


def _described(failed: str, error: Exception) -> str:
    """Describe what failed, the exception, and the last line of the user's file in its trace."""
    words = [failed, type(error).__name__, textwrap.shorten(str(error), LONGEST)]
    reason = ": ".join(filter(None, words)).rstrip(".")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{reason}{where}."


def _refuse_too_large(
    name: str, factory: Callable[..., nn.Module], options: dict[str, Any]
) -> None:
    """Count the parameters of one of our networks without memory for them."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = factory(**options)
        count = sum(p.numel() for p in model.parameters())
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        count = 2**63 - 1  # more than torch can count
    # weights, their gradients, and one more copy of a checkpoint or an optimiser, in float32
    refuse_beyond_memory(12 * count, f"The model {name} with these options")


def _he_fan_out(net: nn.Sequential) -> nn.Sequential:
    """Convolutions N(0, 2 / (k^2 C_out)) (He et al., 2015, fan-out form), their biases zero."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            _zero_bias(module)
    return net


def _zero_bias(module: nn.Conv2d | nn.Linear) -> None:
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def _or(*names: str) -> str:
    """'a, b or c'"""
    return f"{', '.join(names[:-1])} or {names[-1]}"
