"""precision="model": half-precision networks are measured in their own precision, and it shows."""

import copy
import itertools

import numpy as np
import pytest
import torch
from test_half_precision import NETWORKS, samples
from torch import Tensor, nn

import flatlens as fl
from flatlens.track import Tracker, every

# Inequalities between numbers that are all computed from the same rounded derivatives.
OF_ANY_NUMBERS = {"eq8", "eq48_bc", "eq48_cd"}
COMPARED = (
    *("sharpness", "mls", "nmls", "nmls_through", "sharpness_untied", "adaptive_sharpness"),
    *("matrix_normalized_sharpness", "weighted_nmls", "local_dimension", "normalized_mls"),
    *("input_invariant_mls", "max_sensitivity", "loss"),
)


def mlp(widths: tuple[int, ...] = (6, 16, 16, 4)) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [[nn.Linear(a, b), nn.Tanh()] for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1])


def tolerance(m: fl.Measurement) -> float:
    """What rounding at each layer leaves of a mean of squares, with room for unlucky signs."""
    return 4 * torch.finfo(m.probe.dtype).eps * (1 + len(m.probe.layers)) ** 0.5


def in_both(model: nn.Module, x: Tensor, **options) -> tuple[fl.Measurement, fl.Measurement]:
    own = fl.measure(model, x, precision="model", **options)
    return own, fl.measure(model, x, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_numbers_are_those_of_float32_up_to_rounding(name, dtype):
    torch.manual_seed(0)
    model = NETWORKS[name]().to(dtype).eval()
    state = copy.deepcopy(model.state_dict())
    own, wide = in_both(model, samples(name))
    assert own.probe.dtype == dtype
    assert wide.probe.dtype == torch.float32
    for quantity in COMPARED:
        if quantity in wide:
            assert own[quantity] == pytest.approx(wide[quantity], rel=tolerance(own)), quantity
    assert own.coverage == wide.coverage
    assert [q.name for q in own.probe.layers] == [q.name for q in wide.probe.layers]
    assert [q.reads_input for q in own.probe.layers] == [q.reads_input for q in wide.probe.layers]
    assert [q.is_output for q in own.probe.layers] == [q.is_output for q in wide.probe.layers]
    for mine, theirs in zip(own.probe.layers, wide.probe.layers, strict=True):
        computed = mine.weight is None or name == "written to"  # in the network's precision
        rel = torch.finfo(dtype).eps if computed else 1e-6
        assert mine.norm == pytest.approx(theirs.norm, rel=rel)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_mlp_in_half_precision(dtype):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    own, wide = in_both(mlp().to(dtype), x)
    for quantity in COMPARED:
        if quantity in wide:
            assert own[quantity] == pytest.approx(wide[quantity], rel=tolerance(own)), quantity
    assert own["sharpness"] != wide["sharpness"]


WIDE_OUTPUTS = {
    "dense": lambda: nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 50), nn.Tanh()),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 9, 2, padding=1), nn.Tanh(), nn.Flatten()
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (6, 1)), nn.Linear(1, 8),
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), nn.Flatten(),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WIDE_OUTPUTS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_sketch_has_the_numbers_of_a_float32_sketch_up_to_rounding(name, dtype):
    torch.manual_seed(0)
    model = WIDE_OUTPUTS[name]().to(dtype).eval()
    x = samples(name).to(dtype)  # the directions of a sample follow from its numbers
    own, wide = in_both(model, x, method="sketch", directions=8)
    assert own.probe.sketch is not None
    for quantity in ("sharpness", "sharpness_untied", "adaptive_sharpness", "mls", "nmls"):
        assert own[quantity] == pytest.approx(wide[quantity], rel=tolerance(own)), quantity


def test_squares_are_not_added_up_in_half_precision():
    net = nn.Linear(4099, 1, bias=False).bfloat16()  # 256 + 1 is 256 in bfloat16
    x = torch.ones(2, 4099, dtype=torch.bfloat16)
    for quantities in ("default", "headline", ["sharpness"]):
        m = fl.measure(net, x, precision="model", quantities=quantities)
        assert m["sharpness"] == pytest.approx(4099, rel=1e-6)


