"""What cannot be measured is refused: one exception, one sentence, what is wrong and what to do."""

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.perturb import hessian_trace

x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Run(nn.Module):
    """A Linear layer of three features and any forward."""

    def __init__(self, run, width=3):
        super().__init__()
        self.layer, self.run = nn.Linear(3, width), run

    def forward(self, *args):
        return self.run(self.layer, *args)


def refused(*words, **options):
    """Expect FlatlensError whose one sentence has all of `words` (case does not matter)."""

    class Refused:
        def __enter__(self):
            self.context = pytest.raises(fl.FlatlensError)
            self.info = self.context.__enter__()

        def __exit__(self, *error):
            suppressed = self.context.__exit__(*error)
            message = str(self.info.value)
            assert isinstance(self.info.value, ValueError)
            assert "\n" not in message
            assert 20 < len(message) < 420
            missing = [word for word in words if word.lower() not in message.lower()]
            assert not missing, message
            return suppressed

    return Refused()


def with_value(row, value):
    changed = x.clone()
    changed[row, 0] = value
    return changed


def test_batchnorm_without_running_statistics():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with refused("1", "running statistics"):
        fl.probe(net, x)


@pytest.mark.parametrize(
    "run",
    [
        lambda layer, x: layer(x) - layer(x).mean(0),
        lambda layer, x: layer(x - x.mean(0)),
        lambda layer, x: torch.softmax(layer(x), 0),
        lambda layer, x: layer(x.flip(0)),
        lambda layer, x: layer(x) / len(x),
        lambda layer, x: layer(x).cumsum(0),
        lambda layer, x: layer(x) + x[2:].sum(),
    ],
    ids=[
        "centred outputs",
        "centred inputs",
        "softmax over samples",
        "samples reversed",
        "divided by n",
        "running sum",
        "third sample in all",
    ],
)
def test_samples_that_depend_on_one_another(run):
    with refused("sample"):
        fl.probe(Run(run), x)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    "call", [fl.probe, lambda net, x: hessian_trace(net, x, torch.zeros(len(x), 3))]
)
def test_outputs_that_change_from_run_to_run(call, n):
    net = Run(lambda layer, x: layer(x) * torch.rand(3))
    with refused("from one run to the next"):
        call(net, x[:n])


def test_autocast_inside_a_forward():
    def run(layer, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x).float()

    with refused("bfloat16", "autocast"):
        fl.probe(Run(run), x)


def test_attention_over_the_samples():
    net = nn.Sequential(nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 1, 4, batch_first=False))
    with refused("sample"):
        fl.probe(net, x[:, None].repeat(1, 2, 1))


def test_random_forward():
    with refused("sample"):
        fl.probe(Run(lambda layer, x: layer(x) + torch.rand_like(x)), x)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_input_that_is_not_finite(value):
    with refused("input", "sample 2"):
        fl.probe(nn.Sequential(nn.Linear(3, 2)), with_value(2, value))


def test_output_that_is_not_finite():
    with refused("output", "sample 2"), torch.no_grad():
        fl.probe(
            Run(lambda layer, x: layer(x) + torch.where(x[:, :1] > 1e3, torch.nan, 0.0)),
            with_value(2, 1e4),
        )


def test_sample_that_is_not_finite_in_a_later_chunk():
    with refused("input", "sample 3"):
        fl.probe(nn.Sequential(nn.Linear(3, 2)), with_value(3, torch.nan), chunk=2)


def test_sample_that_is_not_finite_in_a_later_batch():
    with refused("input", "sample 6"):
        fl.probe(nn.Sequential(nn.Linear(3, 2)), [x, with_value(2, torch.nan)])


def test_integer_inputs_without_a_float_path():
    with refused("integer", "Embedding"):
        fl.probe(Run(lambda layer, x: layer(x.float())), torch.randint(5, (4, 3)))


def test_no_outputs():
    with refused("output"):
        fl.probe(Run(lambda layer, x: layer(x)[:, :0]), x)


@pytest.mark.parametrize("empty", [x[:0], [], iter(())], ids=["tensor", "list", "iterator"])
def test_no_samples(empty):
    with refused("sample"):
        fl.probe(nn.Sequential(nn.Linear(3, 2)), empty)


def test_complex_input():
    with refused("complex"):
        fl.probe(nn.Sequential(nn.Linear(3, 2)), x.to(torch.complex64))


def test_complex_parameters():
    with refused("complex"):
        fl.probe(nn.Sequential(nn.Linear(3, 2, dtype=torch.complex64)), x)


def test_complex_output():
    with refused("complex"):
        fl.probe(Run(lambda layer, x: torch.fft.fft(layer(x))), x)


def test_more_memory_than_the_budget():
    with refused("memory"):
        fl.probe(nn.Sequential(nn.Linear(3, 2)), x, memory=10)


def test_output_without_samples():
    with refused("output"):
        fl.probe(Run(lambda layer, x: layer(x).sum()), x)


def test_output_must_be_chosen():
    with refused("output=", "'a'", "'b'"):
        fl.probe(Run(lambda layer, x: {"a": layer(x), "b": x}), x)


