"""One training run as a frozen, validated value: everything that its records depend on.

Nothing heavy is imported here, so that the command line can show every field at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from flatlens.errors import FlatlensError

LOSSES = ("mean_squared", "half_squared", "cross_entropy")
OPTIMIZERS = ("sgd", "momentum", "adam", "sam", "asam", "adamw", "sam-adamw")
PENALTIES = ("sharpness", "sensitivity")
AUGMENTATIONS = ("flip", "crop", "flip+crop")
DTYPES = ("float32", "float64")
RHO = {"sam": 0.05, "asam": 0.5, "sam-adamw": 0.05}  # the radii that the two papers recommend
FREE = ("checkpoint_every", "snapshots")  # fields that change no record


@dataclass(frozen=True)
class Config:
    """What to train, how, and when to measure.

    Parameters
    ----------
    model
        Name of the network: mlp, lenet, vgg, vgg11, resnet18, vit, timm:NAME or
        package.module:factory.
    model_options
        Keyword arguments of the network, such as activation.
    data
        Name of the data: digits, fashion-mnist, cifar10, npz:PATH, folder:PATH.
    data_options
        Keyword arguments of the reader of the data.
    classes
        Keep the images of these classes only; the network's outputs stay as many as before.
    train_size
        Train on the first so many samples. By default on all.
    loss
        mean_squared: squared error averaged over the batch and the outputs, as in the paper's
        experiments. half_squared: half of it summed over the outputs. cross_entropy.
    label_smoothing
        Share of each target that is spread evenly over all classes.
    optimizer
        sgd (plain), momentum, adam, adamw, sam or asam (both on plain SGD), sam-adamw (SAM whose
        gradient AdamW follows).
    lr
        Learning rate.
    momentum
        Of the optimiser momentum.
    rho
        Radius of sam, asam and sam-adamw. By default 0.05, 0.5 and 0.05.
    penalty
        A term that is added to the training loss: sharpness:0.01 is 0.01 times an estimate of S
        (Eq. 3) on the batch, sensitivity:0.1 is 0.1 times one of the mean squared norm of df/dx.
    weight_decay
        Weight decay: L2 in the gradient, as torch's optimisers add it; decoupled in adamw.
    augment
        Change training images at random: flip (left to right), crop (a part of an image that is
        padded by an eighth of its size), or flip+crop. Measurements see the images as they are.
    batch_size
        Samples in one step; the last batch of an epoch may be smaller.
    steps
        Number of steps.
    seed
        Seed of the initial weights and of the order of the batches.
    measure
        When to measure: every:200, log:10 (ten times a decade), at:0,100,1000, or end.
        Every run is measured after its last step; every and log also before the first.
    samples
        Number of samples to measure, the first ones of the training data.
    quantities
        default, all, or names of the quantities to measure, default among them; also the authors'
        variants bound_authors and d_authors.
    evaluate
        Losses and accuracies over the first so many training and test samples. By default all.
    checkpoint_every
        Steps between checkpoints; a killed run goes on from the last one.
    snapshots
        Keep the weights of every record as snapshots/STEP.safetensors in the run's folder, so
        that other quantities can be measured later without training again.
    device
        Where to compute: cpu, cuda, cuda:1, mps.
    dtype
        float32 or float64.
    threads
        CPU threads of torch: sums are only repeated bit for bit with the same number.
    """

    model: str = "mlp"
    model_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    data: str = "digits"
    data_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    classes: Sequence[int] | None = None
    train_size: int | None = None
    loss: str = "mean_squared"
    label_smoothing: float = 0.0
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    rho: float | None = None
    penalty: str | None = None
    weight_decay: float = 0.0
    augment: str | None = None
    batch_size: int = 20
    steps: int = 10_000
    seed: int = 0
    measure: str = "every:200"
    samples: int = 100
    quantities: str | Sequence[str] = "default"
    evaluate: int | None = None
    checkpoint_every: int = 1_000
    snapshots: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1

    def __post_init__(self) -> None:
        for name, plain in PLAIN.items():
            # the value stays what it is, in its one plain form
            object.__setattr__(self, name, plain(name, getattr(self, name)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the config") -> Config:
        """The inverse of `to_dict`, for values of any origin; an unknown key is refused."""
        for key in values:
            if key not in PLAIN:
                raise FlatlensError(
                    f"Unknown field {key!r} in {where}; the fields are {', '.join(PLAIN)}."
                )
        return cls(**{key: PLAIN[key](key, value) for key, value in values.items()})

    @classmethod
    def from_toml(cls, path: Path | str) -> Config:
        """Reads a TOML file of fields."""
        return cls.from_dict(read_toml(Path(path)), str(path))

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values.

        >>> Config.from_dict(Config(classes=(0, 1)).to_dict()) == Config(classes=(0, 1))
        True
        """
        return {f.name: _thawed(getattr(self, f.name)) for f in fields(self)}

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that records depend on: what a run folder keeps and compares."""
        return {key: value for key, value in self.to_dict().items() if key not in FREE}

    @property
    def radius(self) -> float:
        """The radius of sam, asam and sam-adamw."""
        return RHO[self.optimizer] if self.rho is None else self.rho

    @property
    def hash(self) -> str:
        """Eight hexadecimal digits that stand for the fields that differ from their defaults.

        A field that a later version adds does not change them.
        """
        changed = {k: v for k, v in self.identity.items() if v != _DEFAULTS[k]}
        text = json.dumps(changed, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Name of the run's folder: a few words for people, the hash for uniqueness.

        >>> Config(model="vgg", data="cifar10", classes=(0, 1)).name
        'vgg-cifar10-sgd-lr0.1-b20-seed0-...'
        """
        words = (
            self.model.rpartition(":")[2],
            self.data.partition(":")[0],
            self.optimizer,
            f"lr{self.lr:g}",
            f"b{self.batch_size}",
            f"seed{self.seed}",
            self.hash,
        )
        return "-".join(re.sub(r"[^\w.-]", "_", word) for word in words)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlatlensError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlatlensError(f"{path} is not TOML: {error}.") from error


