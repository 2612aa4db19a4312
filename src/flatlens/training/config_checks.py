"""Check the fields of a config: each check returns the canonical value, or raises."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from flatlens.errors import FlatlensError
from flatlens.files.reading import parse_json, shown
from flatlens.training.schedule import MOST_PER_DECADE

LOSSES = ("mean_squared", "half_squared", "cross_entropy")
OPTIMIZERS = ("sgd", "momentum", "adam", "sam", "asam", "adamw", "sam-adamw")
LR_SCHEDULES = ("constant", "cosine")
PENALTIES = ("sharpness", "sensitivity")
AUGMENTATIONS = ("flip", "crop", "flip+crop")
DTYPES = ("float32", "float64")

Check = Callable[[str, Any], Any]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        _refuse(name, value, "a name")
    return value


def _one_of(*known: str) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            _refuse(name, value, f"one of {', '.join(known)}")
        return str(value)

    return check


def _options(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        _refuse(name, value, "a table of keyword arguments")
    try:
        text = json.dumps(value, allow_nan=False)
        parse_json(text, name)  # checks the depth and the size of integers
    except (TypeError, ValueError, RecursionError):
        _refuse(name, value, "made of numbers, strings, lists and tables")
    return {key: frozen(item) for key, item in value.items()}


def _integer(least: int, most: int = 2**63 - 1) -> Check:  # largest integer of torch
    def check(name: str, value: Any) -> int:
        try:
            whole = operator.index(value)  # integers of Python and NumPy, but no floats
        except TypeError:
            whole = least - 1
        if not least <= whole <= most or isinstance(value, bool):
            limit = f"to {most}" if whole > most else "on"
            _refuse(name, value, f"a whole number from {least} {limit}")
        return whole

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")
    return value


def _integers(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Collection) or not len(value):
        _refuse(name, value, "a list of whole numbers")
    return tuple(_integer(least=0)(name, item) for item in value)


def _number(wish: str, fits: Callable[[float], bool]) -> Check:
    def check(name: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str | bytes | bool) else float(value)
        except (TypeError, ValueError, OverflowError):  # an integer of 400 digits
            number = math.nan
        if not (math.isfinite(number) and fits(number)):
            _refuse(name, value, wish)
        return number

    return check


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _schedule(name: str, value: Any) -> str:
    """Accept also a number (measure every that many steps) and a list of steps."""
    if isinstance(value, list | tuple):
        return "at:" + ",".join(map(str, sorted(set(_integers(name, value)))))
    try:
        text = str(value)
    except ValueError:  # an integer of 5,000 digits
        text = ""
    if re.fullmatch(r"[1-9]\d{0,17}", text, re.ASCII):
        return f"every:{text}"
    schedule = r"(every|log):[1-9]\d{0,17}|at:\d{1,18}(,\d{1,18})*|end"
    if not re.fullmatch(schedule, text, re.ASCII):
        _refuse(name, value, "every:STEPS, log:TIMES_A_DECADE, at:STEP,STEP or end")
    if text.startswith("log:") and int(text[4:]) > MOST_PER_DECADE:
        _refuse(name, value, f"at most log:{MOST_PER_DECADE}, measurements per power of ten")
    return text


def _quantities(name: str, value: Any) -> str | tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or {type(v) for v in names} != {str}:
        _refuse(name, value, "default, all or a list of names")
    return names[0] if len(names) == 1 and names[0] in ("default", "all") else tuple(names)


def split_penalty(text: str) -> tuple[str, float]:
    """Split a penalty into its kind and its strength.

    >>> split_penalty("sharpness:0.01")
    ('sharpness', 0.01)
    """
    kind, _, strength = text.partition(":")
    return kind, float(strength)


def _penalty(name: str, value: Any) -> str:
    """Write a penalty in one spelling, so that equal configs have equal names."""
    try:
        kind, strength = split_penalty(str(value))
    except ValueError:
        kind, strength = "", math.nan
    if kind not in PENALTIES or not 0 < strength <= 1e30:
        _refuse(name, value, "sharpness:STRENGTH or sensitivity:STRENGTH, a strength above 0")
    return f"{kind}:{strength!r}"


def frozen(value: Any) -> Any:
    """Replace lists by tuples, at any depth of lists."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def thawed(value: Any) -> Any:
    """Replace tuples by lists and mappings by dicts, at any depth: plain JSON values."""
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    return [thawed(item) for item in value] if isinstance(value, tuple) else value


def _refuse(name: str, value: object, wish: str) -> NoReturn:
    raise FlatlensError(f"The field {name} is {shown(value)}, but it must be {wish}.")


# an optimiser multiplies the learning rate, and float32 ends at 3e38
_POSITIVE = _number("a positive number up to 1e30", lambda v: 0 < v <= 1e30)
_NOT_NEGATIVE = _number("a number from 0 to 1e30", lambda v: 0 <= v <= 1e30)
_SHARE = _number("from 0 to below 1", lambda v: 0 <= v < 1)

CHECKS: dict[str, Check] = {
    "model": _text,
    "model_options": _options,
    "data": _text,
    "data_options": _options,
    "classes": _or_none(_integers),
    "train_size": _or_none(_integer(least=1)),
    "loss": _one_of(*LOSSES),
    "label_smoothing": _SHARE,
    "optimizer": _one_of(*OPTIMIZERS),
    "lr": _POSITIVE,
    "lr_schedule": _one_of(*LR_SCHEDULES),
    "momentum": _SHARE,
    "rho": _or_none(_POSITIVE),
    "penalty": _or_none(_penalty),
    "weight_decay": _NOT_NEGATIVE,
    "augment": _or_none(_one_of(*AUGMENTATIONS)),
    "batch_size": _integer(least=1),
    "steps": _integer(least=1),
    "seed": _integer(least=0),
    "measure": _schedule,
    "samples": _integer(least=1),
    "quantities": _quantities,
    "evaluate": _or_none(_integer(least=1)),
    "checkpoint_every": _integer(least=1),
    "snapshots": _flag,
    "device": _text,
    "dtype": _one_of(*DTYPES),
    "threads": _integer(least=1, most=4_096),
}
