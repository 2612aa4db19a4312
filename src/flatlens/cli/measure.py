"""``flatlens measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from flatlens.cli.figures import check_figure, write_figure
from flatlens.cli.networks import (
    load_network,
    load_samples,
    own_or_named,
    selected_output,
    with_tokenizer,
)
from flatlens.cli.options import AboveZero, Json, Natural, Positive, Words
from flatlens.cli.outputs import begins_with, check_output_file

REST = "See the rest: --json for every number, --figure for a picture, --save to load it in Python."
SAVED = '"format": "flatlens measurement"'  # in every saved measurement
EXAMPLES = """Examples:
  flatlens measure mymodel:build --checkpoint weights.pt --data npz:images.npz
  flatlens measure mymodel:Net --data digits --n 200 --json
  flatlens measure timm:vit_tiny_patch16_224 --data "folder:photos?size=224" --n 10
  flatlens measure hf:gpt2 --data "text:book.txt?length=32" --n 4 --method sketch
  flatlens measure mymodel:build --data digits --quantities headline mymodel:my_quantity
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
    precision: Literal["wide", "model"] = "wide",
    figure: Path | None = None,
    save: Path | None = None,
    as_json: Json = False,
) -> None:
    """Measure the sharpness and compression of any network on any data.

    Parameters
    ----------
    model
        The network: package.module:factory calls the factory without arguments (a torch.nn.Module
        is taken as it is, and modules in the current folder are imported); timm:NAME is a model of
        timm with random weights; hf:NAME or hf:FOLDER is a model of Transformers with its own
        weights (safetensors only); mlp, lenet, vgg, vgg11, resnet18 and vit are those of flatlens
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
        The names of the quantities to measure, and functions of your own that take a Probe, as
        package.module:function; headline is a short set, and all adds what needs passes of its
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
        The device to compute on: cpu, cuda or cuda:1.
    dtype
        The precision of weights and inputs; by default that of the network.
    precision
        The precision of the measurement: wide runs a half-precision network in float32, and model
        runs it in its own precision, as in training. Other networks are the same under both.
    figure
        A file for a figure of the inequalities: .png, .pdf or .svg. It must be new or a figure that
        flatlens wrote.
    save
        A file for the whole measurement, which flatlens compare and Measurement.load read. It must
        be new or a measurement that flatlens saved.
    as_json
        Print one JSON object instead of tables.
    """
    import torch

    import flatlens as fl
    from flatlens.measurement.printing import one_screen

    if figure is not None:
        check_figure(figure)
    if save is not None:
        check_output_file(save, begins_with(SAVED), "a measurement")
    torch.manual_seed(seed)
    network = load_network(model, checkpoint, key)
    x, y = load_samples(network, with_tokenizer(data, model), n, seed, device, dtype)
    selected = selected_output(output, position, model, data)
    m = fl.measure(
        network, x, y, quantities=own_or_named(quantities), method=method, loss=loss,
        output=selected, weight_norm=weight_norm, directions=directions, seed=seed, rtol=rtol,
        budget=budget, precision=precision,
    )  # fmt: skip
    if figure is not None:
        write_figure(figure, m.plot())
    if save is not None:
        m.save(save)
    print(m.to_json() if as_json else one_screen(m, REST))
