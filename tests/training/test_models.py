"""The networks of the experiments: size, shape and initialisation are those of the runs."""

import math
import re
import sys

import pytest
import torch
from torch import nn

from flatlens.errors import FlatlensError
from flatlens.training import networks as models

COUNTS = {
    "mlp": 898_510,
    "lenet": 62_006,
    "vgg": 97_018,
    "vgg11": 9_750_922,
    "resnet18": 11_173_962,
    "vit": 2_693_578,
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def images(name: str, n: int = 2) -> torch.Tensor:
    return torch.rand(n, 1, 28, 28) if name == "mlp" else torch.rand(n, 3, 32, 32)


@pytest.mark.parametrize("name", models.MODELS)
def test_parameter_count(name):
    assert sum(p.numel() for p in models.build(name).parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", models.MODELS)
def test_ten_finite_outputs_per_image(name):
    out = models.build(name).eval()(images(name))
    assert out.shape == (2, 10)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", models.MODELS)
def test_same_seed_same_network(name):
    torch.manual_seed(7)
    first = models.build(name)
    torch.manual_seed(7)
    second = models.build(name)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "vit"])
def test_classes(name):
    out = models.build(name, classes=3).eval()(images(name))
    assert out.shape == (2, 3)


def about_normal(weight: torch.Tensor, std: float) -> None:
    """Mean and standard deviation within five standard errors of those of N(0, std^2)."""
    n = weight.numel()
    assert abs(weight.mean().item()) < 5 * std / math.sqrt(n)
    assert abs(weight.std().item() / std - 1) < 5 / math.sqrt(2 * n)


def is_uniform(weight: torch.Tensor, end: float) -> None:
    """Fills [-end, end] and has the standard deviation end / sqrt(3) of the uniform law."""
    assert 0.98 * end < weight.abs().max() <= end
    assert abs(weight.std().item() / (end / math.sqrt(3)) - 1) < 5 / math.sqrt(weight.numel())


