"""Large networks: the Gauss-Newton trace of the cross-entropy, compared with other packages.

    python benchmarks/large.py --json large.jsonl            # about an hour on two quiet cores
    python benchmarks/large.py --tiny                        # the same networks, a few neurons wide
    python benchmarks/large.py --networks gpt2 --sides flatlens curvlinops --directions 8

Weights are random, drawn from the config of each network; nothing is downloaded. Every side of a
network has a process of its own. *Peak* is the highest resident memory of that process, less what
it held when the network and its inputs were there. *Error* is the standard error of the estimate.
All estimators take the same number of random vectors.

The last lines say how far the aims are:

- the trace of GPT-2 takes no more time and memory than curvlinops at the same standard error;
- a sketch of all layers takes at most twice the time of the input alone;
- a half-precision network needs at most 0.2 of its size beyond its parameters and activations.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

UNIT = 1024 if sys.platform == "linux" else 1  # of ru_maxrss
Record = dict[str, Any]

# ------------------------------------------------------------------ networks


class LastLogits(nn.Module):
    """A language model as a function of tokens: the logits after the last one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits[:, -1]


def gpt2(tiny: bool) -> tuple[nn.Module, Tensor]:
    """GPT-2 small, 124 M parameters, one sequence."""
    import transformers

    small = {"vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2} if tiny else {}
    if tiny:
        small |= {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(attn_implementation="eager", **small)
    ids = torch.randint(0, config.vocab_size, (1, 8 if tiny else 64))
    return LastLogits(transformers.GPT2LMHeadModel(config)), ids


def llama(tiny: bool) -> tuple[nn.Module, Tensor]:
    """A Llama of 102 M parameters in bfloat16 (its tied table counted once), one sequence."""
    import transformers

    sizes = (97, 16, 24, 2, 2) if tiny else (32_000, 768, 2048, 11, 12)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = transformers.LlamaConfig(
        **dict(zip((*names, "num_attention_heads"), sizes, strict=True)),
        attn_implementation="eager",
        tie_word_embeddings=True,
    )
    model = LastLogits(transformers.LlamaForCausalLM(config)).bfloat16()
    return model, torch.randint(0, config.vocab_size, (1, 8 if tiny else 64))


def vit(tiny: bool) -> tuple[nn.Module, Tensor]:
    """ViT-Base with patches of 16 pixels, 86 M parameters, one image."""
    import timm

    small = {"img_size": 32, "embed_dim": 12, "depth": 2, "num_heads": 2} if tiny else {}
    model = timm.create_model("vit_base_patch16_224", num_classes=90 if tiny else 1000, **small)
    return model, torch.randn(1, 3, *(2 * [32 if tiny else 224]))


def resnet(tiny: bool) -> tuple[nn.Module, Tensor]:
    """ResNet-50, 26 M parameters, one image; the tiny one is a ResNet-10."""
    import timm

    name, side, classes = ("resnet10t", 32, 90) if tiny else ("resnet50", 224, 1000)
    return timm.create_model(name, num_classes=classes), torch.randn(1, 3, side, side)


NETWORKS: dict[str, Callable[[bool], tuple[nn.Module, Tensor]]] = {
    "gpt2": gpt2,
    "llama_bf16": llama,
    "vit_base": vit,
    "resnet50": resnet,
}


def network(name: str, tiny: bool) -> tuple[nn.Module, Tensor]:
    """Make a network with random weights in evaluation mode, and its samples."""
    from flatlens.compat import make_torchvision_importable

    make_torchvision_importable()
    torch.manual_seed(0)
    model, x = NETWORKS[name](tiny)
    return model.eval(), x


# ------------------------------------------------------------------ sides


def flatlens_trace(model: nn.Module, x: Tensor, directions: int) -> Record:
    import flatlens as fl

    m = fl.measure(
        model, x, torch.zeros(len(x), dtype=torch.long), quantities=["sharpness"],
        loss="cross_entropy", method="sketch", directions=directions,
    )  # fmt: skip
    return {"value": m["gauss_newton_trace"], "error": m["gauss_newton_trace_se"]}


def flatlens_quantity(name: str) -> Callable[[nn.Module, Tensor, int], Record]:
    def side(model: nn.Module, x: Tensor, directions: int) -> Record:
        import flatlens as fl

        m = fl.measure(model, x, quantities=[name], method="sketch", directions=directions)
        return {"value": m[name], "error": math.nan}

    return side


def mean_and_error(values: Sequence[float]) -> Record:
    """The mean of independent estimates and its standard error."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
    return {"value": mean, "error": math.sqrt(variance / len(values))}


def curvlinops_trace(model: nn.Module, x: Tensor, directions: int) -> Record:
    import curvlinops
    from torch.nn.attention import SDPBackend, sdpa_kernel

    y = torch.zeros(len(x), dtype=torch.long)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        ggn = curvlinops.GGNLinearOperator(
            model, nn.CrossEntropyLoss(), parameters, [(x, y)], check_deterministic=False
        )
        return mean_and_error(
            [float(curvlinops.hutchinson_trace(ggn, 1)) for _ in range(directions)]
        )


def eigenthings_trace(model: nn.Module, x: Tensor, directions: int) -> Record:
    import hessian_eigenthings
    from torch.nn.attention import SDPBackend, sdpa_kernel

    y = torch.zeros(len(x), dtype=torch.long)

    def loss(out: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(out, batch[1])

    with sdpa_kernel(SDPBackend.MATH):
        ggn = hessian_eigenthings.GGNOperator(
            model, [(x, y)], lambda net, batch: net(batch[0]), loss
        )
        values = [
            hessian_eigenthings.trace(ggn, num_matvecs=1, method="hutchinson", seed=seed).estimate
            for seed in range(directions)
        ]
    return mean_and_error([float(v) for v in values])


SIDES: dict[str, Callable[[nn.Module, Tensor, int], Record]] = {
    "flatlens": flatlens_trace,
    "curvlinops": curvlinops_trace,
    "hessian-eigenthings": eigenthings_trace,
    "flatlens, input alone": flatlens_quantity("mls"),
    "flatlens, layers": flatlens_quantity("nmls"),
}


def peak() -> int:
    """The highest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


def measured(name: str, side: str, directions: int, tiny: bool) -> Record:
    """Run one side of one network in this process."""
    warnings.simplefilter("ignore")
    model, x = network(name, tiny)
    size = sum(p.nbytes for p in model.parameters())
    before, start = peak(), time.perf_counter()
    record = SIDES[side](model, x, directions)
    seconds = time.perf_counter() - start
    return record | {"seconds": seconds, "peak": peak() - before, "model": size}


# ------------------------------------------------------------------ all of them


def in_a_process(name: str, side: str, options: argparse.Namespace) -> Record:
    """Run one side of one network in its own process; a failure is a line of text."""
    command = [sys.executable, __file__, "--cell", name, side]
    command += ["--directions", str(options.directions), *(["--tiny"] if options.tiny else [])]
    key = {"network": name, "side": side, "directions": options.directions}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
    except subprocess.TimeoutExpired:
        return key | {"failure": f"more than {options.limit:g} s"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["killed"]
        return key | {"failure": lines[-1][:200]}
    return key | json.loads(done.stdout.splitlines()[-1])


def line(record: Record) -> str:
    """One row of the table."""
    head = f"{record['network']:<12}{record['side']:<24}"
    if "failure" in record:
        return f"{head}{record['failure']}"
    megabytes = record["peak"] / 2**20
    share = record["peak"] / record["model"]
    return (
        f"{head}{record['seconds']:>9.1f} s{megabytes:>9.0f} MB{share:>8.2f} x"
        f"{record['value']:>13.5g}{record['error']:>11.2g}"
    )


def aims(records: Sequence[Record]) -> list[str]:
    """Yield a sentence for each aim; a ratio of at most 1 reaches it."""
    by_key = {(r["network"], r["side"]): r for r in records if "failure" not in r}
    lines = []
    for name in NETWORKS:
        ours, theirs = by_key.get((name, "flatlens")), by_key.get((name, "curvlinops"))
        if ours and theirs and theirs["error"] > 0:
            # An error falls as 1/sqrt(directions): this time would give the same error.
            equal = ours["seconds"] * (ours["error"] / theirs["error"]) ** 2
            lines.append(
                f"{name}: trace at the error of curvlinops: time {equal / theirs['seconds']:.2f}, "
                f"memory {ours['peak'] / max(1, theirs['peak']):.2f} of curvlinops"
            )
        alone = by_key.get((name, "flatlens, input alone"))
        layers = by_key.get((name, "flatlens, layers"))
        if alone and layers:
            ratio = layers["seconds"] / alone["seconds"] / 2
            lines.append(f"{name}: layers: {ratio:.2f} of the aim (twice the input alone)")
        if ours and name.endswith("bf16"):
            lines.append(
                f"{name}: peak with activations {ours['peak'] / ours['model']:.2f} of the model; "
                "the aim is 0.2 beyond activations"
            )
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--directions", type=int, default=8, help="random vectors of each trace")
    parser.add_argument("--tiny", action="store_true", help="a few neurons wide, to try it")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for each process")
    parser.add_argument("--json", type=Path, help="file for one record a line")
    parser.add_argument("--cell", nargs=2, metavar=("NETWORK", "SIDE"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Record]:
    """Measure all sides of all networks and print a table."""
    options = parse(arguments)
    if options.cell:
        print(json.dumps(measured(*options.cell, options.directions, options.tiny)))
        return []
    head = f"{'network':<12}{'side':<24}{'time':>11}{'peak':>12}{'of model':>10}"
    print(f"{head}{'value':>13}{'error':>11}")
    records = []
    for name in options.networks:
        for side in options.sides:
            records.append(in_a_process(name, side, options))
            print(line(records[-1]), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
    print("\n".join(aims(records)))
    return records


if __name__ == "__main__":
    main()
