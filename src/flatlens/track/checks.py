"""Check the arguments of a tracker; each message names the argument."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from flatlens.arguments import check_choice, real_number, short_repr
from flatlens.errors import FlatlensError
from flatlens.losses import get_loss
from flatlens.passes.request import PRECISIONS
from flatlens.runs import Run
from flatlens.track.folders import EXIST, RunTarget
from flatlens.track.schedules import Schedule
from flatlens.track.sinks.base import Sink

# Options of ``measure`` that a tracker handles itself.
OWN_OPTIONS = {"model", "x", "y", "quantities", "n"}


def check_model(model: Any) -> None:
    """Raise if the model is not a module."""
    if not isinstance(model, nn.Module):
        raise FlatlensError(f"model is a {type(model).__name__}, not a torch.nn.Module")


def check_options(options: Mapping[str, Any], of_measure: set[str]) -> None:
    """Raise for options that ``measure`` does not have."""
    known = of_measure - OWN_OPTIONS
    if unknown := sorted(options.keys() - known):
        raise FlatlensError(
            f"Tracker has no option {unknown[0]!r}; measure has {', '.join(sorted(known))}"
        )


def check_overhead(max_overhead: Any, distributed: bool) -> None:
    """Raise if the limit is not a share, or if processes would apply it differently."""
    if max_overhead is None:
        return
    if not 0 < real_number("max_overhead", max_overhead) <= 1:
        raise FlatlensError(f"max_overhead={max_overhead} is not a share; give 0.1 for 10 %")
    if distributed:
        raise FlatlensError("max_overhead may choose otherwise in each process; leave it out")


def sink_list(sinks: Any) -> list[Sink]:
    """Return the sinks as a list."""
    if not isinstance(sinks, Sequence) or not all(isinstance(sink, Sink) for sink in sinks):
        raise FlatlensError(f"sinks={short_repr(sinks)} is not a list of sinks; give [CSV(path)]")
    return list(sinks)


def schedule_list(when: Any) -> list[Schedule]:
    """Return one schedule or several as a list."""
    schedules = [when] if callable(when) or not isinstance(when, Sequence) else list(when)
    if not schedules or not all(callable(schedule) for schedule in schedules):
        raise FlatlensError(
            f"when={short_repr(when)} is not a schedule; give every(200) or several in a list"
        )
    return schedules


def run_target(
    run: Any, exist: Any, config: Any, loss: Any, precision: Any = None
) -> Run | RunTarget | None:
    """Return where records go.

    Args:
        run: an open run, a path, or None.
        exist: what to do if the folder has records.
        config: settings of the training.
        loss: the option ``loss`` of ``measure``, or None for its default.
        precision: the option ``precision`` of ``measure``, or None for its default.

    Returns:
        The open run, the folder to open at the first write, or None.

    Raises:
        FlatlensError: if an argument has the wrong type.

    Example:
        >>> run_target("runs/a", "number", {"lr": 0.1}, "cross_entropy").measured
        {'measured_loss': 'cross_entropy'}
    """
    if exist not in EXIST:
        raise FlatlensError(f"exist={exist!r} is unknown; use one of {', '.join(EXIST)}")
    checked_config = _config(config)
    measured = {"measured_loss": loss_name(loss)}
    if precision is not None:
        check_choice("precision", precision, PRECISIONS)
    if precision == "model":
        measured["measured_precision"] = precision
    if isinstance(run, Run):
        if config is not None:
            raise FlatlensError("config belongs to the open run; give it to Run.open instead")
        return run
    if run is None:
        return None
    if not isinstance(run, (str, Path)) or not str(run):
        raise FlatlensError(f"run={short_repr(run)} is neither a path nor a Run")
    return RunTarget(Path(run), exist, checked_config, measured)


def _config(config: Any) -> dict[str, Any] | None:
    if config is None:
        return None
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise FlatlensError(f'config={short_repr(config)} is not a dict; give {{"lr": 0.1}}')
    try:
        json.dumps(dict(config))
    except (TypeError, ValueError) as error:
        raise FlatlensError(
            f"config holds a value that JSON cannot ({error}); give numbers, text, lists and dicts"
        ) from None
    return dict(config)


def loss_name(loss: Any) -> str:
    """Return the name of a loss as ``measure`` understands it.

    >>> loss_name(None), loss_name("cross_entropy:0.1")
    ('half_squared', 'cross_entropy:0.1')
    """
    if loss is not None and not isinstance(loss, str) and not callable(loss):
        raise FlatlensError(f"loss={short_repr(loss)} is neither a name nor a function of (f, y)")
    chosen = get_loss("half_squared" if loss is None else loss)
    smoothing = f":{chosen.label_smoothing:g}" if chosen.label_smoothing else ""
    return f"{chosen.name}{smoothing}"


def check_state(state: Any) -> None:
    """Raise if ``state`` is not a result of ``state_dict``."""
    valid = (
        isinstance(state, Mapping)
        and isinstance(state.get("steps"), int)
        and isinstance(state.get("records"), Sequence)
        and all(isinstance(r, Mapping) and "step" in r for r in state["records"])
        and isinstance(state.get("run"), (str, type(None)))
    )
    if not valid:
        raise FlatlensError(f"state={short_repr(state)} is not the state_dict of a Tracker")
