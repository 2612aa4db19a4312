"""The sides of `peers.py`: one small function for each package to time.

**exact**: a side takes the network, gets ready (not timed) and returns a function of a batch x and
a number of samples at a time. That function gives S of each sample, or their mean where the
library knows no more, or nothing (floor and lower limit).
**estimates**: a side returns a function of a number of products and a seed that gives S. The
targets are the network's own outputs, so that the Hessian of 1/2 ||f - y||^2 is its Gauss-Newton
part and its trace is S: all of them estimate one number, and it is known exactly.

`assemblies.py` has the sides that give a set of quantities.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import core
import torch
from torch import Tensor, nn

import flatlens as fl
from flatlens.training.networks import build

Sum = Callable[[Tensor], Any]  # S of each sample of a batch, or their sum
Exact = Callable[[Tensor, int], Any]  # (x, samples at a time)
Estimate = Callable[[int, int], float]  # (products, seed)

VIT = {"patch": 16, "dim": 192, "depth": 12, "heads": 3}  # ViT-Tiny
PIXELS = {"vit64": 64, "vit224": 224}
NETWORKS = ("mlp", "lenet", "vgg", "vgg11", "resnet18", *PIXELS)


def network(name: str, outputs: int) -> nn.Module:
    """Return a network by name; `mlp-64x5` has five hidden layers of 64 units."""
    if sizes := re.fullmatch(r"mlp-(\d+)x(\d+)", name):
        width, depth = map(int, sizes.groups())
        return build("mlp", widths=(784, *[width] * depth, outputs))
    if name == "mlp":
        return build("mlp", widths=(784, 500, 500, 500, outputs))
    if name in PIXELS:
        return build("vit", image=PIXELS[name], classes=outputs, **VIT)
    if name in ("vgg11", "resnet18"):
        return build(name, classes=outputs)
    net = build(name)
    assert isinstance(net, nn.Sequential)
    last = net[-1]
    assert isinstance(last, nn.Linear)
    net[-1] = nn.Linear(last.in_features, outputs)
    return net


def images(name: str, n: int) -> Tensor:
    """Return random pixels in [0, 1], as `core.inputs` does."""
    if name in PIXELS:
        generator = torch.Generator().manual_seed(1)
        return torch.rand(n, 3, PIXELS[name], PIXELS[name], generator=generator)
    return core.inputs("mlp" if name.startswith("mlp") else name, n)


def batched(of_batch: Sum) -> Exact:
    """Return a function of x: the mean over its samples of the sums of `of_batch`."""
    return lambda x, batch: sum(float(of_batch(chunk)) for chunk in x.split(batch)) / len(x)


# ------------------------------------------------------------------ exact S


def floor(model: nn.Module) -> Exact:
    return lambda x, batch: core.floor(model, x, batch)


def lower_limit(model: nn.Module) -> Exact:
    """Run the backward passes to the layers' outputs only: S needs no derivative at the image."""
    return lambda x, batch: core.lower_limit(model, x, batch, image=False)


def lower_limit_whole(model: nn.Module) -> Exact:
    return lambda x, batch: core.lower_limit(model, x, batch)


def flatlens(model: nn.Module) -> Exact:
    """Time flatlens in its own chunks."""

    def S(x: Tensor, _batch: int) -> Any:
        found = fl.measure(model, x, quantities=["sharpness"], method="exact")
        return found.samples["sharpness"].tolist()

    return S


def flatlens_within(model: nn.Module, memory: int) -> Exact:
    """Time flatlens in the memory of the peer that needs least."""

    def S(x: Tensor, _batch: int) -> Any:
        options: dict[str, Any] = {"quantities": ["sharpness"], "method": "exact"}
        return fl.measure(model, x, memory=memory, **options).samples["sharpness"].tolist()

    return S


def loop(model: nn.Module) -> Exact:
    """Time a loop over samples and outputs, as in the authors' scripts."""
    parameters = list(model.parameters())

    def S(x: Tensor, _batch: int) -> list[float]:
        found = []
        for x_i in x:
            total = torch.zeros(())
            out = model(x_i[None])[0]
            for v in range(len(out)):
                grads = torch.autograd.grad(out[v], parameters, retain_graph=v + 1 < len(out))
                total += sum(g.square().sum() for g in grads)
            found.append(float(total))
        return found

    return S


def jacobian(model: nn.Module) -> Callable[..., dict[str, Tensor]]:
    """Return a function of (parameters, x): df/dtheta of each sample and output, by parameter."""

    def f(parameters: dict[str, Tensor], x_i: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, parameters, (x_i[None],))
        return out[0]

    return torch.func.vmap(torch.func.jacrev(f), (None, 0))


