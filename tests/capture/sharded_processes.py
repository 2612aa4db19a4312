"""Measure sharded networks: a process of several, started by ``test_sharded.py``.

Usage: python sharded_processes.py RANK WORLD_SIZE PORT FILE
"""

import datetime
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import flatlens as fl

QUANTITIES = ("sharpness", "mls", "nmls", "log_volume", "local_dimension", "adaptive_sharpness")


class Tied(nn.Module):
    """Layers of several kinds, one of them used twice, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU())
        self.shared = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.shared.weight
        self.head = nn.Linear(5, 3)
        self.head.bias.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.shared(self.first(x)).tanh()).tanh())


class Perceptron(nn.Module):
    """Two layers, which tensor parallelism splits by columns and by rows."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.width = nn.Linear(6, 8), nn.Linear(8, 3), width
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        return self.down(h if self.width is None else h.reshape(len(x), self.width))


def samples() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def targets() -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def plain(model: nn.Module) -> nn.Module:
    return model


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.head):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def after_a_forward_pass(model: nn.Module) -> nn.Module:
    """The root keeps its gathered parameters after a forward pass."""
    with torch.no_grad():
        sharded(model)(samples())
    return model


def mixed(model: nn.Module) -> nn.Module:
    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def all_trainable(model: nn.Module) -> nn.Module:
    model.head.bias.requires_grad_()  # frozen and trainable do not mix in one flat parameter
    return model


def flat(model: nn.Module, use_orig_params: bool = False) -> nn.Module:
    all_trainable(model)
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    model.first = FullyShardedDataParallel(model.first, **options)
    return FullyShardedDataParallel(model, **options)


def parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def numbers(model: nn.Module, **options: Any) -> dict[str, Any]:
    m = fl.measure(model, samples(), **options)
    return {
        "values": {name: m[name] for name in QUANTITIES if name in m},
        "coverage": {name.removeprefix("module."): path for name, path in m.coverage.items()},
        "notes": list(m.probe.notes),
    }


def trained_after(model: nn.Module, measured: bool) -> dict[str, Any]:
    """Losses of two steps of training, with and without a measurement before each."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        if measured:
            fl.measure(model, samples())
        loss = (model(samples()) - targets()).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss))
    return {"values": dict(enumerate(losses))}


def shares(model: nn.Module) -> dict[str, Any]:
    """Each process measures its own samples."""
    rank, size = dist.get_rank(), dist.get_world_size()
    m = fl.measure(model, samples()[rank::size], distributed=True)
    return {"values": {"sharpness": m["sharpness"], "nmls": m["nmls"]}}


def trace(model: nn.Module) -> dict[str, Any]:
    m = fl.measure(model, samples(), targets(), quantities=["hessian_trace"])
    return {"values": {"hessian_trace": m["hessian_trace"]}}


def refusal(model: nn.Module, call: Callable[[nn.Module], Any]) -> dict[str, Any]:
    try:
        call(model)
    except fl.FlatlensError as error:
        return {"message": str(error)}
    return {"message": ""}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: numbers(plain(Tied())),
    "fully_shard": lambda: numbers(sharded(Tied())),
    "fully_shard after a forward pass": lambda: numbers(after_a_forward_pass(Tied())),
    "fully_shard with mixed precision": lambda: numbers(mixed(Tied())),
    "plain sketch": lambda: numbers(plain(Tied()), method="sketch", directions=2),
    "fully_shard sketch": lambda: numbers(sharded(Tied()), method="sketch", directions=2),
    "plain trace": lambda: trace(plain(Tied())),
    "fully_shard trace": lambda: trace(sharded(Tied())),
    "plain shares": lambda: shares(plain(Tied())),
    "fully_shard shares": lambda: shares(sharded(Tied())),
    "plain training": lambda: trained_after(plain(Tied()), False),
    "fully_shard training": lambda: trained_after(sharded(Tied()), True),
    "plain all trainable": lambda: numbers(all_trainable(Tied())),
    "plain all trainable training": lambda: trained_after(all_trainable(Tied()), False),
    "flat training": lambda: trained_after(flat(Tied()), True),
    "flat": lambda: numbers(flat(Tied())),
    "flat with original parameters": lambda: numbers(flat(Tied(), use_orig_params=True)),
    "plain perceptron": lambda: numbers(plain(Perceptron())),
    "tensor parallel": lambda: numbers(parallel(Perceptron())),
    "tensor parallel trace": lambda: refusal(parallel(Perceptron()), trace),
    "counts on a part": lambda: refusal(parallel(Perceptron(width=4)), numbers),
}


def main(rank: int, world_size: int, port: int, file: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {name: case() for name, case in CASES.items()}
    dist.destroy_process_group()
    with open(file, "w") as out:
        json.dump(results, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
