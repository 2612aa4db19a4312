"""Measuring leaves no trace, and no backward hook changes a number."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.nn.utils import prune

import flatlens as fl

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def numbers(net: nn.Module, x=X) -> tuple[float, float, int]:
    m = fl.measure(net, x)
    return m["sharpness"], m["mls"], sum(b.verdict == "theorem" for b in m.bounds)


def tripled(module, grad_input, grad_output):
    return tuple(None if g is None else 3 * g for g in grad_input)


HOOKS = {
    "full, on the first layer": lambda net: net[0].register_full_backward_hook(tripled),
    "full, inside": lambda net: net[1].register_full_backward_hook(tripled),
    "full, on the model": lambda net: net.register_full_backward_hook(tripled),
    "pre": lambda net: net[1].register_full_backward_pre_hook(lambda m, g: tuple(3 * t for t in g)),
    "that does nothing": lambda net: net[0].register_full_backward_hook(lambda *_: None),
    "of all modules": lambda net: register_module_full_backward_hook(tripled),
    "of a parameter": lambda net: net[0].weight.register_hook(lambda g: 3 * g),
    "of a tensor, by a forward hook": lambda net: net[1].register_forward_hook(
        lambda m, x, y: y.register_hook(lambda g: 3 * g) and None
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_backward_hook_changes_nothing_and_stays(kind):
    want, net = numbers(mlp()), mlp()
    trace = fl.perturb.hessian_trace(mlp(), X, torch.zeros(4, 2).double()).value
    handle = HOOKS[kind](net)
    try:
        assert numbers(net) == want
        again = fl.perturb.hessian_trace(net, X, torch.zeros(4, 2).double()).value
        assert again == pytest.approx(trace, rel=1e-12)
        hooks = handle.hooks_dict_ref()
        assert hooks is not None
        assert handle.id in hooks  # it is on again
    finally:
        handle.remove()


def test_a_forward_hook_that_changes_the_output_is_part_of_the_model():
    net = mlp()
    net[2].register_forward_hook(lambda m, x, y: 3 * y)
    assert numbers(net)[1] == pytest.approx(3 * numbers(mlp())[1], rel=1e-12)


@pytest.mark.parametrize("how", [torch.jit.script, lambda m: torch.jit.trace(m, X)])
def test_a_scripted_or_traced_submodule_is_measured(how):
    net = mlp()
    want = numbers(mlp())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        net[0] = how(net[0])
    m = fl.measure(net, X)
    assert (m["sharpness"], m["mls"]) == pytest.approx(want[:2], rel=1e-12)
    assert net[0].training


class Constrained(nn.Linear):
    """A max-norm constraint that the forward pass applies to the weight."""

    how = "data"

    def forward(self, x):
        short = torch.renorm(self.weight.data, 2, 0, 0.3)
        if self.how == "data":
            self.weight.data = short
        elif self.how == "in place":
            self.weight.data.copy_(short)
        else:
            with torch.no_grad():
                self.weight.copy_(short)
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def test_a_weight_that_is_overwritten_under_a_live_graph_is_refused_and_put_back():
    net = mlp()
    net[0] = Constrained(4, 5).double()
    net[0].how = "no_grad"
    weight = net[0].weight.detach().clone()
    with pytest.raises(fl.FlatlensError, match="changes its weights or activations in place"):
        fl.probe(net, X)
    assert torch.equal(net[0].weight, weight)


@pytest.mark.parametrize("how", ["data", "in place"])
def test_parameters_that_forward_changes_are_put_back(how):
    net = mlp()
    net[0] = Constrained(4, 5).double()
    net[0].how = how
    weight, storage = net[0].weight.detach().clone(), net[0].weight.data_ptr()
    fl.measure(net, X)
    assert torch.equal(net[0].weight, weight)
    assert net[0].weight.data_ptr() == storage
    assert not hasattr(net[0], "calls")


def test_everything_is_put_back_after_an_error():
    net = mlp()
    net[0] = Constrained(4, 5).double()
    weight = net[0].weight.detach().clone()
    net.register_forward_hook(lambda *_: torch.zeros(4, 2, 3).detach())
    with pytest.raises(fl.FlatlensError):
        fl.probe(net, X)
    assert torch.equal(net[0].weight, weight)
    assert net.training


@pytest.mark.parametrize("old", ["prune", "weight_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_half_precision_model_with_a_computed_weight_is_copied(old):
    net = mlp().float()
    if old == "prune":
        prune.l1_unstructured(net[0], "weight", 0.5)
    else:
        torch.nn.utils.weight_norm(net[0])
    net.bfloat16()
    net(X.bfloat16())
    m = fl.measure(net, X.bfloat16())
    want = fl.measure(net.float(), X.bfloat16().float())
    assert m["sharpness"] == pytest.approx(want["sharpness"], rel=1e-5)
    assert m["mls"] == pytest.approx(want["mls"], rel=1e-5)


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        net = nn.Linear(4, 2)
    for measure in (fl.probe, fl.measure, fl.perturb.hessian_trace):
        with pytest.raises(
            fl.FlatlensError, match="weight, bias on the meta device have no values"
        ):
            measure(net, X.float())
