"""Half-precision networks: widened layer by layer, they give the numbers of a float32 copy."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import flatlens as fl
from flatlens import tuning
from flatlens.algebra.wide_tensor import WideTensor


class Tied(nn.Module):
    """A table that is the head's weight as well, and a buffer in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(self.table(ids)).mean(1), self.table.weight)


class Constrained(nn.Linear):
    """Writes to its weight in every forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Frozen(nn.Sequential):
    """Its first weight is frozen."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self[0].weight.requires_grad_(False)


NETWORKS = {
    "dense": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)),
    "wide head": lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 70)),
    "frozen": Frozen,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 3)),
    "recurrent": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.GRU(3, 3, batch_first=True), Taken()
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten()
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Flatten()
    ),
    "tokens": Tied,
    "written to": lambda: Constrained(6, 3),
}


class Taken(nn.Module):
    def forward(self, results: tuple[Tensor, Tensor]) -> Tensor:
        return results[0].flatten(1)


def samples(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "tokens":
        return torch.randint(0, 11, (3, 4), generator=generator)
    return torch.randn(3, 6, generator=generator)


def values(m: fl.Measurement) -> dict[str, float]:
    return {name: value for name, value in m.to_dict().items() if isinstance(value, float)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("method", ["exact", "sketch"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_widened_network_gives_the_numbers_of_a_float32_copy(name, method, monkeypatch):
    dtype = torch.bfloat16 if method == "exact" else torch.float16
    torch.manual_seed(0)
    model = NETWORKS[name]().to(dtype).eval()
    state = copy.deepcopy(model.state_dict())
    options = {"method": method, "directions": 2}
    copied = fl.measure(model, samples(name), **options)
    monkeypatch.setattr(tuning, "LARGEST_COPIED_BYTES", 0)
    m = fl.measure(model, samples(name), **options)
    assert values(m) == pytest.approx(values(copied), rel=1e-6, nan_ok=True)
    assert m.coverage == copied.coverage
    wanted = "float32 copy" if name == "written to" else "layer by layer"
    assert any(wanted in note for note in m.probe.notes)
    for key, value in model.state_dict().items():
        assert value.dtype == dtype or not value.is_floating_point()
        assert torch.equal(value, state[key])
        assert not isinstance(value, WideTensor)


def test_small_derivatives_of_a_half_precision_network_are_measured_in_float64(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(1))
    with torch.no_grad():
        model[0].weight.mul_(100)
    monkeypatch.setattr(tuning, "LARGEST_COPIED_BYTES", 0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    m = fl.measure(model.bfloat16(), x)
    wide = fl.measure(copy.deepcopy(model).double(), x.double())
    assert m["sharpness"] == pytest.approx(wide["sharpness"], rel=1e-10)
    assert any("float64 copy" in note for note in m.probe.notes)


def test_a_refusal_of_a_widened_network_is_given_once(monkeypatch):
    monkeypatch.setattr(tuning, "LARGEST_COPIED_BYTES", 0)
    with pytest.raises(fl.FlatlensError, match="sample 0 is not finite"):
        fl.measure(nn.Linear(3, 2).bfloat16(), torch.full((2, 3), float("nan")))


def test_results_of_large_wide_tensors_have_memory_of_their_own():
    torch.manual_seed(0)
    first, second = (torch.randn(300, 300).bfloat16() for _ in range(2))
    results = [op(WideTensor(t)) for t in (first, second) for op in OPERATIONS.values()]
    wanted = [op(t.float()) for t in (first, second) for op in OPERATIONS.values()]
    for got, right in zip(results, wanted, strict=True):
        assert torch.equal(got, right)


OPERATIONS = {
    "contiguous transpose": lambda t: t.t().contiguous(),
    "view as strided": lambda t: torch.as_strided(t, (300, 2), (300, 1)) + 0,
    "product with itself": lambda t: t @ t.t(),
    "sliced": lambda t: t[:, 1:].sum(0),
    "expanded": lambda t: t[0].expand(300, 300) * 2,
    "copied": lambda t: t.to(torch.float32, copy=True),
    "reshaped": lambda t: t.reshape(-1).flip(0),
    "diagonal": lambda t: torch.diagonal(t) + 0,
}


PEAK = """
import resource, sys, torch
from torch import nn
import flatlens as fl
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
layers = [nn.Linear(1024, 1024, bias=False) for _ in range(48)]
torch.set_default_dtype(torch.float32)
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x[:, :2]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
fl.measure(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4), quantities=["sharpness"])
before = peak()
m = fl.measure(Deep(), torch.randn(2, 1024), quantities=["sharpness"])
assert any("layer by layer" in note for note in m.probe.notes), m.probe.notes
print((peak() - before) / sum(layer.weight.nbytes for layer in layers))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts in kilobytes on Linux only")
def test_the_peak_of_a_large_half_precision_network_is_far_below_a_copy():
    source = str(Path(fl.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PEAK]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    # Of the model. A float32 copy takes 2, and the copy that protects it 2 more. Buffers and code
    # that is loaded late take about 50 MB of any network: half of this one.
    assert float(done.stdout) < 1


def test_a_wide_tensor_has_no_float32_memory():
    narrow = torch.randn(4, 3).bfloat16()
    wide = WideTensor(narrow)
    assert wide.dtype == torch.float32
    assert wide.t().half_values.data_ptr() == narrow.data_ptr()
    assert torch.equal(wide @ torch.eye(3), narrow.float())
    assert torch.equal(wide[1:, 0] + 0, narrow[1:, 0].float())
    with pytest.raises(RuntimeError, match="writes"):
        wide.add_(1)
