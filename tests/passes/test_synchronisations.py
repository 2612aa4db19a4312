"""What a measurement asks of an accelerator: launches, and where the host waits, without one.

`can_look` is switched off, so that the code takes the way it takes on a device. A factorisation
waits for its error code on most devices; one look at its result beside it costs no further wait.
"""

import functools
import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.algebra import looks
from flatlens.passes import derivative_rows
from flatlens.training import networks

FOLDER = Path(__file__).parents[2] / "benchmarks"
if not FOLDER.exists():
    pytest.skip("benchmarks are not part of the package", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

from launches import Counter  # noqa: E402

pytestmark = pytest.mark.slow

CHUNK = 4  # samples


def small_mlp(outputs: int) -> tuple[nn.Module, torch.Tensor]:
    return networks.mlp((6, 5, 5, outputs)), torch.randn(2 * CHUNK, 6)


def small_lenet(outputs: int) -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs),
    )  # fmt: skip
    return net, torch.randn(2 * CHUNK, 1, 14, 14)


def transformer(outputs: int) -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    net = nn.Sequential(
        nn.Unflatten(1, (4, 8)), nn.Linear(8, 8), layer, nn.Flatten(), nn.Linear(32, outputs)
    )
    return net, torch.randn(2 * CHUNK, 32)


def resnet(outputs: int) -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        networks.BasicBlock(4, 8, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs),
    )  # fmt: skip
    return net, torch.randn(2 * CHUNK, 3, 8, 8)


def vit(outputs: int) -> tuple[nn.Module, torch.Tensor]:
    net = networks.vit(image=8, patch=4, dim=12, depth=1, classes=outputs)
    return net, torch.randn(2 * CHUNK, 3, 8, 8)


NETWORKS = {"mlp": small_mlp, "lenet": small_lenet, "transformer": transformer}
PAPER = {
    "the paper's mlp": lambda _: (networks.mlp(), torch.randn(2 * CHUNK, 784)),
    "the paper's lenet": lambda _: (networks.lenet(), torch.randn(2 * CHUNK, 3, 32, 32)),
    "the paper's vgg": lambda _: (networks.vgg(), torch.randn(2 * CHUNK, 3, 32, 32)),
}
ALL = {**NETWORKS, **PAPER, "resnet": resnet, "vit": vit}
STRATEGIES = {
    "exact": {"method": "exact"},
    "sketch": {"method": "sketch", "directions": 2},
    "headline": {"quantities": "headline"},
    "sharpness only": {"quantities": "sharpness"},
}
every_network = pytest.mark.parametrize("network", NETWORKS)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@functools.cache
def count(
    network: str, strategy: str, chunks: int, outputs: int = 3, inside: bool = True
) -> Counter:
    torch.manual_seed(0)
    net, x = ALL[network](outputs)
    loop = inspect.unwrap(derivative_rows.collect).__code__ if inside else None
    with Counter(loop) as counter:
        fl.measure(net, x[: chunks * CHUNK], chunk=CHUNK, **STRATEGIES[strategy])
    return counter


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(looks, "can_look", lambda t: False)


@every_strategy
@every_network
def test_the_host_never_waits_inside_the_loop_of_products(network, strategy):
    counter = count(network, strategy, 2)
    assert counter.inside_launches > 0
    assert not counter.inside_waits


# These looks stand beside a factorisation.
BESIDE = ("algebra/spectra.py", "patch_rank", "top_singular", "_small_values")
ON_THE_HOST = ("algebra/scaling.py",)  # Eq. 36 is minimised after the pass, on arrays of NumPy


def waits_of_a_chunk(network: str, strategy: str, outputs: int) -> dict[str, int]:
    """Waits of one chunk by line, without those beside a factorisation."""
    few, more = (count(network, strategy, chunks, outputs, False).waits for chunks in (1, 2))
    each = {f"{name} in {line}": more[name, line] - few[name, line] for name, line in more}
    left_out = BESIDE + ON_THE_HOST
    return {what: n for what, n in each.items() if n and not any(b in what for b in left_out)}


@every_strategy
@pytest.mark.parametrize("network", ALL)
def test_the_host_waits_once_for_a_chunk(network, strategy):
    waits = waits_of_a_chunk(network, strategy, 3)
    assert sum(waits.values()) == 1, waits


@pytest.mark.parametrize("strategy", ["exact", "sharpness only"])
def test_a_head_narrower_than_the_outputs_adds_no_wait(strategy):
    waits = waits_of_a_chunk("mlp", strategy, 9)
    assert sum(waits.values()) == 1, waits


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
