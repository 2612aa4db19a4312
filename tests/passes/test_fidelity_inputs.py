"""What is an input is decided by type and dependence, not by its name."""

import pytest
import torch
from torch import nn

import flatlens as fl

torch.manual_seed(0)
A, B = torch.randn(3, 4).double(), torch.randn(3, 4).double()


class Two(nn.Module):
    """Two arguments side by side in one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.out = nn.Linear(8, 5).double(), nn.Linear(5, 2).double()

    def forward(self, image, masked_image):
        return self.out(torch.tanh(self.linear(torch.cat([image, masked_image], 1))))


class Named(Two):
    """The same by keywords of any name."""

    def forward(self, **arguments):
        return super().forward(*arguments.values())


def mls(net: nn.Module, *by: str, **x) -> float:
    """Mean largest singular value of df/dx for the arguments ``by``."""
    tops = []
    for i in range(3):
        leaves = {k: v[i : i + 1].clone().requires_grad_(k in by) for k, v in x.items()}
        f = net(**leaves).flatten()
        wanted = [leaves[k] for k in by]
        rows = [torch.autograd.grad(v, wanted, retain_graph=True) for v in f]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        tops.append(float(torch.linalg.svdvals(J)[0]))
    return sum(tops) / 3


@pytest.mark.parametrize("name", ["masked_image", "mask", "unmasked", "mask_features", "x2"])
def test_a_name_does_not_decide(name):
    p = fl.probe(Named(), {"image": A, name: B})
    assert (p.M, p.inputs, p.notes) == (8, ["image", name], [])
    want = mls(Named(), "image", name, **{"image": A, name: B})
    assert fl.mls(p) == pytest.approx(want, rel=1e-12)


def test_positional_arguments_are_listed_by_the_names_of_forward():
    assert fl.probe(Two(), (A, B)).inputs == ["image", "masked_image"]


def test_a_float_mask_of_zeros_and_ones_that_is_a_channel_is_an_input():
    p = fl.probe(Named(), {"image": A, "mask": (B > 0).double()})
    assert p.inputs == ["image", "mask"]


@pytest.mark.parametrize("chosen", [["masked_image"], ["image"], ["masked_image", "image"], [1]])
@pytest.mark.parametrize("by_name", [True, False])
def test_inputs_can_be_chosen(chosen, by_name):
    x = {"image": A, "masked_image": B} if by_name else (A, B)
    if by_name and chosen == [1]:
        with pytest.raises(fl.FlatlensError, match="the inputs are image, masked_image"):
            fl.probe(Two(), x, inputs=chosen)
        return
    p = fl.probe(Two(), x, inputs=chosen)
    names = ["masked_image"] if chosen == [1] else chosen
    assert sorted(p.inputs) == sorted(names)
    want = mls(Two(), *names, image=A, masked_image=B)
    assert fl.mls(p) == pytest.approx(want, rel=1e-12)


def test_a_sketch_takes_the_same_inputs():
    class Wide(Two):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(5, 60).double()

        def forward(self, image, masked_image):
            return super().forward(image, masked_image) ** 3

    p = fl.sketch(Wide(), (A, B), inputs=["masked_image"], directions=4, tolerance=1e-10)
    assert p.sketch is not None
    want = mls(Wide(), "masked_image", image=A, masked_image=B)
    assert (p.M, p.inputs) == (4, ["masked_image"])
    assert fl.mls(p) == pytest.approx(want, rel=1e-6)


def test_choices_that_cannot_be_met():
    class Ignores(Two):
        def forward(self, image, masked_image):
            return super().forward(image, masked_image.detach())

    for inputs, message in [
        (["masked_image"], "does not depend differentiably on the input 'masked_image'"),
        (["other"], "names 'other', but the inputs are image, masked_image"),
        ([], "names no input"),
        ("image", "is not a list"),
    ]:
        with pytest.raises(fl.FlatlensError, match=message):
            fl.probe(Ignores(), (A, B), inputs=inputs)


def test_an_argument_that_the_output_does_not_depend_on_is_no_input():
    class Compares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3).double()

        def forward(self, x, threshold):
            return self.linear(x) * (x[:, :1] > threshold)

    p = fl.probe(Compares(), (A[:, :2], torch.full((3, 2), -9.0).double()[:, :1]))
    assert (p.M, p.inputs) == (2, ["x"])
    assert p.input.singular.shape[1] == 2  # no zero that comes from the threshold


@pytest.mark.parametrize("chunk", [1, None])
def test_an_argument_that_some_samples_depend_on_is_refused(chunk):
    class Routed(Two):
        def forward(self, image, masked_image):
            used = masked_image if bool((image[:, 0] > 50).any()) else masked_image.detach()
            return super().forward(image, used)

    image = A.clone()
    image[2, 0] = 99
    with pytest.raises(fl.FlatlensError, match="depends on the input"):
        fl.probe(Routed(), {"image": image, "masked_image": B}, chunk=chunk)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x, attention_mask):
        scores = self.linear(x) @ x.mT + attention_mask[:, None]
        return (scores.softmax(-1) @ x).mean(1)


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float64).min, -1e4])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_additive_attention_mask_is_no_input(low, by_name):
    tokens = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1)).double()
    mask = torch.zeros(3, 5).double()
    mask[1, 3:] = low
    if by_name:
        p = fl.probe(Attention(), {"x": tokens, "attention_mask": mask})
        assert p.inputs == ["x"]
        assert "attention_mask is a mask and not differentiated" in p.notes[0]
    elif low < -1e38:  # zeros and infinities are a mask under any name
        assert fl.probe(Attention(), (tokens, mask)).inputs == ["x"]
    else:
        assert fl.probe(Attention(), (tokens, mask)).inputs == ["x", "attention_mask"]


def test_an_infinite_image_is_refused_and_no_mask():
    image = A.clone()
    image[1, 2] = torch.inf
    with pytest.raises(fl.FlatlensError, match="input of sample 1 is not finite"):
        fl.probe(Two(), (image, B))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(9, 4).double(), nn.Linear(4, 2).double()

    def forward(self, ids, features):
        return self.out(torch.tanh(self.table(ids).mean(1) + features))


def test_tokens_beside_floats_can_be_chosen():
    ids = torch.tensor([[1, 2], [3, 4], [5, 5]])
    net = Text()
    assert fl.probe(net, (ids, A)).inputs == ["features"]
    p = fl.probe(net, (ids, A), inputs=["ids"])
    assert (p.inputs, p.M) == (["ids"], 8)
    both = fl.probe(net, (ids, A), inputs=["ids", "features"])
    assert both.M == 12
    assert set(both.inputs) == {"ids", "features"}
    # f depends on the mean of two embeddings plus the features
    assert fl.mls(p) == pytest.approx(fl.mls(fl.probe(net, (ids, A))) / 2**0.5, rel=1e-12)


def test_tokens_are_the_input_where_floats_are_ignored():
    class Ignores(Text):
        def forward(self, ids, features):
            return super().forward(ids, features.detach())

    p = fl.probe(Ignores(), (torch.tensor([[1, 2], [3, 4], [5, 5]]), A))
    assert p.inputs == ["ids"]


def test_an_integer_mask_is_not_listed():
    class Masked(Text):
        def forward(self, ids, attention_mask):
            return self.out(torch.tanh((self.table(ids) * attention_mask[..., None]).mean(1)))

    ids = torch.tensor([[1, 2], [3, 4], [5, 5]])
    x = {"ids": ids, "attention_mask": torch.ones_like(ids)}
    assert fl.probe(Masked(), x).inputs == ["ids"]


def test_the_ascent_over_inputs_leaves_a_mask_alone():
    tokens = torch.randn(3, 5, 4).double()
    mask = torch.zeros(3, 5).double()
    mask[1, 3:] = -torch.inf
    estimate = fl.perturb.input_sensitivity_ascent(
        Attention(), {"x": tokens, "attention_mask": mask}, steps=2
    )
    assert estimate.value > 0
