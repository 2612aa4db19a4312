"""The command line: `flatlens demo` and the others, each with its own `--help`.

torch, pandas and matplotlib take seconds to import, so each command imports what it needs when
it runs, and `flatlens --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number

from flatlens.errors import FlatlensError
from flatlens.training.options import LISTS, chosen, options

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Natural = Annotated[int, Parameter(validator=Number(gte=0))]
AboveZero = Annotated[float, Parameter(validator=Number(gt=0))]
Json = Annotated[bool, Parameter("--json", negative="")]
if TYPE_CHECKING:
    TrainOptions: TypeAlias = Any
    SweepOptions: TypeAlias = Any
    NO_OPTIONS: Any
else:
    TrainOptions = options("TrainOptions")
    SweepOptions = options("SweepOptions", many=True)
    # not None: cyclopts validates with pydantic where that is installed, which refuses None
    NO_OPTIONS = TrainOptions(), SweepOptions()

app = App(
    name="flatlens",
    help="How flat is the loss, how compressed is the representation, "
    "and what does one force on the other?",
    version=lambda: version("flatlens"),
    help_format="plaintext",
    help_epilogue="""Examples:
  flatlens demo
  flatlens measure mymodel:build --checkpoint weights.pt --data digits
  flatlens train --model mlp --data fashion-mnist --lr 0.1
  flatlens sweep --model mlp --data fashion-mnist --lr 0.05 0.1 0.2 --seeds 5 --out runs/mlp
  flatlens report runs/mlp""",
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
    from flatlens.reproduction.demo import main

    main(out, steps, seed, as_json)


@app.command(
    help_epilogue="""Examples:
  flatlens measure mymodel:build --checkpoint weights.pt --data npz:images.npz
  flatlens measure mymodel:Net --data digits --n 200 --json
  flatlens measure timm:vit_tiny_patch16_224 --data "folder:photos?size=224" --n 10
  flatlens measure vit --data "cifar10?classes=0,1" --method sketch --rtol 0.01"""
)
def measure(
    model: str,
    /,
    *,
    data: str,
    checkpoint: Path | None = None,
    n: Positive | None = None,
    quantities: Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")] = None,
    method: Literal["auto", "exact", "sketch"] = "auto",
    loss: str = "half_squared",
    directions: Positive = 32,
    seed: Natural = 0,
    rtol: AboveZero | None = None,
    budget: AboveZero | None = None,
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
        The network as package.module:factory; the factory is called without arguments, and a
        torch.nn.Module is taken as it is. Modules in the current folder are found.
        timm:NAME is a model of timm with random weights; mlp, lenet, vgg, vgg11, resnet18 and vit
        are those of flatlens train.
    data
        npz:FILE with arrays x and y (class labels or float targets), folder:PATH with images as
        class/*.png, digits (embedded), fashion-mnist, cifar10 (see flatlens data),
        synthetic:gaussians or synthetic:teacher. Options follow a question mark, as in
        "cifar10?classes=0,1" or "folder:photos?size=64".
    checkpoint
        Weights: safetensors, or a state dict saved with torch.save (tensors only).
        Without it the network is measured as the factory makes it.
    n
        Number of samples, the first ones of the data. By default 100, or all if there are fewer.
    quantities
        Names of those wanted, or all: also the ones that take passes of their own, such as
        hessian_trace. By default all that one pass gives.
    method
        exact: one product per output. sketch: random directions, with standard errors.
        auto: exact unless that is far dearer.
    loss
        half_squared (the paper's), squared, mean_squared, cross_entropy or binary_cross_entropy,
        with label smoothing as in cross_entropy:0.1. Its Gauss-Newton form is measured, too.
    directions
        Random output directions of a sketch.
    seed
        Seed of everything random in a measurement, and of weights that no checkpoint gives.
    rtol
        Relative standard error that a sketch goes on to, and estimates such as hessian_trace.
    budget
        Seconds that an exact pass may take under auto.
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
    import torch

    import flatlens as fl
    from flatlens.training.placement import subject

    sys.path.insert(0, str(Path.cwd()))  # a console script does not look there by itself
    torch.manual_seed(seed)
    network, x, y = subject(model, checkpoint, data, n, device, dtype)
    key = int(output) if output is not None and output.isdecimal() else output
    m = fl.measure(
        network, x, y, quantities=quantities or "default", method=method, loss=loss, output=key,
        weight_norm=weight_norm, directions=directions, seed=seed, rtol=rtol, budget=budget,
    )  # fmt: skip
    print(m.to_json() if as_json else m)


@app.command(
    help_epilogue="""Examples:
  flatlens train --model mlp --data fashion-mnist --lr 0.1 --steps 30000
  flatlens train --model vgg --data cifar10 --classes 0 1 --measure every:1000 --out runs/vgg
  flatlens train --config vgg.toml --seed 3"""
)
def train(
    *,
    out: Path | None = None,
    config: Path | None = None,
    as_json: Json = False,
    given: Annotated[TrainOptions, Parameter(name="*")] = NO_OPTIONS[0],
) -> None:
    """Train a network and measure it on the way; a run that was stopped goes on where it was.

    Parameters
    ----------
    out
        Folder of the run. By default one below runs, named after the settings.
    config
        TOML file with any of the settings below; options on the command line come before it.
    as_json
        Print the last record as one JSON object instead of a table.
    """
    from flatlens.measurement import columns, number
    from flatlens.training.config import Config, read_toml
    from flatlens.training.train import train

    sys.path.insert(0, str(Path.cwd()))
    base = {} if config is None else read_toml(config)
    settings = Config.from_dict(base | chosen(given), str(config))
    folder = Path("runs") / settings.name if out is None else out
    last = train(settings, folder).to_dict("records")[-1]
    if as_json:
        print(_json(last))
        return
    shown = [k for k in map(str, last) if "." not in k]  # not both sides of every inequality
    print("\n".join(columns([[k, number(float(last[k]))] for k in shown])))
    print(f"\nRun: {folder}")


@app.command(
    help_epilogue="""Examples:
  flatlens sweep --model mlp --data fashion-mnist --lr 0.05 0.1 0.2 --seeds 5 --out runs/mlp
  flatlens sweep sweep.toml --out runs/vgg
  flatlens sweep sweep.toml --out runs/vgg --engine dask --address tcp://10.0.0.1:8786

