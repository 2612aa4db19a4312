"""The support table of docs/quality/limits.md: what happens to wrapped and converted networks."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import flatlens as fl
from flatlens.compat import make_torchvision_importable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # torch's own: old APIs, FSDP on a processor


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def samples() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def one_process() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Inside(nn.Module):
    """A network whose forward runs its first half by `run`."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.net = network()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.run(self.net[:2], x))


def with_autocast(part: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return part(x)


def same_as_plain(model: nn.Module, verdict: str = "theorem") -> None:
    m, plain = fl.measure(model, samples()), fl.measure(network(), samples())
    assert m["sharpness"] == pytest.approx(plain["sharpness"], rel=1e-5)
    assert m["nmls"] == pytest.approx(plain["nmls"], rel=1e-5)
    assert m["eq12"].verdict == verdict


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.optim.swa_utils.AveragedModel,
        torch.fx.symbolic_trace,
        lambda net: torch.compile(net, backend="eager"),
    ],
    ids=["data_parallel", "averaged", "fx", "compiled"],
)
def test_wrappers_change_nothing(wrap):
    same_as_plain(wrap(network()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant):
    same_as_plain(Inside(lambda part, x: checkpoint(part, x, use_reentrant=reentrant)))


def test_distributed_data_parallel_changes_nothing(one_process):
    same_as_plain(nn.parallel.DistributedDataParallel(network()))


def test_fully_sharded_data_parallel_changes_nothing(one_process):
    from torch.distributed.fsdp import FullyShardedDataParallel

    same_as_plain(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))


def test_fully_shard_changes_nothing(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    same_as_plain(model)


def squared_gradients(model: nn.Module, x: Tensor) -> float:
    """Mean over samples of the squared gradient of all outputs by all trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = 0.0
    for sample in x:
        outputs = model(sample[None])[0]
        for output in outputs:
            grads = torch.autograd.grad(output, parameters, retain_graph=True)
            total += sum(float((g**2).sum()) for g in grads)
    return total / len(x)


def test_adapters_of_peft_count_and_frozen_weights_do_not():
    make_torchvision_importable()  # peft imports transformers, and that torchvision
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(network().double(), config).double()
    m = fl.measure(model, samples().double())
    assert m["sharpness"] == pytest.approx(squared_gradients(model, samples().double()), rel=1e-10)
    assert m.coverage["base_model.model.0.base_layer.weight"] == "frozen"
    assert m["eq12"].verdict == "observation"
    assert m.coverage["base_model.model.0.lora_A.default.weight"] == "layer"
    assert fl.bounds(m.probe)  # the inequalities are those of the adapted network


def test_the_layers_of_a_scripted_submodule_count_in_the_sharpness_alone():
    model = network()
    m = fl.measure(nn.Sequential(torch.jit.script(model[:2]), model[2]), samples())
    plain = fl.measure(network(), samples())
    assert m["sharpness"] == pytest.approx(plain["sharpness"], rel=1e-5)
    assert m["nmls"] == pytest.approx(plain.layers["mls"].iloc[-1], rel=1e-5)
    assert m.coverage["0.0.weight"] == "slow"
    assert "0.0.weight" in m.unmeasured
    assert m["eq12"].verdict == "observation"


def test_autocast_around_a_measurement_changes_nothing():
    plain = fl.measure(network(), samples())["sharpness"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fl.measure(network(), samples())["sharpness"] == plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_on_a_copy(dtype):
    m = fl.measure(network().to(dtype), samples().to(dtype))
    plain = fl.measure(network(), samples())["sharpness"]
    assert m["sharpness"] == pytest.approx(plain, rel=0.02)
    assert any("float32 copy" in note for note in m.probe.notes)


class Attention(nn.Module):
    """Attention by torch's own function, with one of its kernels."""

    def __init__(self, kernel: SDPBackend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.out, self.kernel = nn.Linear(8, 24), nn.Linear(16, 3), kernel

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x.unflatten(1, (2, 8))).chunk(3, -1)
        with sdpa_kernel(self.kernel):
            mixed = F.scaled_dot_product_attention(*(t.unsqueeze(1) for t in (q, k, v)))
        return self.out(mixed.flatten(1))


def test_the_kernel_of_attention_changes_nothing():
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    kernels = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
    plain, flash = (fl.measure(Attention(kernel), x, method="exact") for kernel in kernels)
    for name in ("sharpness", "mls", "nmls"):
        assert flash[name] == pytest.approx(plain[name], rel=1e-4)


def test_a_sketch_of_a_network_that_insists_on_a_fused_kernel_is_measured():
    model, x = Attention(SDPBackend.FLASH_ATTENTION), torch.randn(3, 16)
    m = fl.measure(model, x, method="sketch", directions=2)
    assert m["mls"] == pytest.approx(fl.measure(model, x, method="exact")["mls"], rel=1e-2)
    assert m["mls_se"] > 0
    assert any("products of Lanczos by differences" in note for note in m.probe.notes)


def test_a_pruned_weight_is_computed():
    model = network()
    prune.l1_unstructured(model[0], "weight", 0.5)
    m = fl.measure(model, samples())
    assert m["eq12"].verdict == "observation"
    assert m.coverage["0.weight_orig"] == "slow"


REFUSED = {
    "autocast inside": lambda: Inside(with_autocast),
    "dynamic quantisation": lambda: torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(name):
    with pytest.raises(fl.FlatlensError):
        fl.measure(REFUSED[name](), samples())


def sparse() -> nn.Module:
    model = network()
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse())
    return model


# What the table calls "not supported": today an error of torch; a refusal in a sentence is as good.
UNSUPPORTED = {
    "sparse weight": sparse,
    "exported": lambda: torch.export.export(network(), (samples(),)).module(),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_not_supported_and_never_a_wrong_number(name):
    model = UNSUPPORTED[name]()
    with pytest.raises((fl.FlatlensError, RuntimeError, AttributeError, AssertionError)):
        fl.measure(model, samples())


@pytest.mark.parametrize("way", ["scripted", "traced"])
def test_the_layers_of_a_scripted_network_are_named_as_unmeasured(way):
    model = network()
    hidden = torch.jit.script(model) if way == "scripted" else torch.jit.trace(model, samples())
    m = fl.measure(hidden, samples())
    assert m["sharpness"] == pytest.approx(fl.measure(model, samples())["sharpness"], rel=1e-5)
    assert "0.weight" in m.unmeasured
    assert {b.name for b in m.bounds if b.verdict == "theorem"} <= {"eq8"}


def test_a_sparse_input_is_not_supported():
    with pytest.raises((fl.FlatlensError, NotImplementedError, RuntimeError)):
        fl.measure(network(), samples().to_sparse())


def test_every_row_of_the_support_table_is_tested_or_untested():
    text = (Path(__file__).parents[1] / "docs" / "quality" / "limits.md").read_text()
    table = text.split("## Support table")[1].split("\n## ")[0]
    entries = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(entries) > 20
    for _, setting, state, *_ in entries:
        assert state.strip().startswith(("tested", "untested")), setting