def jacrev(model: nn.Module) -> Exact:
    parameters, of_batch = {k: p.detach() for k, p in model.named_parameters()}, jacobian(model)
    return batched(lambda x: sum(j.square().sum() for j in of_batch(parameters, x).values()))


def backpack_diagonal(model: nn.Module) -> Callable[[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return parameters with the Gauss-Newton diagonal of sum ||f - y||^2 of a batch.

    It is twice the sum of squared derivatives."""
    import backpack
    from backpack.extensions import DiagGGNExact

    no_hook_warnings()
    # residuals and functions must be modules for this one: the converter makes them
    plain = isinstance(model, nn.Sequential) and not any(list(m.children()) for m in model)
    net = backpack.extend(model, use_converter=not plain).eval()
    loss = backpack.extend(nn.MSELoss(reduction="sum"))

    def diagonal(x: Tensor) -> list[tuple[Tensor, Tensor]]:
        out = net(x)
        with backpack.backpack(DiagGGNExact()):
            loss(out, torch.zeros_like(out)).backward()
        return take(net, "diag_ggn_exact")

    return diagonal


def backpack_ggn(model: nn.Module) -> Exact:
    diagonal = backpack_diagonal(model)
    return batched(lambda x: total_of(diagonal(x)) / 2)


def backpack_l2(model: nn.Module) -> Exact:
    import backpack
    from backpack.extensions import BatchL2Grad

    no_hook_warnings()
    net, first = backpack.extend(model), next(model.parameters())

    def total(x: Tensor) -> float:
        out, found = net(x), 0.0
        for v in range(out.shape[1]):
            more = v + 1 < out.shape[1]
            with backpack.backpack(BatchL2Grad(), retain_graph=more):
                # its hooks need no weight gradients: one is enough to run the whole backward pass
                out[:, v].sum().backward(inputs=[first], retain_graph=more)
            found += float(total_of(take(net, "batch_l2")))
        return found

    return batched(total)


def no_hook_warnings() -> None:
    """Ignore the warning that the first layer's hook has no gradient for x, which is intended."""
    warnings.filterwarnings("ignore", "Full backward hook is firing")


def take(net: nn.Module, name: str) -> list[tuple[Tensor, Tensor]]:
    """Remove and return BackPACK's result from every parameter."""
    missing = [which for which, p in net.named_parameters() if not hasattr(p, name)]
    if missing:
        raise RuntimeError(f"no {name} for {len(missing)} parameters, {missing[0]} the first")
    left = [(p, getattr(p, name)) for p in net.parameters()]
    for p in net.parameters():
        delattr(p, name)
        p.grad = None
    return left


def total_of(left: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum((values.sum() for _, values in left), start=torch.zeros(()))


def opacus(model: nn.Module) -> Exact:
    """Time ghost clipping: norms without gradients. It needs a forward pass for every output."""
    from opacus.grad_sample import grad_sample_module_fast_gradient_clipping as clipping

    ghost = clipping.GradSampleModuleFastGradientClipping(
        model.train(), max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )  # it looks at nothing in evaluation mode; networks that differ in it are refused
    first = next(model.parameters())

    def total(x: Tensor) -> float:
        found, v, outputs = 0.0, 0, 1
        while v < outputs:
            ghost.zero_grad()
            out = ghost(x)
            outputs = out.shape[1]
            out[:, v].sum().backward(inputs=[first])  # as for BatchL2Grad
            found += float(ghost.get_norm_sample().square().sum())
            v += 1
        return found

    return batched(total)


def nngeometry(model: nn.Module) -> Exact:
    """Time nngeometry: the Fisher matrix of a unit normal around f is the mean of J^T J."""
    from nngeometry.metrics import FIM
    from nngeometry.object import PMatDiag
    from torch.utils.data import DataLoader

    def S(x: Tensor, batch: int) -> float:
        # whole batches as items: nothing is collated; but it takes their number for n
        batches: Any = [(chunk,) for chunk in x.split(batch)]
        loader: Any = DataLoader(batches, batch_size=None)
        found = FIM(model, loader, PMatDiag, variant="regression").trace()
        return float(found) * len(batches) / len(x)

    return S


def asdl(model: nn.Module) -> Exact:
    """Time ASDL: the Fisher diagonal of a unit normal around f."""
    from asdl import FISHER_EXACT, SHAPE_DIAG, FisherConfig, get_fisher_maker

    config = FisherConfig(FISHER_EXACT, [SHAPE_DIAG], loss_type="mse")
    maker = get_fisher_maker(model, config)

    def total(x: Tensor) -> float:
        dummy = maker.setup_model_call(model, x)
        maker.setup_logits_repr(dummy)
        maker.forward_and_backward(data_size=1)
        parts = [
            getattr(module.fisher.diag, kind)
            for module in model.modules()
            if getattr(module, "fisher", None) is not None
            for kind in ("weight", "bias")
        ]
        return sum(float(part.sum()) for part in parts if part is not None)

    return batched(total)


PEERS: dict[str, Callable[[nn.Module], Exact]] = {
    "loop": loop,
    "jacrev": jacrev,
    "backpack_ggn": backpack_ggn,
    "backpack_l2": backpack_l2,
    "opacus": opacus,
    "nngeometry": nngeometry,
    "asdl": asdl,
}
EXACT = {"floor": floor, "lower_limit": lower_limit, "flatlens": flatlens, **PEERS}

# ------------------------------------------------------------------ estimates of S


def pairs(model: nn.Module, x: Tensor, batch: int = 100) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return [(chunk, model(chunk)) for chunk in x.split(batch)]


def half_squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return 0.5 * (model(x) - y).square().sum(1).mean()


@contextmanager
def plain_attention() -> Iterator[None]:
    """Use the plain kernel of attention, as the others lack second derivatives and forward mode."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def curvlinops_trace(estimator: str) -> Callable[[nn.Module, Tensor], Estimate]:
    def side(model: nn.Module, x: Tensor) -> Estimate:
        import curvlinops

        data, loss = pairs(model, x), nn.MSELoss(reduction="sum")
        parameters = list(model.parameters())
        trace = getattr(curvlinops, estimator)

        def S(products: int, seed: int) -> float:
            torch.manual_seed(seed)
            ggn = curvlinops.GGNLinearOperator(
                model, loss, parameters, data, check_deterministic=False
            )
            with plain_attention():
                return float(trace(ggn, products)) / (2 * len(x))

        return S

    return side


def eigenthings(method: str) -> Callable[[nn.Module, Tensor], Estimate]:
    def side(model: nn.Module, x: Tensor) -> Estimate:
        import hessian_eigenthings

        data = pairs(model, x)
        of_output = lambda out, batch: 0.5 * (out - batch[1]).square().sum(1).mean()  # noqa: E731

        def S(products: int, seed: int) -> float:
            with plain_attention():
                ggn = hessian_eigenthings.GGNOperator(
                    model, data, lambda net, batch: net(batch[0]), of_output
                )
                found = hessian_eigenthings.trace(
                    ggn, num_matvecs=products, method=method, seed=seed
                )
            return float(found.estimate)

        return S

    return side


def pyhessian(model: nn.Module, x: Tensor) -> Estimate:
    import numpy as np
    from pyhessian import hessian

    data = pairs(model, x)
    loss = lambda out, y: 0.5 * (out - y).square().sum(1).mean()  # noqa: E731

    def S(products: int, seed: int) -> float:
        torch.manual_seed(seed)
        with plain_attention():
            options = {"data": data[0]} if len(data) == 1 else {"dataloader": data}
            operator = hessian(model, loss, cuda=False, **options)
            found = operator.trace(maxIter=products, tol=0.0)
        model.zero_grad()
        return float(np.mean(found))

    return S


def flatlens_sketch(model: nn.Module, x: Tensor) -> Estimate:
    """Time a sketch, which also computes the singular values at the input (MLS and a volume)."""
    return lambda products, seed: fl.sharpness(
        fl.sketch(model, x, directions=products, seed=seed, layers=False, top=1)
    )


def flatlens_hessian(model: nn.Module, x: Tensor) -> Estimate:
    from flatlens.perturb import hessian_trace

    y = torch.cat([target for _, target in pairs(model, x)])
    return lambda products, seed: hessian_trace(model, x, y, directions=products, seed=seed).value


ESTIMATES: dict[str, Callable[[nn.Module, Tensor], Estimate]] = {
    "curvlinops_hutchinson": curvlinops_trace("hutchinson_trace"),
    "curvlinops_hutchpp": curvlinops_trace("hutchpp_trace"),
    "eigenthings_hutchinson": eigenthings("hutchinson"),
    "eigenthings_hutchpp": eigenthings("hutch++"),
    "pyhessian": pyhessian,
    "flatlens_sketch": flatlens_sketch,
    "flatlens_hessian_trace": flatlens_hessian,
}