def layers(net: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in net.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("name", ["vgg", "vgg11", "resnet18"])
def test_conv_init_is_normal_with_variance_2_over_k2_c_out(name):
    for conv in layers(models.build(name), nn.Conv2d):
        k2 = conv.kernel_size[0] * conv.kernel_size[1]
        about_normal(conv.weight, math.sqrt(2 / (k2 * conv.out_channels)))
        assert conv.bias is None or not conv.bias.any()


@pytest.mark.parametrize("name", ["mlp", "vgg", "vgg11", "resnet18"])
def test_linear_init_is_torchs_own(name):
    for linear in layers(models.build(name), nn.Linear):
        is_uniform(linear.weight, 1 / math.sqrt(linear.in_features))
        assert linear.bias.abs().max() <= 1 / math.sqrt(linear.in_features)
        assert linear.bias.any()


def test_lenet_init_is_xavier_normal_with_zero_bias():
    net = models.lenet()
    for module in layers(net, nn.Conv2d) + layers(net, nn.Linear):
        area = module.weight[0, 0].numel()  # kernel entries; 1 for a linear layer
        fans = area * (module.weight.shape[0] + module.weight.shape[1])
        about_normal(module.weight, math.sqrt(2 / fans))
        assert not module.bias.any()


def test_vit_init_is_normal_0_02_with_zero_bias():
    net = models.vit()
    for module in layers(net, nn.Conv2d) + layers(net, nn.Linear):
        about_normal(module.weight, 0.02)
        assert not module.bias.any()
    about_normal(net.cls_token, 0.02)
    about_normal(net.positions, 0.02)


def test_norm_layers_start_as_the_identity():
    for name, kind in (("resnet18", nn.BatchNorm2d), ("vit", nn.LayerNorm)):
        for module in layers(models.build(name), kind):
            assert (module.weight == 1).all()
            assert not module.bias.any()


def test_vgg_pads_by_two_and_keeps_256_features():
    net = models.vgg()
    assert [conv.out_channels for conv in layers(net, nn.Conv2d)] == [16, 16, 32, 64, 64]
    assert {conv.padding for conv in layers(net, nn.Conv2d)} == {(2, 2)}
    assert not layers(net, nn.BatchNorm2d)
    head = next(i for i, module in enumerate(net) if isinstance(module, nn.Flatten))
    assert net[: head + 1](images("vgg")).shape == (2, 256)


def test_vgg11_has_eleven_weight_layers():
    net = models.vgg11()
    assert len(layers(net, nn.Conv2d)) == 8
    assert len(layers(net, nn.Linear)) == 3


def test_attention_is_torchs_own():
    """`Attention` equals `nn.MultiheadAttention` with the same weights."""
    ours = models.Attention(12, 3).double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = ours.qkv.weight.data, ours.qkv.bias.data
    theirs.out_proj.load_state_dict(ours.proj.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", models.ACTIVATIONS)
def test_mlp_activation_stands_between_the_layers_only(activation):
    net = models.mlp((4, 3, 3, 2), activation)
    kinds = [type(module) for module in net]
    act = models.ACTIVATIONS[activation]
    assert kinds == [nn.Flatten, nn.Linear, act, nn.Linear, act, nn.Linear]


def test_build_finds_a_factory_in_a_module(tmp_path, monkeypatch):
    code = "from torch import nn\n\ndef factory(width=2):\n    return nn.Linear(3, width)\n"
    (tmp_path / "somebodys_net.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert models.build("somebodys_net:factory", width=5).out_features == 5


NETS = """
from torch import nn

net = nn.Linear(3, 2)
number = 3

def raises():
    return helper(2)

def helper(width):
    return nn.Linear(-1, width)

def empty():
    raise ValueError

def long():
    raise ValueError("no\\nweights. " + 500 * "word ")

def disk():
    raise OSError("disk trouble")
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A user's module, and one that cannot be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (("nets", NETS), ("broken", "from torch import nn\nnet = nn.Linear(-1, 2)")):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(code)
    return tmp_path


def test_a_module_itself_is_copied_with_its_weights(nets):
    first, second = models.build("nets:net"), models.build("nets:net")
    nn.init.zeros_(first.weight)  # as by a training
    original = sys.modules["nets"].net
    assert second is not original
    assert torch.equal(second.weight, original.weight)
    with pytest.raises(FlatlensError, match="unexpected keyword argument 'width'"):
        models.build("nets:net", width=5)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nets:raises", r"Cannot build model 'nets:raises': RuntimeError: .*negative.*line 11\)\."),
        ("nets:empty", r"ValueError \(.*nets.py, line 14\)\."),
        ("nets:long", r"ValueError: no weights\. word .*word \[\.\.\.\] \(.*nets.py, line 17\)\."),
        ("nets:disk", r"OSError: disk trouble \(.*nets.py, line 20\)\."),
    ],
)
def test_what_a_factory_raises_is_reported_in_one_sentence(nets, name, told):
    with pytest.raises((RuntimeError, ValueError, OSError)) as caught:
        models.build(name)
    assert not isinstance(caught.value, FlatlensError)  # a sweep tries such a run again
    assert re.search(f"{told}$", caught.value.sentence)
    assert "\n" not in caught.value.sentence
    assert len(caught.value.sentence) < 400 + len(str(nets))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nets:number", r"'nets:number' is not callable; name a function, a class or a torch.*"),
        ("broken:net", r"Cannot import model 'broken:net': RuntimeError: .*broken.py, line 2\)\."),
    ],
)
def test_what_is_no_model_is_refused(nets, name, told):
    with pytest.raises(FlatlensError, match=f"{told}$"):
        models.build(name)


def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(models.timm_models, "make_torchvision_importable", lambda: None)
    with pytest.raises(FlatlensError, match=r"need pip install 'flatlens\[zoo\]'\.$"):
        models.build("timm:test_vit")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "alexnet",
            {},
            "Unknown model 'alexnet'; use mlp, .*, hf:NAME or package.module:",
        ),
        ("", {}, "Unknown model"),
        ("no_such_module:net", {}, "No module named 'no_such_module'"),
        ("torch.nn:NoSuchNet", {}, "has no attribute 'NoSuchNet'"),
        (":net", {}, "Cannot import model"),
        ("torch.nn:functional", {}, "not callable"),
        ("builtins:dict", {}, "cannot take these options|made a dict"),
        ("lenet", {"classes": 3}, "unexpected keyword argument 'classes'"),
        ("torch.nn:Linear", {"in_features": 3}, "missing a required argument: 'out_features'"),
        ("mlp", {"activation": "swish"}, "Unknown activation 'swish'; use relu"),
        ("mlp", {"widths": (3,)}, "at least input and output width"),
        ("vit", {"patch": 5}, "to divide"),
    ],
)
def test_build_refuses_in_one_sentence(name, options, message):
    with pytest.raises(FlatlensError, match=message) as caught:
        models.build(name, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
