"""``flatlens measure``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatlens.cli.options import AboveZero, Json, Natural, Positive, Words
from flatlens.errors import FlatlensError

if TYPE_CHECKING:
    from torch import Tensor, nn

EXAMPLES = """Examples:
  flatlens measure mymodel:build --checkpoint weights.pt --data npz:images.npz
  flatlens measure mymodel:Net --data digits --n 200 --json
  flatlens measure timm:vit_tiny_patch16_224 --data "folder:photos?size=224" --n 10
  flatlens measure hf:gpt2 --data "text:book.txt?length=32" --n 4 --method sketch
  flatlens measure vit --data "cifar10?classes=0,1" --method sketch --rtol 0.01"""


def measure(
    model: str,
    /,
    *,
    data: str,
    checkpoint: Path | None = None,
    key: str | None = None,
    n: Positive | None = None,
    quantities: Words = None,
    method: Literal["auto", "exact", "sketch"] = "auto",
    loss: str = "half_squared",
    directions: Positive = 32,
    seed: Natural = 0,
    rtol: AboveZero | None = None,
    budget: AboveZero | None = None,
    output: str | None = None,
    position: Literal["last", "all"] | None = None,
    weight_norm: Literal["operator", "kernel", "frobenius"] = "operator",
    device: str = "cpu",
    dtype: Literal["float32", "float64", "float16", "bfloat16"] | None = None,
    as_json: Json = False,
) -> None:
    """Measure the sharpness and compression of any network on any data.

    Parameters
    ----------
    model
        The network: package.module:factory calls the factory without arguments (a torch.nn.Module
        is taken as it is, and modules in the current folder are imported); timm:NAME is a model of
        timm with random weights; hf:NAME or hf:FOLDER is a model of Transformers with its own
        (safetensors only); mlp, lenet, vgg, vgg11, resnet18 and vit are those of flatlens
        train.
    data
        The samples: npz:FILE with arrays x and y (class labels or float targets), folder:PATH with
        images as class/*.png, digits (embedded), fashion-mnist, cifar10 (see flatlens data),
        text:FILE with tokens of the model (or of ?tokenizer=NAME), synthetic:gaussians or
        synthetic:teacher; options follow a question mark, as in
        "cifar10?classes=0,1" or "folder:photos?size=64".
    checkpoint
        The weights: a safetensors file, or a state dict saved with torch.save (tensors only); by
        default the network is measured as the factory returns it.
    key
        The place of the weights inside the checkpoint, such as ema or state_dict.teacher; by
        default the usual places are tried.
    n
        The number of samples, drawn at random with --seed; by default 100, or all if there are
        fewer.
    quantities
        The names of the quantities to measure, or all, which adds those that need passes of their
        own, such as hessian_trace; by default everything that one pass gives.
    method
        How to measure: exact takes one product per output, sketch takes random directions and gives
        standard errors, and auto is exact unless that is far more expensive.
    loss
        The loss whose Gauss-Newton form is measured too: half_squared (the paper's), squared,
        mean_squared, cross_entropy or binary_cross_entropy, with label smoothing as in
        cross_entropy:0.1.
    directions
        The number of random output directions of a sketch.
    seed
        The seed of the samples, of everything random in a measurement, and of weights that no
        checkpoint gives.
    rtol
        The relative standard error that a sketch, and estimates such as hessian_trace, must reach.
    budget
        The number of seconds that an exact pass may take under auto.
    output
        The key or position of the tensor to measure, if the network returns a dict or a tuple; by
        default logits of a model of Transformers.
    position
        The outputs to measure of a model that has some for each token: those of the last token, or
        of all tokens; by default last for text, else all.
    weight_norm
        The norm of a layer's weight that enters the quantities.
    device
        The device to compute on: cpu, cuda, cuda:1, mps.
    dtype
        The precision of weights and inputs; by default that of the network.
    as_json
        Print one JSON object instead of tables.
    """
    import torch

    import flatlens as fl

    torch.manual_seed(seed)
    network = _network(model, checkpoint, key)
    x, y = _samples(network, _with_tokenizer(data, model), n, seed, device, dtype)
    selected = _selected(output, position, model, data)
    m = fl.measure(
        network, x, y, quantities=quantities or "default", method=method, loss=loss,
        output=selected, weight_norm=weight_norm, directions=directions, seed=seed, rtol=rtol,
        budget=budget,
    )  # fmt: skip
    print(m.to_json() if as_json else m)


def _with_tokenizer(data: str, model: str) -> str:
    """Let text be read with the tokenizer of a model of Transformers, unless another is named.

    >>> _with_tokenizer("text:book.txt?length=9", "hf:gpt2")
    'text:book.txt?length=9&tokenizer=gpt2'
    """
    if not (data.startswith("text:") and model.startswith("hf:")) or "tokenizer=" in data:
        return data
    return f"{data}{'&' if '?' in data else '?'}tokenizer={model.removeprefix('hf:')}"


def _selected(output: str | None, position: str | None, model: str, data: str) -> Any:
    """Return what of the network's result is measured: a key, an index or a function."""
    key: Any = int(output) if output is not None and output.isdecimal() else output
    if key is None and model.startswith("hf:"):
        key = "logits"
    if position is None:
        position = "last" if data.startswith("text:") else "all"
    if position == "all":
        return key

    def last_position(result: Any) -> Tensor:
        tensor = result if key is None else result[key]
        if tensor.dim() < 3:
            raise FlatlensError(
                f"The output has shape {list(tensor.shape)}, not one row for each token; give "
                "--position all."
            )
        last: Tensor = tensor[:, -1]
        return last

    return last_position


def _network(model: str, checkpoint: Path | None, key: str | None) -> nn.Module:
    """Build the network and load its weights."""
    from flatlens.training.networks import build
    from flatlens.training.trust import import_factory
    from flatlens.training.weight_files import load_weights

    import_factory(model, Path.cwd())
    network = build(model)
    if key is not None and checkpoint is None:
        raise FlatlensError("--key is a place inside a checkpoint; give --checkpoint too.")
    if checkpoint is not None:
        options: dict[str, Any] = {} if key is None else {"key": key}
        load_weights(network, checkpoint, **options)
    return network


def _samples(
    network: nn.Module, data: str, n: int | None, seed: int, device: str, dtype: str | None
) -> tuple[Tensor, Tensor]:
    """Draw n training samples and move them, and the network, to one device and precision."""
    from flatlens.data.datasets import load
    from flatlens.training.placement import place, try_one

    loaded = load(data)
    index = draw(len(loaded.x_train), n, seed)
    x, y = place(network, loaded.x_train[index], loaded.y_train[index], device, dtype)
    try_one(network, x)
    return x, y


def draw(there: int, n: int | None, seed: int) -> Tensor:
    """Draw the indices of n different samples at random, in ascending order.

    torch's global generator is left alone.

    Args:
        there: number of samples that there are.
        n: number of samples to draw. By default 100, or all if there are fewer.
        seed: the same seed draws the same samples.

    Raises:
        FlatlensError: if n is larger than the number of samples.

    >>> draw(5, 5, seed=3).tolist()
    [0, 1, 2, 3, 4]
    """
    import torch

    from flatlens.training.placement import SAMPLES

    if n is not None and n > there:
        raise FlatlensError(f"{n:,} samples were asked for, but the data has only {there:,}.")
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(there, generator=generator)[: n or min(SAMPLES, there)].sort().values
