"""What a measurement asks of an accelerator: launches, and where the host waits, without one.

`can_look` is switched off, so that the code takes the way it takes on a device. A factorisation
waits for its error code on most devices; one look at its result beside it costs no further wait.
"""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.algebra import sums
from flatlens.passes import derivative_rows

FOLDER = Path(__file__).parents[2] / "benchmarks"
if not FOLDER.exists():
    pytest.skip("benchmarks are not part of the package", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

from launches import Counter  # noqa: E402

pytestmark = pytest.mark.slow

CHUNK = 4


def mlp(outputs: int) -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, outputs)
    )
    return net, torch.randn(4 * CHUNK, 6)


def lenet(outputs: int) -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs),
    )  # fmt: skip
    return net, torch.randn(4 * CHUNK, 1, 14, 14)


def vit(outputs: int) -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    net = nn.Sequential(
        nn.Unflatten(1, (4, 8)), nn.Linear(8, 8), layer, nn.Flatten(), nn.Linear(32, outputs)
    )
    return net, torch.randn(4 * CHUNK, 32)


NETWORKS = {"mlp": mlp, "lenet": lenet, "vit": vit}
STRATEGIES = {
    "exact": {"method": "exact"},
    "sketch": {"method": "sketch", "directions": 2},
    "sharpness only": {"quantities": "sharpness"},
}
every_network = pytest.mark.parametrize("network", NETWORKS)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def count(network: str, strategy: str, chunks: int, outputs: int = 3) -> Counter:
    torch.manual_seed(0)
    net, x = NETWORKS[network](outputs)
    with Counter(inspect.unwrap(derivative_rows.collect).__code__) as counter:
        fl.measure(net, x[: chunks * CHUNK], chunk=CHUNK, **STRATEGIES[strategy])
    return counter


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(sums, "can_look", lambda t: False)
    monkeypatch.setattr(derivative_rows, "can_look", lambda t: False)


@every_strategy
@every_network
def test_the_host_never_waits_inside_the_loop_of_products(network, strategy):
    counter = count(network, strategy, 2)
    assert counter.inside_launches > 0
    assert not counter.inside_waits


def waits_of_a_chunk(network: str, strategy: str, outputs: int) -> dict[str, float]:
    """Waits of one chunk by line, without those beside a factorisation."""
    few, more = (count(network, strategy, chunks, outputs).waits for chunks in (2, 4))
    each = {f"{name} in {line}": (more[name, line] - few[name, line]) / 2 for name, line in more}
    beside = ("algebra/spectra.py", "patch_rank")
    return {what: n for what, n in each.items() if n and not any(b in what for b in beside)}


# Checks that values are finite, that samples are independent, and that digits are not lost.
MOST_WAITS = 14


@pytest.mark.parametrize("strategy", ["exact", "sharpness only"])
@pytest.mark.parametrize(("network", "outputs"), [("mlp", 3), ("mlp", 9), ("lenet", 3), ("vit", 3)])
def test_waits_of_a_chunk_are_few_whatever_the_network(network, outputs, strategy):
    waits = waits_of_a_chunk(network, strategy, outputs)
    assert sum(waits.values()) <= MOST_WAITS, waits


@every_network
def test_launches_of_a_product_do_not_depend_on_the_number_of_products(network):
    few, many = (count(network, "exact", 1, outputs).inside_launches for outputs in (2, 4))
    assert many <= 2 * few


def test_every_way_to_wait_is_counted():
    t = torch.tensor([1.0, 0.0, 2.0])
    ways = [
        lambda: t[0].item(), lambda: bool(t.any()), lambda: float(t.sum()), lambda: t.nonzero(),
        lambda: t[t > 0], lambda: torch.equal(t, t + 1), lambda: t.tolist(), lambda: t.cpu(),
        lambda: t.to("cpu"), lambda: t.masked_select(t > 0), lambda: int(t[1]),
    ]  # fmt: skip
    for way in ways:
        with Counter() as counter:
            way()
        assert counter.synchronisations == 1


def test_work_is_counted_and_views_are_not():
    t = torch.ones(4, 3)
    with Counter() as counter:
        (t.mT @ t).view(9)[1:].sum()
    assert (counter.launches, counter.synchronisations) == (2, 0)
