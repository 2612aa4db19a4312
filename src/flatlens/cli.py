"""The command line: `flatlens demo`, `flatlens measure`.

torch, pandas and matplotlib take seconds to import, so each command imports what it needs when
it runs, and `flatlens --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number

from flatlens.errors import FlatlensError

BAD_INPUT, INTERRUPTED = 2, 130

Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Natural = Annotated[int, Parameter(validator=Number(gte=0))]
Json = Annotated[bool, Parameter("--json", negative="")]

app = App(
    name="flatlens",
    help="How flat is the loss, how compressed is the representation, "
    "and what does one force on the other?",
    version=lambda: version("flatlens"),
    help_format="plaintext",
    help_epilogue="""Examples:
  flatlens demo
  flatlens measure mymodel:build --checkpoint weights.pt --data digits""",
    suppress_keyboard_interrupt=False,  # main turns Ctrl-C into its exit code
    result_action="return_value",
)


@app.command(
    help_epilogue="""Example:
  flatlens demo --out figures --seed 1"""
)
def demo(
    *,
    out: Path = Path("flatlens-demo"),
    steps: Positive = 10_000,
    seed: Natural = 0,
    as_json: Json = False,
) -> None:
    """Train a small network on digits with two learning rates and follow flatness and compression.

    Takes less than a minute. Prints a table and saves a figure (PNG and PDF).

    Parameters
    ----------
    out
        Folder for the figure; made if it is not there.
    steps
        SGD steps of each run.
    seed
        Seed of the initial weights and of the order of the batches.
    as_json
        Print one JSON object with every record instead of tables.
    """
    from flatlens.experiments.demo import main

    main(out, steps, seed, as_json)


@app.command(
    help_epilogue="""Examples:
  flatlens measure mymodel:build --checkpoint weights.pt --data npz:images.npz
  flatlens measure mymodel:Net --data digits --n 200 --json"""
)
def measure(
    model: str,
    /,
    *,
    data: str,
    checkpoint: Path | None = None,
    n: Positive | None = None,
    output: str | None = None,
    weight_norm: Literal["operator", "kernel", "frobenius"] = "operator",
    device: str = "cpu",
    dtype: Literal["float32", "float64", "float16", "bfloat16"] | None = None,
    as_json: Json = False,
) -> None:
    """Measure the sharpness and compression of anyone's network on anyone's data.

    Parameters
    ----------
    model
        The network as package.module:factory; the factory is called without arguments.
        Modules in the current folder are found.
    data
        npz:FILE with arrays x and y (class labels or float targets), digits (embedded),
        fashion-mnist or cifar10 (files in the folder FLATLENS_DATA).
    checkpoint
        Weights: safetensors, or a state dict saved with torch.save (tensors only).
        Without it the network is measured as the factory makes it.
    n
        Number of samples, the first ones of the data. By default 100, or all if there are fewer.
    output
        Key or position of the tensor to measure where the network gives a dict or a tuple.
    weight_norm
        Norm of a layer's weight that enters the quantities.
    device
        Where to compute: cpu, cuda, cuda:1, mps.
    dtype
        Precision of weights and inputs. By default that of the network.
    as_json
        Print one JSON object instead of tables.
    """
    import flatlens as fl
    from flatlens.experiments.subject import subject

    sys.path.insert(0, str(Path.cwd()))  # a console script does not look there by itself
    network, x, y = subject(model, checkpoint, data, n, device, dtype)
    key = int(output) if output is not None and output.isdecimal() else output
    m = fl.measure(network, x, y, output=key, weight_norm=weight_norm)
    print(m.to_json() if as_json else m)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; a refusal is one sentence on standard error and exit code 2."""
    try:
        app(argv, exit_on_error=False, print_error=False)
        sys.stdout.flush()  # a reader that left is noticed here, not at exit
    except (FlatlensError, CycloptsError) as error:
        return _refuse(str(error))
    except BrokenPipeError:  # the reader (`| head`) left: nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file or folder that the user named
        name = f" {error.filename}" if error.filename else ""
        return _refuse(f"Cannot use{name}: {error.strerror or error}.")
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _refuse(reason: str) -> int:
    sentence = " ".join(reason.split()).rstrip(".")
    stop = "" if sentence.endswith("?") else "."
    print(f"flatlens: {sentence}{stop}", file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
