"""The config of a training run: a frozen, validated value that determines its records.

Nothing heavy is imported here, so that the command line can show every field at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.files.reading import read_toml, shown
from flatlens.training.config_checks import CHECKS, thawed
from flatlens.training.schedule import due_steps

__all__ = ["Config", "due_steps", "read_toml"]

MLP_ON_DIGITS = (64, 500, 500, 500, 10)  # the paper's MLP, for 8 x 8 pixels
RHO = {"sam": 0.05, "asam": 0.5, "sam-adamw": 0.05}  # the radii that the two papers recommend
FREE = ("checkpoint_every", "snapshots")  # fields that the records do not depend on


@dataclass(frozen=True)
class Config:
    """The config of a training run: what to train, how, and when to measure.

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
        Keep only the images of these classes; the network still has all its outputs.
    train_size
        Train on this many samples, the first ones. By default on all.
    loss
        mean_squared: squared error averaged over the batch and the outputs, as in the paper's
        experiments. half_squared: half the squared error, summed over the outputs and averaged
        over the batch. cross_entropy: softmax cross-entropy.
    label_smoothing
        Share of each target that is spread evenly over all classes.
    optimizer
        sgd (plain), momentum, adam, adamw, sam or asam (both on plain SGD), sam-adamw (SAM whose
        gradient AdamW follows).
    lr
        Learning rate.
    lr_schedule
        constant, or cosine: the learning rate rises to lr over the first tenth of the steps, and
        then falls towards zero along half a cosine (Loshchilov & Hutter, 2017).
    momentum
        Momentum of the optimiser momentum; the others ignore it.
    rho
        Radius of sam and asam. By default 0.05 for sam and 0.5 for asam.
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
        default, all, or a list of names of quantities. The list may contain default, the variants
        of the paper's authors, bound_authors and d_authors, and functions of your own that take a
        Probe, as package.module:function.
    evaluate
        Number of training and of test samples for losses and accuracies, the first ones. By
        default all.
    checkpoint_every
        Steps between checkpoints; a run that was killed resumes from the last one.
    snapshots
        Keep the weights of every record as snapshots/STEP.safetensors in the run's folder, so
        that other quantities can be measured later without training again.
    device
        Where to compute: cpu, cuda or cuda:1.
    dtype
        float32 or float64.
    threads
        CPU threads of torch. Records repeat bit for bit only with the same number of threads.
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
    lr_schedule: str = "constant"
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
        for name, check in CHECKS.items():
            # the canonical value: a tuple for a list, an int for NumPy's int64
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the config") -> Config:
        """Create a config from plain values, as `to_dict` gives them.

        Args:
            values: fields by name. Others have their defaults.
            where: the origin of the values, for the message.

        Raises:
            FlatlensError: if a field is unknown or has a wrong value.
        """
        for key in values:
            if key not in CHECKS:
                raise FlatlensError(
                    f"Unknown field {shown(key)} in {where}; the fields are {', '.join(CHECKS)}."
                )
        return cls(**{key: CHECKS[key](key, value) for key, value in values.items()})

    @classmethod
    def from_toml(cls, path: Path | str) -> Config:
        """Read a config from a TOML file of fields.

        Raises:
            FlatlensError: if the file is no TOML, or a field is unknown or has a wrong value.
        """
        return cls.from_dict(read_toml(Path(path)), str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values.

        >>> Config.from_dict(Config(classes=(0, 1)).to_dict()) == Config(classes=(0, 1))
        True
        """
        return {f.name: thawed(getattr(self, f.name)) for f in fields(self)}

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that the records depend on: what a run folder stores and compares."""
        return {key: value for key, value in self.to_dict().items() if key not in FREE}

    @property
    def network_options(self) -> dict[str, Any]:
        """Options of the network: those given, and for mlp on digits the width of its input.

        >>> Config().network_options
        {'widths': (64, 500, 500, 500, 10)}
        """
        options = dict(self.model_options)
        if self.model == "mlp" and self.data.partition("?")[0] == "digits":
            options.setdefault("widths", MLP_ON_DIGITS)
        return options

    @property
    def radius(self) -> float:
        """Radius of sam and asam."""
        return RHO[self.optimizer] if self.rho is None else self.rho

    @property
    def hash(self) -> str:
        """Eight hexadecimal digits of the fields that differ from their defaults.

        A field that a later version adds does not change them.
        """
        changed = {k: v for k, v in self.identity.items() if v != _DEFAULTS[k]}
        text = json.dumps(changed, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Name of the run folder: a few words for people, and the hash to tell runs apart.

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


_DEFAULTS = Config().to_dict()
