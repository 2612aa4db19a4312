"""Networks that accelerate offloads give the numbers of the same networks in memory."""

import pytest
import torch
from torch import Tensor, nn

import flatlens as fl

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of accelerate's imports


class Network(nn.Module):
    """A table that is also the head, layers of other kinds, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.body[0].bias.requires_grad_(False)
        self.double().eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids).mean(1)).tanh())


def ids() -> Tensor:
    return torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", ["memory", "buffers", "disk", "map"])
def test_offloaded_parameters_are_loaded_for_the_measurement(way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, in_memory = Network(), Network()
    if way == "disk":  # accelerate forgets here that two modules share a parameter
        in_memory.head.weight = nn.Parameter(in_memory.table.weight.detach().clone())
    plain = fl.measure(in_memory, ids())
    if way == "disk":
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    elif way == "map":
        places = {"table": "cpu", "head": "cpu", "body": "disk"}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
    else:
        device = torch.device("cpu")
        accelerate.cpu_offload(model, execution_device=device, offload_buffers=way == "buffers")
    before = {name: p.is_meta for name, p in model.named_parameters()}
    assert any(before.values())
    outputs = model(ids())

    m = fl.measure(model, ids())
    for name in ("sharpness", "mls", "nmls", "adaptive_sharpness"):
        assert m[name] == pytest.approx(plain[name], rel=1e-10)
    assert m.coverage == plain.coverage
    assert any("offloaded" in note for note in m.probe.notes)
    assert {name: p.is_meta for name, p in model.named_parameters()} == before
    assert torch.equal(model(ids()), outputs)
