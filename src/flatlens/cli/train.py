"""``flatlens train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flatlens.cli.options import NO_OPTIONS, Json, Quiet, TrainOptions, Trust, show_progress
from flatlens.cli.outputs import check_output_folder
from flatlens.cli.printing import as_json_text, cell, print_table
from flatlens.training.options import chosen

EXAMPLES = """Examples:
  flatlens train --model mlp --data fashion-mnist --lr 0.1 --steps 30000
  flatlens train --model vgg --data cifar10 --classes 0 1 --measure every:1000 --out runs/vgg
  flatlens train --config vgg.toml --seed 3"""


def train(
    *,
    out: Path | None = None,
    config: Path | None = None,
    trust: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
    given: Annotated[TrainOptions, Parameter(name="*")] = NO_OPTIONS[0],
) -> None:
    """Train a network and measure it on the way; a run that was stopped continues where it was.

    Parameters
    ----------
    out
        The folder of the run; by default one below runs, named after the settings.
    config
        A TOML file with any of the settings below; options on the command line override it.
    trust
        Run the code of a model factory, or of own quantities, that the TOML file names.
    as_json
        Print the last record as one JSON object instead of a table.
    quiet
        Show no progress and print nothing but errors.
    """
    from flatlens.training.config import Config, read_toml
    from flatlens.training.own_quantities import own_names
    from flatlens.training.train import train
    from flatlens.training.trust import check_trusted, import_factory

    base = {} if config is None else read_toml(config)
    options = chosen(given)
    settings = Config.from_dict(base | options, str(config))
    named = {str(options.get("model", Config().model))}
    check_trusted([settings.model], str(config), trust=trust, named=named)
    own_quantities = own_names(settings.quantities)
    check_trusted(
        own_quantities,
        str(config),
        trust=trust,
        named=options.get("quantities") or (),
        option="quantities",
    )
    folder = Path("runs") / settings.name if out is None else out
    check_output_folder(folder)
    for name in (settings.model, *own_quantities):
        import_factory(name, Path.cwd())
    last = train(settings, folder, progress=show_progress(quiet)).to_dict("records")[-1]
    if quiet:
        return
    if as_json:
        print(as_json_text(last))
        return
    shown = [k for k in map(str, last) if "." not in k]  # not both sides of every inequality
    print_table([[k, cell(k, float(last[k]))] for k in shown])
    print(f"\nRun: {folder}")