@pytest.mark.parametrize("precision", ["wide", "model"])
def test_activations_have_the_precision_that_was_asked_for(precision):
    seen = set()
    net = mlp().bfloat16()
    for module in net:
        module.register_forward_hook(lambda module, inputs, z: seen.add(z.dtype))
    fl.measure(net, torch.randn(3, 6), precision=precision)
    assert seen == {torch.bfloat16 if precision == "model" else torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_networks_of_float32_and_float64_are_measured_as_by_default(dtype):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    own, wide = in_both(mlp().to(dtype), x)
    assert own.to_dict() == wide.to_dict()
    assert own.probe.notes == wide.probe.notes
    assert {b.name: b.verdict for b in own.bounds} == {b.name: b.verdict for b in wide.bounds}


def test_the_result_says_so(tmp_path):
    own, _ = in_both(mlp().bfloat16(), torch.randn(3, 6))
    sentence = 'precision="model": outputs and derivatives are computed in bfloat16'
    assert sentence in " ".join(str(own).split())
    assert "bfloat16. Method: exact" in str(own)
    assert own.record()["dtype"] == "bfloat16"
    loaded = fl.Measurement.load(own.save(tmp_path / "m.json"))
    assert loaded.probe.dtype == torch.bfloat16
    assert str(loaded) == str(own)
    assert loaded.to_dict() == own.to_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inequalities_that_need_exact_derivatives_are_observations(dtype):
    own, wide = in_both(mlp().to(dtype), torch.randn(4, 6))
    for inequality in own.bounds:
        assert inequality.holds, inequality.name
        default = wide.bounds[inequality.name].verdict
        if default == "theorem" and inequality.name not in OF_ANY_NUMBERS:
            assert inequality.verdict == "observation"
            assert f"rounded to {str(dtype).removeprefix('torch.')}" in inequality.why
        else:
            assert inequality.verdict == default


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_rounding_breaks_no_inequality_that_is_tight(seed):
    torch.manual_seed(seed)
    # One output and no bias: Eqs. 6, 8, 11 and 12 are equations for the last layer.
    net = nn.Sequential(nn.Linear(40, 30, bias=False), nn.ReLU(), nn.Linear(30, 1, bias=False))
    for dtype in (torch.bfloat16, torch.float16):
        for model in (net, nn.Linear(40, 1, bias=False)):
            m = fl.measure(copy.deepcopy(model).to(dtype), torch.randn(7, 40), precision="model")
            assert all(inequality.holds for inequality in m.bounds)


def test_a_sample_that_overflows_is_named_with_the_advice():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).half()
    nn.init.constant_(net[0].weight, 200)
    nn.init.constant_(net[1].weight, 200)
    x = torch.tensor([[0.1, 0.1], [2.0, 2.0]])
    advice = 'use the default, precision="wide", which computes in float32'
    with pytest.raises(fl.FlatlensError, match=rf"output of sample 1 is not finite.*{advice}"):
        fl.measure(net, x, precision="model")
    with pytest.raises(fl.FlatlensError, match=rf"gradient of sample 0 is not finite.*{advice}"):
        fl.measure(net, x[:1], precision="model")
    with pytest.raises(fl.FlatlensError, match=rf"input of sample 1 is not finite.*{advice}"):
        fl.measure(net, torch.tensor([[1.0, 1.0], [1e5, 1.0]]), precision="model")
    assert fl.measure(net, x)["mls"] == pytest.approx(160_000, rel=1e-3)


def test_a_derivative_below_the_range_is_refused_and_a_zero_is_noted():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).half()
    nn.init.eye_(net[0].weight).data.mul_(2e-3)
    nn.init.eye_(net[1].weight).data.mul_(2e-3)
    x = torch.tensor([[1.0, 2.0]])
    with pytest.raises(fl.FlatlensError, match=r"sample 0 is too small for float16.*\"wide\""):
        fl.measure(net, x, precision="model")
    m = fl.measure(nn.Sequential(net[0], nn.ReLU(), net[1]), -x, precision="model")
    assert any("exactly 0 in half precision" in note for note in m.probe.notes)


def test_a_derivative_that_cancels_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)).bfloat16()
    with torch.no_grad():
        model[0].weight.mul_(30)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(fl.FlatlensError, match=r"is too small for bfloat16, which loses"):
        fl.measure(model, x, precision="model")