def test_output_that_does_not_exist():
    with refused("'c'", "'a'"):
        fl.probe(Run(lambda layer, x: {"a": layer(x)}), x, output="c")


def test_inputs_of_different_lengths():
    with refused("(4, 3)", "(3, 3)"):
        fl.probe(Run(lambda layer, x, y: layer(x)), (x, x[:3]))


@pytest.mark.parametrize(
    "options",
    [{"chunk": 0}, {"chunk": -1}, {"memory": 0}, {"weight_norm": "nuclear"}],
    ids=lambda options: next(iter(options)),
)
def test_bad_options(options):
    with refused(next(iter(options))):
        fl.probe(nn.Sequential(nn.Linear(3, 2)), x, **options)


def test_unknown_quantity():
    with refused("flatness", "sharpness"):
        fl.measure(nn.Sequential(nn.Linear(3, 2)), x, quantities=["flatness"])


def test_targets_of_another_length():
    with refused("4", "3"):
        fl.measure(nn.Sequential(nn.Linear(3, 2)), x, torch.zeros(3, dtype=torch.long))


def test_label_out_of_range():
    with refused("7"):
        fl.measure(nn.Sequential(nn.Linear(3, 2)), x, torch.tensor([0, 1, 7, 0]))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind_after_an_exception(error):
    calls = []

    def run(layer, x):
        calls.append(len(x))
        if len(calls) > 2:  # somewhere in the middle of the measurement
            raise error("stop")
        return layer(x)

    net = Run(run).train()
    net.layer.weight.grad = torch.ones(3, 3)
    before, keys = torch.get_rng_state(), [sorted(vars(m)) for m in net.modules()]
    with pytest.raises((error, fl.FlatlensError), match="stop"):
        fl.probe(net, x, chunk=1)
    assert all(module.training for module in net.modules())
    assert all(p.requires_grad for p in net.parameters())
    assert torch.equal(net.layer.weight.grad, torch.ones(3, 3))
    assert net.layer.bias.grad is None
    assert not any(
        hooks for m in net.modules() for key, hooks in vars(m).items() if key.endswith("hooks")
    )
    assert [sorted(vars(m)) for m in net.modules()] == keys
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert torch.nn.functional.has_torch_function((x,)) is False


class Grows(nn.Module):
    """Makes its last layer when it first sees what goes in."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), None

    def forward(self, x):
        z = self.a(x).tanh()
        if self.b is None:
            self.b = nn.Linear(z.shape[1], 2)
        return self.b(z)


def test_parameters_made_by_the_first_forward_pass_are_not_left_out():
    net, x = Grows(), torch.ones(2, 3)
    with pytest.raises(fl.FlatlensError, match=r"b\.weight, b\.bias did not exist"):
        fl.measure(net, x)
    assert set(fl.measure(net, x).coverage) == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_lazy_modules_have_to_be_run_first():
    net = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(fl.FlatlensError, match=r"0\.weight, 0\.bias have no values yet"):
        fl.measure(net, torch.ones(2, 3))
    assert torch.nn.parameter.is_lazy(net[0].weight)


class Root(nn.Module):
    """Its derivative below zero is 0 times NaN."""

    def forward(self, x):
        return torch.where(x > 0, x.sqrt(), 0.0)


@pytest.mark.parametrize("quantities", ["default", ["sharpness"]], ids=["all", "sharpness"])
def test_a_gradient_that_is_not_finite_names_its_sample(quantities):
    net = nn.Sequential(nn.Linear(2, 2, bias=False), Root())
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 2.0], [1.0, 1.0], [-1.0, 3.0]])
    fl.measure(net, x[:2], quantities=quantities)
    with pytest.raises(fl.FlatlensError, match="gradient of sample 2 is not finite"):
        fl.measure(net, x, quantities=quantities)


def test_an_input_without_a_derivative_is_said():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x.detach())

    m = fl.measure(Detached(3, 2), torch.ones(2, 3))
    assert m["mls"] == 0
    assert any("no derivative with respect to the input" in note for note in m.probe.notes)


def test_complex_numbers_inside_are_refused():
    class Turns(nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x + 0j, self.weight + 0j).abs()

    with pytest.raises(fl.FlatlensError, match="complex"):
        fl.measure(Turns(3, 2), torch.ones(2, 3))


def test_a_memory_budget_counts_parameters_outside_the_layers():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4, 100_000))

        def forward(self, x):
            return (self.a(x)[:, :, None] * self.scale).mean(2)

    with pytest.raises(fl.FlatlensError, match="more than memory="):
        fl.measure(Scaled(), torch.ones(2, 3), memory=1 << 20)


def test_samples_that_change_one_another_are_measured_alone_on_request():
    net = Run(lambda layer, x: layer(x - x.mean(0) / 2))
    with refused("other samples", "chunk=1"):
        fl.measure(net, x)
    each = [fl.measure(net, x[i : i + 1])["sharpness"] for i in range(len(x))]
    assert fl.measure(net, x, chunk=1)["sharpness"] == pytest.approx(sum(each) / len(x))