def due_steps(measure: str, steps: int) -> list[int]:
    """The steps at which a schedule measures, the last step always among them.

    >>> due_steps("every:200", 500)
    [0, 200, 400, 500]
    >>> due_steps("log:2", 100)
    [0, 1, 3, 10, 32, 100]
    >>> due_steps("at:0,7,900", 100), due_steps("end", 100)
    ([0, 7, 100], [100])
    """
    kind, _, rest = measure.partition(":")
    due: Iterable[int] = ()
    if kind == "every":
        due = range(0, steps, int(rest))
    elif kind == "log":
        per_decade = int(rest)
        due = [0, *(round(10 ** (k / per_decade)) for k in range(_decades(steps, per_decade)))]
    elif kind == "at":
        due = (int(word) for word in rest.split(","))
    return sorted({step for step in due if step < steps} | {steps})


def _decades(steps: int, per_decade: int) -> int:
    return math.ceil(per_decade * math.log10(steps)) + 1


# ------------------------------------------------------------------ values in their plain form

Plain = Callable[[str, Any], Any]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        _refuse(name, value, "a name")
    return value


def _one_of(*known: str) -> Plain:
    def plain(name: str, value: Any) -> str:
        if value not in known:
            _refuse(name, value, f"one of {', '.join(known)}")
        return str(value)

    return plain


def _options(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        _refuse(name, value, "a table of keyword arguments")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        _refuse(name, value, "made of numbers, strings, lists and tables")
    return {key: _frozen(item) for key, item in value.items()}


def _integer(least: int, most: int = 2**63 - 1) -> Plain:  # what torch can count to
    def plain(name: str, value: Any) -> int:
        try:
            whole = operator.index(value)  # Python's and NumPy's integers, but no floats
        except TypeError:
            whole = least - 1
        if not least <= whole <= most or isinstance(value, bool):
            end = f"to {most}" if whole > most else "on"
            _refuse(name, value, f"a whole number from {least} {end}")
        return whole

    return plain


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")
    return value


def _integers(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Collection) or not len(value):
        _refuse(name, value, "a list of whole numbers")
    return tuple(_integer(least=0)(name, item) for item in value)


def _number(wish: str, fits: Callable[[float], bool]) -> Plain:
    def plain(name: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str | bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and fits(number)):
            _refuse(name, value, wish)
        return number

    return plain


def _or_none(plain: Plain) -> Plain:
    return lambda name, value: None if value is None else plain(name, value)


def split_penalty(text: str) -> tuple[str, float]:
    """The kind and the strength of a penalty.

    >>> split_penalty("sharpness:0.01")
    ('sharpness', 0.01)
    """
    kind, _, strength = text.partition(":")
    return kind, float(strength)


def _penalty(name: str, value: Any) -> str:
    """One spelling for one strength, so that equal configs have equal names."""
    try:
        kind, strength = split_penalty(str(value))
    except ValueError:
        kind, strength = "", math.nan
    if kind not in PENALTIES or not 0 < strength <= 1e30:
        _refuse(name, value, "sharpness:STRENGTH or sensitivity:STRENGTH, a strength above 0")
    return f"{kind}:{strength!r}"


def _schedule(name: str, value: Any) -> str:
    """A number means every so many steps, a list means these."""
    if isinstance(value, list | tuple):
        return "at:" + ",".join(map(str, sorted(set(_integers(name, value)))))
    text = str(value)
    if re.fullmatch(r"[1-9]\d*", text):
        return f"every:{text}"
    if not re.fullmatch(r"(every|log):[1-9]\d*|at:\d+(,\d+)*|end", text):
        _refuse(name, value, "every:STEPS, log:TIMES_A_DECADE, at:STEP,STEP or end")
    return text


def _quantities(name: str, value: Any) -> str | tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or {type(v) for v in names} != {str}:
        _refuse(name, value, "default, all or a list of names")
    return names[0] if len(names) == 1 and names[0] in ("default", "all") else tuple(names)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


def _refuse(name: str, value: object, wish: str) -> NoReturn:
    raise FlatlensError(f"The field {name} is {value!r}, but it must be {wish}.")


# a step of an optimiser makes it larger, and float32 ends at 3e38
_POSITIVE = _number("a positive number up to 1e30", lambda v: 0 < v <= 1e30)
_NOT_NEGATIVE = _number("a number from 0 to 1e30", lambda v: 0 <= v <= 1e30)
_SHARE = _number("from 0 to below 1", lambda v: 0 <= v < 1)

PLAIN: dict[str, Plain] = {
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
_DEFAULTS = Config().to_dict()
