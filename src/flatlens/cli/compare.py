"""``flatlens compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.figures import check_figure, write_figure
from flatlens.cli.networks import load_network, load_samples, own_or_named
from flatlens.cli.options import Json, Natural, Positive, Trust, Words, words_of
from flatlens.cli.printing import as_json_text
from flatlens.errors import FlatlensError, counted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flatlens.measurement.compared import Side
    from flatlens.measurement.comparison import Comparison

Kind = Literal["measurement", "run", "checkpoint"]
EXAMPLES = """Examples:
  flatlens compare runs/sgd runs/sam
  flatlens compare sgd.pt sam.pt --model mymodel:build --data digits --figure compare.pdf
  flatlens compare before.json after.json --json

The files before.json and after.json are what flatlens measure --save, or m.save, writes."""


def compare(
    *sources: Path,
    model: Words = None,
    data: str | None = None,
    key: str | None = None,
    n: Positive | None = None,
    quantities: Words = None,
    method: Literal["auto", "exact", "sketch"] = "auto",
    loss: str = "half_squared",
    seed: Natural = 0,
    device: str = "cpu",
    trust: Trust = False,
    figure: Annotated[Path | None, Parameter(("--figure", "-f"))] = None,
    as_json: Json = False,
) -> None:
    """Compare networks: values, ratios to the first, and verdicts that differ.

    Parameters
    ----------
    sources
        Two or more of these: a saved measurement (m.save), a run folder, or a checkpoint, which
        needs --model and --data. A run folder with a checkpoint is measured at that checkpoint. Of
        other run folders the last record is compared.
    model
        The network of the checkpoints, as in flatlens measure: one for all, or one for each. It
        also names the model factory that a run folder may run.
    data
        The data set that checkpoints are measured on: digits, npz:FILE, folder:PATH and others.
    key
        The place of the weights inside the checkpoints; by default the usual places are tried.
    n
        The number of samples for checkpoints, drawn at random with --seed; by default 100, or all
        if there are fewer.
    quantities
        The names of the quantities to measure on checkpoints, and own functions of a Probe as
        package.module:function; by default everything that one pass gives.
    method
        How to measure checkpoints: exact, sketch or auto.
    loss
        The loss whose Gauss-Newton form is measured on checkpoints.
    seed
        The seed of the samples and of everything random in a measurement.
    device
        The device to measure checkpoints on: cpu, cuda or cuda:1.
    trust
        Run the code of model factories that run folders name.
    figure
        A file for a figure of the ratios: .png, .pdf or .svg. It must be new or a figure that
        flatlens wrote.
    as_json
        Print one JSON object instead of a table.
    """
    from flatlens.measurement.comparison import Comparison
    from flatlens.report.measurement_files import label

    _check_sources(sources)
    if figure is not None:
        check_figure(figure)
    kinds = {path: _kind(path) for path in sources}
    checkpoints = [path for path, kind in kinds.items() if kind == "checkpoint"]
    models = _models_of(checkpoints, words_of(model), data)
    options = {"quantities": own_or_named(quantities), "method": method, "loss": loss, "seed": seed}
    sides: dict[str, Side] = {}
    for path, kind in kinds.items():
        if kind == "measurement":
            side = _saved(path)
        elif kind == "run":
            side = _run(path, words_of(model), trust)
        else:
            network = load_network(models[path], path, key)
            side = _measured(
                network, load_samples(network, str(data), n, seed, device, None), options
            )
        sides[label(path, sources)] = side
    comparison = Comparison(sides)
    if not comparison.quantities:
        raise FlatlensError("The sources have no quantity in common; measure them alike.")
    if figure is not None:
        write_figure(figure, comparison.plot())
    print(_json(comparison) if as_json else comparison)


def _check_sources(sources: Sequence[Path]) -> None:
    if len(sources) < 2:
        raise FlatlensError(
            f"There {'is one source' if sources else 'is no source'} to compare; give two or more "
            "run folders, checkpoints or saved measurements."
        )
    for path in sources:
        if not path.exists():
            raise FlatlensError(f"There is no file or folder {path}.")
        if list(sources).count(path) > 1:
            raise FlatlensError(f"{path} is given twice; give it once.")


def _kind(path: Path) -> Kind:
    """Tell what a path holds; the content decides, not the name."""
    if path.is_dir():
        return "run"
    if not path.is_file():
        raise FlatlensError(
            f"{path} is not a regular file; give a checkpoint or a saved measurement."
        )
    with path.open("rb") as file:
        return "measurement" if file.read(64).lstrip().startswith(b"{") else "checkpoint"


def _models_of(checkpoints: list[Path], models: list[str], data: str | None) -> dict[Path, str]:
    """Return the model of each checkpoint: one for all, or one for each."""
    if not checkpoints:
        return {}
    if not models or data is None:
        raise FlatlensError(
            f"{checkpoints[0]} holds weights only; give --model and --data, so that it can be "
            "measured."
        )
    if len(models) not in (1, len(checkpoints)):
        raise FlatlensError(
            f"There are {counted(len(models), 'model')} for "
            f"{counted(len(checkpoints), 'checkpoint')}; give one model for all, or one for each."
        )
    return dict(zip(checkpoints, models * (len(checkpoints) // len(models)), strict=True))


def _saved(path: Path) -> Side:
    from flatlens.measurement import Measurement
    from flatlens.measurement.compared import Side

    return Side.of_measurement(Measurement.load(path))


def _run(folder: Path, named: list[str], trust: bool) -> Side:
    """Measure a run at its checkpoint; without a checkpoint take its last record."""
    from flatlens.measurement.compared import Side
    from flatlens.runs.layout import CHECKPOINT, RECORDS
    from flatlens.runs.tables import read_run
    from flatlens.training.measure_run import measure_run
    from flatlens.training.trust import check_trusted, import_factory

    if not (folder / RECORDS).is_file():
        raise FlatlensError(
            f"{folder} is not a run folder (no {RECORDS}); name the folder of one run."
        )
    run = read_run(folder, folder.name)
    if (folder / CHECKPOINT).is_file() and "model" in run.config:
        model = str(run.config["model"])
        check_trusted([model], str(folder), trust=trust, named=named)
        import_factory(model, Path.cwd())
        return Side.of_measurement(measure_run(folder))
    if not run.records:
        raise FlatlensError(f"{folder} has no records yet.")
    return Side.of_record(run.records[-1], run.config)


def _measured(network: nn.Module, samples: tuple[Tensor, Tensor], options: dict[str, Any]) -> Side:
    import flatlens as fl
    from flatlens.measurement.compared import Side

    return Side.of_measurement(fl.measure(network, *samples, **options))


def _json(comparison: Comparison) -> str:
    """Return the values, errors, ratios, verdicts that differ and warnings as strict JSON."""
    return as_json_text({
        "values": comparison.values,
        "standard_errors": comparison.errors,
        "ratios": comparison.ratios,
        "ratio_standard_errors": comparison.ratio_errors,
        "differing_verdicts": comparison.differing_verdicts,
        "warnings": comparison.warnings,
    })  # fmt: skip
