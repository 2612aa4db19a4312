"""Choose the arguments of a model to differentiate with respect to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from flatlens.capture.inputs import Inputs
from flatlens.errors import FlatlensError
from flatlens.passes.forward import Forward


@dataclass(frozen=True)
class InputChoice:
    """The arguments to differentiate with respect to, the same for all samples.

    Attributes:
        differentiated: their keys.
        watched: keys of floating-point arguments that the output does not depend on.
        names: names of the arguments that stand for the network's input.
        note: names the floating-point arguments that are left out, and why; or "".
    """

    differentiated: Sequence[Any]
    watched: Sequence[Any]
    names: list[str]
    note: str = ""

    def apply(self, inputs: Inputs) -> Inputs:
        """Return the same arguments with this choice."""
        return inputs.choosing(self.differentiated, self.watched)

    def check(self, forward: Forward) -> None:
        """Raise if the output of a sample depends on an argument that was left out.

        Raises:
            FlatlensError: if another sample's output did not depend on that argument.
        """
        for key, edge in forward.watched:
            if edge.node in forward.graph.nodes:
                raise FlatlensError(
                    f"the output of some samples depends on the input {key!r} and that of others "
                    f"does not; say with inputs= whether it is an input"
                )


def choose_inputs(
    model: nn.Module,
    inputs: Inputs,
    asked: Sequence[str | int] | None,
    run: Callable[[Inputs], Forward],
) -> tuple[InputChoice, Forward]:
    """Choose the arguments from a forward pass of one sample.

    Args:
        model: the model.
        inputs: one sample.
        asked: the arguments that the user chose, or None.
        run: the forward pass.

    Raises:
        FlatlensError: if a chosen argument does not exist or does not reach the output.
    """
    names = argument_names(model, inputs)
    if asked is not None:
        keys = [key for name in asked for key in _keys(name, names)]
        return _as_asked(inputs.choosing(keys), keys, names, run)
    solo = run(inputs)
    edges = zip(inputs.at(inputs.differentiated, True), solo.edges, strict=False)
    reached = [key for (key, _), edge in edges if edge.node in solo.graph.nodes]
    floating = [key for key, _ in inputs.at(inputs.differentiated, True)]
    watched = [key for key in floating if key not in reached]
    note = _left_out(inputs, names)
    if watched and reached:
        inputs = inputs.choosing(reached, watched)
        solo = run(inputs)
    elif watched:
        tokens = _by_tokens(inputs, watched, run)
        if tokens is not None:
            inputs, solo = tokens
        else:
            watched = []
    used = [names[key] for key in solo.keys]
    return InputChoice(inputs.differentiated, watched, used, note), solo


def _as_asked(
    inputs: Inputs, keys: list[Any], names: dict[Any, str], run: Callable[[Inputs], Forward]
) -> tuple[InputChoice, Forward]:
    if not keys:
        raise FlatlensError("inputs=[] names no input; name one or more")
    solo = run(inputs)
    for key in keys:
        if key not in solo.keys:
            raise FlatlensError(
                f"the input {names[key]!r} holds integers that no nn.Embedding reads; it has no "
                "derivative"
            )
    edges = zip(solo.keys, solo.edges, strict=False)
    for key, edge in edges:
        if edge.node not in solo.graph.nodes:
            raise FlatlensError(
                f"the output does not depend differentiably on the input {names[key]!r}; leave it "
                "out of inputs="
            )
    return InputChoice(keys, [], [names[key] for key in solo.keys]), solo


def _by_tokens(
    inputs: Inputs, watched: list[Any], run: Callable[[Inputs], Forward]
) -> tuple[Inputs, Forward] | None:
    """Take integer arguments where the output depends on no floating-point one."""
    tokens = [key for key, _ in inputs.at(inputs.keys, False)]
    if not tokens:
        return None
    chosen = inputs.choosing(tokens, watched)
    try:
        return chosen, run(chosen)
    except FlatlensError:  # no embedding reads them
        return None


def _left_out(inputs: Inputs, names: dict[Any, str]) -> str:
    floating_keys = [key for key, _ in inputs.at(inputs.keys, True)]
    masks = [names[key] for key in floating_keys if key not in inputs.differentiated]
    if not masks:
        return ""
    are_masks = "is a mask" if len(masks) == 1 else "are masks"
    return f"{', '.join(masks)} {are_masks} and not differentiated; inputs= overrides this"


def argument_names(model: nn.Module, inputs: Inputs) -> dict[Any, str]:
    """Return the name of each argument: its key, or the parameter of ``forward`` that it fills."""
    if inputs.named:
        return {key: _spelt(key, str) for key in inputs.keys}
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [p.name for p in parameters if p.kind in kinds]

    def name(place: Any) -> str:
        return known[place] if place < len(known) else str(place)

    return {key: _spelt(key, name) for key in inputs.keys}


def _spelt(key: Any, name: Callable[[Any], str]) -> str:
    """Return the name of an argument, and the path to the tensor if it is nested."""
    return name(key[0]) + key[1] if isinstance(key, tuple) else name(key)


def _keys(name: str | int, names: dict[Any, str]) -> list[Any]:
    """Return the keys of the argument with this name or position; all tensors if it is nested."""
    if name in names:
        return [name]
    keys = [key for key, known in names.items() if known == name]
    inside = [
        key
        for key, known in names.items()
        if isinstance(key, tuple) and (key[0] == name or known == f"{name}{key[1]}")
    ]
    if keys or inside:
        return keys or inside
    known = ", ".join(names.values())
    raise FlatlensError(f"inputs= names {name!r}, but the inputs are {known}")