sweep.toml holds a table [base] of settings and a table [grid] of lists (or several [[grid]]):
  [base]
  model = "vgg"
  data = "cifar10"
  classes = [0, 1]
  [grid]
  lr = [0.05, 0.1, 0.2]
  seed = [0, 1, 2]"""
)
def sweep(
    file: Path | None = None,
    /,
    *,
    out: Path = Path("runs"),
    seeds: Positive | None = None,
    engine: Literal["local", "dask"] = "local",
    workers: Positive | None = None,
    address: str | None = None,
    retries: Natural = 1,
    gpus: Positive | None = None,
    as_json: Json = False,
    given: Annotated[SweepOptions, Parameter(name="*")] = NO_OPTIONS[1],
) -> int:
    """Train every combination of settings, skip what is done, and go on with what was stopped.

    An option with several values is an axis of the grid. One value holds for all runs.

    Parameters
    ----------
    file
        TOML file with the tables [base] and [grid]; options come before it.
    out
        Folder for the runs, one folder each.
    seeds
        Number of seeds: 0, 1, 2 and so on.
    engine
        local: processes of this machine. dask: a Dask scheduler.
    workers
        Number of local processes. By default as many as the machine has cores.
    address
        Address of a running Dask scheduler. Without it one is started for the sweep.
    retries
        How often a run that failed is tried again.
    gpus
        GPUs that each run takes of a Dask worker that declares the resource GPU.
    as_json
        Print one JSON object with the last record of every run instead of a table.
    """
    from flatlens.measurement import columns, number
    from flatlens.training.sweep import SweepError, read_sweep, sweep

    sys.path.insert(0, str(Path.cwd()))
    base, grids = ({}, [{}]) if file is None else read_sweep(file)
    for name, value in chosen(given).items():
        axis = isinstance(value, list) and name not in LISTS
        if axis and len(value) > 1:
            grids = [{**grid, name: value} for grid in grids]
        else:
            base[name] = value[0] if axis else value
            grids = [{k: v for k, v in grid.items() if k != name} for grid in grids]
    if seeds is not None:
        if "seed" in chosen(given):
            raise FlatlensError("Give either --seeds or --seed, not both.")
        grids = [{**grid, "seed": range(seeds)} for grid in grids]
    try:
        frame = sweep(
            base,
            grids,
            out=out,
            engine=engine,
            workers=workers,
            address=address,
            retries=retries,
            resources=None if gpus is None else {"GPU": gpus},
        )
    except SweepError as error:
        return _refuse(str(error), FAILED)
    last = frame.groupby("run").tail(1).to_dict("records")
    if as_json:
        print(_json({row["run"]: row for row in last}))
        return 0
    shown = [k for k in ("train_loss", "sharpness", "nmls", "mls", "log_volume") if k in frame]
    rows = [[row["run"], *(number(row[k]) for k in shown)] for row in last]
    print("\n".join(columns([["run", *shown], *rows])))
    if busy := frame.attrs["busy"]:
        print(f"\nLeft to another process that is writing them: {', '.join(busy)}")
    return 0


@app.command(
    help_epilogue="""Examples:
  flatlens reproduce --list --scale desk
  flatlens reproduce fig1 --scale smoke --out smoke
  flatlens reproduce all --scale desk --out desk
  flatlens reproduce --from docs/reproduction/records.jsonl.gz --out redrawn"""
)
def reproduce(
    *names: str,
    scale: Literal["smoke", "desk", "night", "paper"] = "desk",
    out: Path = Path("reproduction"),
    workers: Positive | None = None,
    engine: Literal["local", "dask"] = "local",
    address: str | None = None,
    train: Annotated[bool, Parameter(negative="--no-train", name="", show_default=False)] = True,
    source: Annotated[Path | None, Parameter("--from")] = None,
    show: Annotated[bool, Parameter("--list", negative="")] = False,
) -> int:
    """Redraw the paper: train, measure, draw, and give a verdict on each of its claims.

    A call that was stopped goes on where it was; figures share their networks.

    Parameters
    ----------
    names
        fig1, fig2, g4, g5, g6, g7, h8, h9, all (these eight), d3 (a longer training),
        interventions (networks trained to be flatter), or fig3 (vision transformers).
    scale
        smoke: seconds, no data needed. desk: fewer steps, images and seeds. paper: as published.
    out
        Folder for runs, figures, claims and records.
    workers
        Number of local processes. By default as many as the machine has cores.
    engine
        local: processes of this machine. dask: a Dask scheduler.
    address
        Address of a running Dask scheduler. Without it one is started.
    train
        Train nothing, draw what is there.
    source
        File of records to redraw from, without any training; without names all that it holds.
    show
        List the recipes with the time that each would take on this machine.
    """
    from flatlens.measurement import columns
    from flatlens.reproduction import experiments
    from flatlens.reproduction import reproduce as module
    from flatlens.reproduction.timing import listing

    if show:
        print("\n".join(columns(listing(scale, workers))))
        return 0
    if not names and source is None:
        raise FlatlensError("Name what to reproduce, such as fig1 or all; see --list.")
    made = experiments.reproduce(
        names, out=out, scale=scale, train=train, source=source, workers=workers, engine=engine,
        address=address,
    )  # fmt: skip
    if len(made.claims):
        table = module.overview(made.claims).drop(columns="says")
        print("\n".join(columns([[*table], *table.to_numpy().tolist()])))
        print()
    print("\n".join(map(str, made.files)))
    return _refuse("; ".join(made.problems), FAILED) if made.problems else 0


@app.command(
    help_epilogue="""Examples:
  flatlens zoo --models '*vit*' --images photos --out runs/zoo
  flatlens zoo --models deit_tiny_patch16_224 --weights weights --images photos --n 16
  flatlens zoo --models '*levit*' '*mobilevit*' --list"""
)
def zoo(
    *,
    models: Annotated[list[str], Parameter(consume_multiple=True, negative="")],
    images: Path | None = None,
    n: Positive = 100,
    out: Path = Path("runs/zoo"),
    pretrained: Annotated[bool, Parameter(negative="--random")] = True,
    weights: Path | None = None,
    outputs: Literal["sigmoid", "logits"] = "sigmoid",
    directions: Positive = 8,
    perturbations: Natural = 4,
    paper: Annotated[bool, Parameter(negative="")] = False,
    max_se: AboveZero = 0.15,
    seed: Natural = 0,
    engine: Literal["local", "dask"] = "local",
    workers: Positive | None = None,
    address: str | None = None,
    threads: Positive = 1,
    device: str = "cpu",
    show: Annotated[bool, Parameter("--list", negative="")] = False,
    as_json: Json = False,
) -> int:
    """Measure vision models of timm by name: normalised MLS against adaptive sharpness, Figure 3.

    Models that are done are skipped; those that cannot be measured are told at the end.

    Parameters
    ----------
    models
        Names of timm; wildcards take the models with 1000 classes and at most 384 pixels.
    images
        Folder of images; names that begin with the class number (012_cat.jpg) give top-1, too.
    n
        Number of images.
    out
        Folder for the records, one folder for each model, and the figure.
    pretrained
        With the published weights (the default), or as initialised.
    weights
        Folder with weights in files named after the models: safetensors or torch state dicts.
    outputs
        The sigmoid of the logits, as in the paper, or the logits.
    directions
        Random output directions per image.
    perturbations
        Pairs of perturbed weights per image for the sampled sharpness, Eq. 38; 0 for none.
    paper
        Also find both axes with the estimators of the paper, Eqs. 46 and 47.
    max_se
        Drop models whose relative standard error on either axis is not below this.
    seed
        Seed of everything random.
    engine
        local: processes of this machine. dask: a Dask scheduler.
    workers
        Number of local processes. By default as many as the machine has cores.
    address
        Address of a running Dask scheduler. Without it one is started for the zoo.
    threads
        CPU threads of each process.
    device
        Where to compute: cpu, cuda, cuda:1, mps.
    show
        List the models that would run, with a rough estimate of memory and time.
    as_json
        Print one JSON object instead of a table.
    """
    from flatlens.figures import save
    from flatlens.figures import zoo as draw
    from flatlens.figures.zoo import FEWEST, claims
    from flatlens.measurement import columns
    from flatlens.zoo import zoo as module

    source = str(weights) if weights else "pretrained" if pretrained else "random"
    if show:
        print("\n".join(columns(module.listing(models, source, n))))
        return 0
    if images is None:
        raise FlatlensError("Give --images, a folder of images to measure the models on.")
    settings = module.Zoo(
        str(images), n, source, outputs, directions, perturbations, paper=paper, seed=seed,
        threads=threads, device=device,
    )  # fmt: skip
    frame = module.zoo(models, settings, out=out, engine=engine, workers=workers, address=address)
    good, dropped = module.kept(frame, max_se)
    told = module.report(frame, good, dropped)
    if len(good) >= FEWEST:
        told["claims"] = {} if source == "random" else claims(good)  # they are on trained models
        told["figure"] = str(save(draw(good), out / "figure3")["pdf"])
    print(_json(told) if as_json else module.text(told))
    return FAILED if told["skipped"] else 0


@app.command(
    help_epilogue="""Examples:
  flatlens report runs/mlp -o report.html
  flatlens report runs/mlp --measure
  flatlens report docs/reproduction/records.jsonl.gz
  flatlens report runs --measurements resnet.json vit.json"""
)
def report(
    runs: Path,
    /,
    *,
    out: Annotated[Path, Parameter(("--out", "-o"))] = Path("report.html"),
    measure: Annotated[bool, Parameter(negative="")] = False,
    measurements: Annotated[
        list[Path] | None, Parameter(consume_multiple=True, negative="")
    ] = None,
    max_se: AboveZero = 0.15,
) -> None:
    """Write all that runs hold into one interactive HTML file that needs no network.

    Parameters
    ----------
    runs
        Folder of runs, what flatlens reproduce made (its folder, or its records.jsonl.gz), or a
        zoo's folder.
    out
        The file to write.
    measure
        Measure the last checkpoint of one run of each configuration, for the view by layers.
    measurements
        Files that flatlens measure --json gave, for the same view.
    max_se
        Leave out zoo models whose relative standard error on either axis is not below this.
    """
    from flatlens.report import report

    sys.path.insert(0, str(Path.cwd()))  # where a run's own model may be
    print(report(runs, out, measure=measure, measurements=measurements or (), max_se=max_se))


data_app = App(
    name="data",
    help="List, fetch and verify the published data sets (fashion-mnist, cifar10).",
    help_epilogue="""Examples:
  flatlens data list
  flatlens data fetch fashion-mnist
  flatlens data verify cifar10""",
)
app.command(data_app)


@data_app.command(
    name="list",
    help_epilogue="""Example:
  flatlens data list --json""",
)
def list_data(*, as_json: Json = False) -> None:
    """List the published data sets and where they were found.

    Parameters
    ----------
    as_json
        Print one JSON object: the folder of each data set, or null.
    """
    from flatlens.data.fetch import PUBLISHED, find

    found = {name: find(name) for name in PUBLISHED}
    if as_json:
        print(json.dumps({name: folder and str(folder) for name, folder in found.items()}))
        return
    for name, folder in found.items():
        print(f"{name:15}{PUBLISHED[name].what}: {folder or 'not here'}")


@data_app.command(
    help_epilogue="""Example:
  flatlens data fetch fashion-mnist"""
)
def fetch(name: str, /) -> None:
    """Download a data set into the cache folder and check it; carries on where it was stopped.

    Parameters
    ----------
    name
        fashion-mnist or cifar10.
    """
    from flatlens.data.fetch import fetch

    print(fetch(name))


@data_app.command(
    help_epilogue="""Example:
  flatlens data verify cifar10"""
)
def verify(name: str, /, *, as_json: Json = False) -> None:
    """Compare the files of a data set with the published checksums; exit code 2 if any differs.

    Parameters
    ----------
    name
        fashion-mnist or cifar10.
    as_json
        Print one JSON object: good, missing or different for each file.
    """
    from flatlens.data.fetch import verify

    files = verify(name)
    if as_json:
        print(json.dumps({str(path): status for path, status in files.items()}))
    else:
        for path, status in files.items():
            print(f"{status:10}{path}")
    wrong = sum(status != "good" for status in files.values())
    if wrong:
        raise FlatlensError(f"{wrong} of {len(files)} files of {name} are not the published ones.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; a refusal is one sentence on standard error and exit code 2."""
    try:
        code = app(argv, exit_on_error=False, print_error=False)
        sys.stdout.flush()  # a reader that left is noticed here, not at exit
    except (FlatlensError, CycloptsError) as error:
        return _refuse(str(error))
    except BrokenPipeError:  # the reader (`| head`) left: nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if told := vars(error).get("told"):  # raised by the factory of a model
            return _refuse(told)
        if not isinstance(error, OSError):
            raise
        name = f" {error.filename}" if error.filename else ""  # that the user named
        return _refuse(f"Cannot use{name}: {error.strerror or error}.")
    return code if isinstance(code, int) else 0


def _json(values: dict[Any, Any]) -> str:
    """JSON has no infinities: they become strings."""
    plain = json.dumps(values)
    return json.dumps(json.loads(plain, parse_constant=lambda c: str(float(c))), allow_nan=False)


def _refuse(reason: str, code: int = BAD_INPUT) -> int:
    sentence = " ".join(reason.split()).rstrip(".")
    stop = "" if sentence.endswith("?") else "."
    print(f"flatlens: {sentence}{stop}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