class Inverse(nn.Module):
    """Inverts a matrix, which torch does not do in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x.unflatten(1, (2, 2))).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_operation_that_does_not_know_the_precision_is_reported_with_the_advice(dtype):
    net = nn.Sequential(nn.Linear(3, 4), Inverse()).to(dtype)
    with pytest.raises(fl.FlatlensError, match=r"does not run in b?float16 here.*\"wide\""):
        fl.measure(net, torch.randn(2, 3), precision="model")
    assert fl.measure(net, torch.randn(2, 3)).probe.dtype == torch.float32


class Mixed(nn.Module):
    """A norm layer in float32 inside a network in bfloat16, as large models keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8).bfloat16(), nn.Linear(8, 3).bfloat16()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x.to(torch.bfloat16)).float()).tanh()
        return self.b(x.to(torch.bfloat16)).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_network_of_two_precisions(dtype):
    torch.manual_seed(0)
    net = Mixed()
    m = fl.measure(net, torch.randn(3, 6).to(dtype), precision="model")
    assert m.probe.dtype == torch.bfloat16
    assert m.coverage["a.weight"] == m.coverage["b.weight"] == "layer"
    assert m.probe.layers[0].reads_input
    assert m.probe.layers[1].is_output


def test_small_singular_values_count_as_zero_by_the_precision():
    weight = torch.diag(torch.tensor([1.0, 2**-4, 2**-9]))
    net = nn.Linear(3, 3, bias=False).bfloat16()
    net.weight.data.copy_(weight)
    own, wide = in_both(net, torch.ones(1, 3))
    assert own.probe.input.rank.tolist() == [2]
    assert wide.probe.input.rank.tolist() == [3]
    assert own["log_volume"] == -np.inf
    assert any("count as 0 in bfloat16" in note for note in own.probe.notes)


def test_what_takes_passes_of_its_own_is_measured_in_float32():
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
    options = {"y": y, "quantities": ["sharpness", "hessian_trace"], "loss": "cross_entropy"}
    own, wide = in_both(mlp().bfloat16(), x, **options)
    assert own["hessian_trace"] == wide["hessian_trace"]
    assert "measured in float32, with passes of their own: hessian_trace" in own.probe.notes
    near = pytest.approx(wide["gauss_newton_trace"], rel=tolerance(own))
    assert own["gauss_newton_trace"] == near


@pytest.mark.parametrize("function", [fl.probe, fl.sketch])
def test_probe_and_sketch_take_it_too(function):
    net, x = mlp((6, 8, 70)).bfloat16(), torch.randn(3, 6)
    p = function(net, x, precision="model")
    assert p.dtype == torch.bfloat16
    assert fl.sharpness(p) == pytest.approx(fl.sharpness(function(net, x)), rel=0.05)


def test_batches_of_a_loader_are_brought_to_the_precision():
    net, x = mlp().half(), torch.randn(6, 6, dtype=torch.float64)
    whole = fl.measure(net, x, precision="model")
    assert fl.measure(net, [x[:4], x[4:]], precision="model").to_dict() == pytest.approx(
        whole.to_dict(), rel=1e-2, nan_ok=True
    )


def test_a_tracker_takes_it():
    tracker = Tracker(mlp().bfloat16(), torch.randn(3, 6), when=every(1), precision="model")
    assert tracker(0).probe.dtype == torch.bfloat16


def test_measurements_of_two_precisions_are_distinguished():
    own, wide = in_both(mlp().bfloat16(), torch.randn(3, 6))
    assert "dtype" in str(fl.compare({"own": own, "wide": wide}))


class Autocast(nn.Module):
    """Computes in bfloat16 though its parameters are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


def test_autocast_inside_a_float32_network_is_still_refused():
    with pytest.raises(fl.FlatlensError, match="computes in bfloat16 inside its forward"):
        fl.measure(Autocast(), torch.randn(2, 6), precision="model")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_a_language_model(name):
    from flatlens.compat import make_torchvision_importable

    make_torchvision_importable()
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2": {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 12},
        "Llama": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "intermediate_size": 12, "num_key_value_heads": 1},
    }[name]  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=23, **sizes)
    model = getattr(transformers, f"{name}ForCausalLM" if name == "Llama" else "GPT2LMHeadModel")
    net = model(config).bfloat16().eval()
    ids = torch.randint(0, 23, (3, 5), generator=torch.Generator().manual_seed(0))
    last = lambda result: result.logits[:, -1]  # noqa: E731
    own, wide = in_both(net, {"input_ids": ids}, output=last)
    assert own.probe.dtype == torch.bfloat16
    assert {k: v == "layer" for k, v in own.coverage.items()} == {
        k: v == "layer" for k, v in wide.coverage.items()
    }
    for quantity in ("sharpness", "mls", "nmls", "adaptive_sharpness"):
        assert own[quantity] == pytest.approx(wide[quantity], rel=tolerance(own)), quantity
