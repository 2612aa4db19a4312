"""``flatlens zoo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.exit_codes import BUSY, FAILED
from flatlens.cli.options import (
    AboveZero,
    EngineName,
    Json,
    Natural,
    Positive,
    Quiet,
    Trust,
    show_progress,
)
from flatlens.cli.outputs import check_output_folder
from flatlens.cli.printing import as_json_text, print_table
from flatlens.errors import FlatlensError

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = """Examples:
  flatlens zoo --models '*vit*' --images photos --out runs/zoo
  flatlens zoo --models deit_tiny_patch16_224 --weights weights --images photos --n 16
  flatlens zoo --models '*levit*' '*mobilevit*' --list
  flatlens zoo --models runs/vgg runs/lenet --n 50 --out runs/own-zoo"""


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
    engine: EngineName = "local",
    workers: Positive | None = None,
    address: str | None = None,
    threads: Positive = 1,
    device: str = "cpu",
    trust: Trust = False,
    show: Annotated[bool, Parameter("--list", negative="")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Measure vision models: normalised MLS against adaptive sharpness, Figure 3.

    MLS is the maximum local sensitivity. Finished models are skipped; models that cannot be
    measured are listed at the end.

    Parameters
    ----------
    models
        The names of timm models; wildcards take the models with 1000 classes and at most 384
        pixels. Or folders of runs that flatlens train or sweep wrote, which are measured exactly on
        the first test images of their own data.
    images
        The folder of images; file names that begin with the class number (012_cat.jpg) also give
        the top-1 accuracy.
    n
        The number of images.
    out
        The folder for the records, one folder for each model, and for the figure.
    pretrained
        Take the published weights (the default) or random initial weights.
    weights
        A folder with weights in files named after the models: safetensors or torch state dicts.
    outputs
        The outputs to measure: the sigmoid of the logits, as in the paper, or the logits.
    directions
        The number of random output directions per image.
    perturbations
        The number of pairs of perturbed weights per image for the sampled sharpness, Eq. 38; 0 for
        none.
    paper
        Estimate both axes also with the estimators of the paper, Eqs. 46 and 47.
    max_se
        Drop models whose relative standard error on either axis is not below this number.
    seed
        The seed of everything random.
    engine
        Where to measure: local starts processes on this machine, dask uses a Dask scheduler.
    workers
        The number of worker processes; by default as many as the machine has cores.
    address
        The address of a running Dask scheduler; by default one is started for the zoo.
    threads
        The number of CPU threads of each process.
    device
        The device to compute on: cpu, cuda or cuda:1.
    trust
        Run the code of model factories that run folders name.
    show
        List the models that would run, with a rough estimate of memory and time.
    as_json
        Print one JSON object instead of a table.
    quiet
        Show no progress and print nothing but errors.
    """
    from flatlens.training import timm_models
    from flatlens.zoo import table
    from flatlens.zoo.settings import Zoo
    from flatlens.zoo.trained import trained_folders
    from flatlens.zoo.zoo import zoo

    progress = show_progress(quiet)
    if folders := trained_folders(models):
        source = "trained"
        own = {"perturbations": perturbations, "paper": paper, "outputs": outputs, "seed": seed}
        frame = _trained(folders, images, out, trust, n=n, progress=progress, **own)
    else:
        timm_models.timm()  # a missing package is said before anything else
        source = str(weights) if weights else "pretrained" if pretrained else "random"
        if show:
            print_table(table.listing(models, source, n))
            return 0
        if images is None:
            raise FlatlensError("Give --images, a folder of images to measure the models on.")
        settings = Zoo(
            str(images), n, source, outputs, directions, perturbations, paper=paper, seed=seed,
            threads=threads, device=device,
        )  # fmt: skip
        _check_outputs(out)
        frame = zoo(
            models, settings, out=out, engine=engine, workers=workers, address=address,
            progress=progress,
        )  # fmt: skip
    good, dropped = table.precise_models(frame, max_se)
    figure = _figure(good, out, source) if len(frame) else {}
    summary = table.summary(frame, good, dropped) | figure
    if not quiet:
        print(as_json_text(summary) if as_json else table.text(summary))
    return FAILED if summary["skipped"] else BUSY if summary["busy"] else 0


def _check_outputs(out: Path) -> None:
    from flatlens.zoo.figure_files import check_figures

    check_output_folder(out)
    check_figures(out)


def _trained(
    folders: dict[str, Path], images: Path | None, out: Path, trust: bool, **settings: Any
) -> pd.DataFrame:
    """Measure runs of flatlens train on their own test images."""
    from flatlens.training.trust import check_trusted, import_factory
    from flatlens.zoo.trained import models_of, trained_zoo

    if images is not None:
        raise FlatlensError("Trained runs are measured on their own test images; drop --images.")
    for name, model in models_of(folders).items():
        check_trusted([model], str(folders[name]), trust=trust)
        import_factory(model, Path.cwd())
    _check_outputs(out)
    return trained_zoo(folders, out, **settings)


def _figure(good: pd.DataFrame, out: Path, source: str) -> dict[str, Any]:
    """Draw the figure and judge the claims, as far as there are enough models."""
    from flatlens.figures import save
    from flatlens.figures import zoo as draw
    from flatlens.figures.few_models import few_models
    from flatlens.reproduction.zoo_claims import claims
    from flatlens.zoo.figure_files import FIGURE, note_figures
    from flatlens.zoo.table import FEWEST_CORRELATED

    if good.empty:
        note = "There is no figure, because no model is left; raise --max-se, or give more images."
        return {"notes": [note]}
    enough = len(good) >= FEWEST_CORRELATED
    paths = save(draw(good) if enough else few_models(good), out / FIGURE)
    note_figures(out, paths.values())
    result: dict[str, Any] = {"figure": str(paths["pdf"])}
    if not enough:
        count = "1 model is" if len(good) == 1 else f"{len(good)} models are"
        result["notes"] = [
            f"There is no correlation, because {count} too few; it needs {FEWEST_CORRELATED}."
        ]
    elif source != "random":  # the claims of the paper are about trained models
        result["claims"] = claims(good)
    return result
