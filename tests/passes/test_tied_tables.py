"""Tied embeddings take the fast path, with all samples together and the same numbers."""

import pytest
import torch
from torch import Tensor, nn

import flatlens as fl


class Tied(nn.Module):
    """Words, positions, a layer with a skip, and logits from the same table."""

    def __init__(self, padding: int | None = None, last_only: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6, padding_idx=padding)
        self.positions = nn.Embedding(5, 6)
        self.layer = nn.Linear(6, 6)
        self.last_only = last_only
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids) + self.positions(torch.arange(ids.shape[1]))
        h = h + self.layer(h).tanh()
        logits = nn.functional.linear(h[:, -1] if self.last_only else h, self.table.weight)
        return logits.flatten(1)


class Cancelling(nn.Module):
    """f = w_0 . w_1 - w_0 . w_1 (1 + tiny) in part: the uses of the table nearly cancel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(3, 4)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        words = self.table(ids)  # [b, 2, 4]
        through_layer = nn.functional.linear(words.detach()[:, 0], self.table.weight)
        looked_up = (words[:, 1:] * words.detach()[:, :1]).sum(2)
        return through_layer.gather(1, ids[:, 1:]) - (1 + 1e-7) * looked_up


def ids(low: int = 0, high: int = 11, length: int = 5) -> Tensor:
    return torch.randint(low, high, (3, length), generator=torch.Generator().manual_seed(1))


def exact_sharpness(model: nn.Module, x: Tensor) -> float:
    """Mean over samples of the squared gradient of all outputs by all parameters."""
    total = 0.0
    for sample in x:
        for output in model(sample[None])[0]:
            grads = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
            total += sum(float(g.square().sum()) for g in grads)
    return total / len(x)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("last_only", [True, False])
@pytest.mark.parametrize("quantities", ["default", ["sharpness"]])
def test_a_tied_table_is_measured_with_all_samples_together(padding, last_only, quantities):
    model = Tied(padding, last_only)
    m = fl.measure(model, ids(), quantities=quantities)
    assert m["sharpness"] == pytest.approx(exact_sharpness(model, ids()), rel=1e-10)
    assert m.coverage["table.weight"] == "rule"
    assert not any("one at a time" in note for note in m.probe.notes)


def test_chunks_and_samples_alone_give_the_same_columns():
    together, alone = (fl.measure(Tied(), ids(), chunk=chunk) for chunk in (3, 1))
    for name in ("sharpness", "adaptive_sharpness", "mls", "nmls", "sharpness_untied"):
        assert together[name] == pytest.approx(alone[name], rel=1e-10)


def test_uses_that_cancel_keep_their_digits():
    model, x = Cancelling(), torch.tensor([[0, 1], [2, 0], [1, 2]])
    m = fl.measure(model, x, quantities=["sharpness"])
    assert m.coverage["table.weight"] == "rule"
    assert m["sharpness"] == pytest.approx(exact_sharpness(model, x), rel=1e-6)


def test_a_sketch_of_a_tied_table_agrees_with_the_exact_number():
    exact = fl.measure(Tied(last_only=False), ids(), method="exact")
    sketch = fl.measure(Tied(last_only=False), ids(), method="sketch", directions=40)
    error = abs(sketch["sharpness"] - exact["sharpness"])
    assert error < 4 * sketch["sharpness_se"]


def test_the_spectrum_of_a_tied_table_has_the_trace_of_the_sharpness():
    spectrum = fl.spectrum(Tied(), ids())
    assert spectrum.trace == pytest.approx(exact_sharpness(Tied(), ids()), rel=1e-10)
