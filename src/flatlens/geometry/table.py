"""``representations``: the global geometry of every layer's representation as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from flatlens.arguments import (
    check_flag,
    check_instance,
    check_integer,
    no_type_check,
    typed_arguments,
)
from flatlens.capture.inputs import as_list, batches
from flatlens.errors import FlatlensError, counted
from flatlens.geometry import clouds, collapse
from flatlens.geometry.clouds import Array, Cloud
from flatlens.geometry.collapse import Classes
from flatlens.geometry.features import Place, Shelf, strategy_for
from flatlens.geometry.jackknife import standard_errors
from flatlens.measurement import Measurement
from flatlens.measurement.measuring import checked_targets, joined_targets
from flatlens.measurement.sampling import draw
from flatlens.passes.probing import check_arguments
from flatlens.passes.request import Request
from flatlens.passes.run import look

if TYPE_CHECKING:
    import pandas as pd

FEATURE_BYTES = 1 << 30  # memory for features by default
SHAPE = ("participation_ratio", "effective_rank", "intrinsic_dimension")
COLLAPSE = ("nc1", "nc2", "nc2_norms", "nc3", "nc4", "class_mean_accuracy")
LOCAL = {"sensitivity": "mls", "local_dimension": "local_dimension", "log_volume": "log_volume"}
FEWEST_PER_CLASS = 5


@dataclass(frozen=True)
class _Samples:
    """The samples of a table: inputs, labels or None, and how errors are computed."""

    x: Any
    labels: Array | None
    count: int
    groups: int
    seed: int


@no_type_check
@typed_arguments
def representations(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    layers: Sequence[str] | None = None,
    n: int | None = None,
    measurement: Measurement | None = None,
    errors: bool = True,
    groups: int = 10,
    seed: int = 0,
    output: Any = None,
    chunk: int | None = None,
    memory: int | None = None,
    inputs: Sequence[str | int] | None = None,
) -> pd.DataFrame:
    """Describe the cloud of samples at the input, before every measured layer, and at the output.

    Only forward passes are run. Every number describes the distribution of all samples, while
    ``measure`` describes a small neighbourhood of each sample. No theorem of the paper bounds any
    of these numbers by the sharpness.

    | column | what | defined by |
    |---|---|---|
    | ``participation_ratio`` | (Tr C)^2 / Tr C^2 of the covariance | Gao et al. 2017 |
    | ``effective_rank`` | exp(entropy of singular values), RankMe | Garrido et al. 2023 |
    | ``intrinsic_dimension`` | TwoNN, 90 % of the ratios fitted | Facco et al. 2017 |
    | ``nc1`` | Tr(S_W S_B^+) / C: spread within classes | Papyan, Han, Donoho 2020 |
    | ``nc2``, ``nc2_norms`` | angles and norms of class means against a simplex | the same |
    | ``nc3`` | ||W/||W|| - M/||M|| ||^2, before the classifier alone | the same |
    | ``nc4`` | share of samples where the nearest class mean and the network disagree | the same |
    | ``class_mean_accuracy`` | share of samples whose nearest class mean is their class | |

    Args:
        model: any module; it runs in evaluation mode and is left exactly as it was.
        x: as for ``measure``.
        y: class indices or one-hot rows, for the columns that need labels.
        layers: names of rows to compute, such as "input", "fc1", "output"; None computes all.
        n: use this many samples, drawn at random from x with ``seed``.
        measurement: the result of ``measure`` for the same network. Its local quantities of the
            same layers are added as columns (``sensitivity``, ``local_dimension``, ``log_volume``).
        errors: whether to compute standard errors (``NAME_se``).
        groups: number of groups that the jackknife leaves out, one at a time.
        seed: seed of the groups and of the draw of ``n`` samples.
        output: which part of the model's result is f(x), as for ``probe``.
        chunk: samples at a time.
        memory: bytes for features, by default 1 GiB. With fewer bytes more forward passes are run.
        inputs: as for ``probe``.

    Returns:
        A DataFrame with a row for each place. The column ``note`` says if n is too small for an
        estimate.

    Raises:
        FlatlensError: if an argument is wrong, y has no classes, or the network cannot be measured.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> table = fl.representations(net, torch.randn(50, 3), torch.arange(50) % 2)
        >>> list(table["layer"]), list(table["features"])
        (['input', '0', '2', 'output'], [3, 3, 4, 2])
    """
    import pandas as pd

    check_arguments(model, x)
    for name, value in {"n": n, "chunk": chunk, "memory": memory}.items():
        check_integer(name, value, 1)
    check_integer("groups", groups, 2)
    check_integer("seed", seed, 0)
    check_flag("errors", errors)
    if measurement is not None:
        advice = "give what fl.measure returned"
        check_instance("measurement", measurement, Measurement, advice)
    if isinstance(layers, str):
        raise FlatlensError(f"layers={layers!r} is one name; give a list of names")
    samples = _samples(x, y, n, groups if errors else 0, seed)
    request = Request(output=output, chunk=chunk, inputs=inputs)
    records = _records(model, samples, request, layers, memory or FEATURE_BYTES)
    if measurement is not None:
        for record in records:
            record |= _local(record["layer"], measurement)
    return pd.DataFrame(records)


def _samples(x: Any, y: Any, n: int | None, groups: int, seed: int) -> _Samples:
    if n is not None:
        x, y = draw(x, y, n, seed)
    x = as_list(x)
    y = joined_targets([t for _, t in batches(x)]) if y is None else y
    count = sum(batch.n for batch, _ in batches(x))
    return _Samples(x, _labels(checked_targets(y), count), count, groups, seed)


def _labels(y: Tensor | None, count: int) -> Array | None:
    """Return class numbers from class indices or one-hot rows."""
    if y is None:
        return None
    if len(y) != count:
        raise FlatlensError(
            f"y has {counted(len(y), 'entry')} for {counted(count, 'sample')}; give one "
            "label a sample"
        )
    one_hot = y.dim() == 2 and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())
    if one_hot and y.shape[1] > 1:
        return y.argmax(1).cpu().numpy()
    if y.is_floating_point() or y.numel() != count:
        raise FlatlensError("y has no classes; give class indices or one-hot rows, or leave y out")
    return y.reshape(count).long().cpu().numpy()


def _records(
    model: nn.Module,
    samples: _Samples,
    request: Request,
    layers: Sequence[str] | None,
    memory: int,
) -> list[dict[str, Any]]:
    """Compute the row of every place, some places at a time."""
    records: dict[str, dict[str, Any]] = {}
    while True:
        shelf = Shelf(memory, samples.count, layers, frozenset(records))
        p = look(model, (b for b, _ in batches(samples.x)), request, strategy_for(shelf))
        names = [place.name for place in shelf.places]
        if layers is not None and (unknown := sorted(set(layers) - set(names))):
            raise FlatlensError(f"layers names {unknown[0]!r}; choose from {', '.join(names)}")
        classifier = shelf.places[-2].name  # the last layer before the output
        for place in shelf.places:
            if place.name in shelf.features:
                points = torch.cat(shelf.features.pop(place.name)).cpu()
                is_head = place.name == classifier and place.weight is not None
                head = place if is_head else Place(place.name)
                records[place.name] = _record(head, points, samples, p.output)
        if not shelf.waiting:
            return [records[name] for name in names if name in records]


def _record(
    place: Place, points: Float[Tensor, "n D"], samples: _Samples, f: Float[Array, "n N"]
) -> dict[str, Any]:
    """Compute one row."""
    cloud, labels = Cloud.of(points), samples.labels
    classes = None
    if labels is not None:
        is_class = f.shape[1] > labels.max() and labels.min() >= 0
        predicted = f.argmax(1) if is_class else np.full(len(f), -1)
        classes = Classes(labels, predicted)
    names = [*SHAPE, *(COLLAPSE if classes is not None else ())]
    values = _statistics(cloud, classes, _duality(place, points, labels, None))
    record: dict[str, Any] = {"layer": place.name, "features": points.shape[1], "n": samples.count}
    spread = np.full(len(values), np.nan)
    if samples.groups and samples.count > 1:  # without the only sample nothing is left

        def without(left_out: Array) -> Array:
            fewer = None if classes is None else classes.without(left_out)
            nc3 = _duality(place, points, labels, left_out)
            return _statistics(cloud.without(left_out), fewer, nc3)

        spread = standard_errors(without, samples.count, samples.groups, samples.seed)
    for name, value, error in zip(names, values, spread, strict=True):
        record[name] = float(value)
        if samples.groups:
            record[f"{name}_se"] = float(error)
    return {**record, "note": _note(record, labels)}


def _statistics(cloud: Cloud, classes: Classes | None, nc3: float) -> Float[Array, " q"]:
    """Return the statistics of a cloud in the order of the columns."""
    values = [
        clouds.participation_ratio(cloud),
        clouds.effective_rank(cloud),
        clouds.intrinsic_dimension(cloud),
    ]
    if classes is not None:
        nearest = collapse.nearest_means(cloud, classes)
        known = (classes.predicted >= 0).all()
        values += [
            collapse.within_class_variability(cloud, classes),
            *collapse.equiangularity(cloud, classes),
            nc3,
            float((nearest != classes.predicted).mean()) if known else math.nan,
            float((nearest == classes.labels).mean()),
        ]
    return np.array(values)


def _duality(
    place: Place, points: Float[Tensor, "n D"], labels: Array | None, left_out: Array | None
) -> float:
    """Return NC3 if the place is the input of a classifier with one output per class."""
    if place.weight is None or labels is None:
        return math.nan
    stay = (
        np.arange(len(labels)) if left_out is None else np.delete(np.arange(len(labels)), left_out)
    )
    if not np.array_equal(np.unique(labels[stay]), np.arange(len(place.weight))):
        return math.nan
    return collapse.self_duality(points[torch.from_numpy(stay)], labels[stay], place.weight)


def _note(record: dict[str, Any], labels: Array | None) -> str:
    """Say which estimates are meaningless because there are too few samples."""
    n, notes = record["n"], []
    if n < 10 * record["participation_ratio"]:
        notes.append("participation_ratio is limited by n: take ten times as many samples as it")
    dimension = record["intrinsic_dimension"]
    resolved = 2 * math.log10(n) if n > 1 else 0.0
    if dimension > resolved:
        notes.append(
            f"intrinsic_dimension above {resolved:.1f} cannot be resolved by "
            f"{counted(n, 'sample')} (Eckmann and Ruelle 1992) and is biased low"
        )
    if labels is not None:
        fewest = int(np.unique(labels, return_counts=True)[1].min())
        if fewest < FEWEST_PER_CLASS:
            notes.append(
                f"a class has {counted(fewest, 'sample')}: nc1 to nc4 describe the sample alone"
            )
    return "; ".join(notes)


def _local(name: str, m: Measurement) -> dict[str, float]:
    """Return the local quantities of one place from a measurement."""
    if name == "input":
        return {
            column: float(m[metric]) if metric in m else math.nan
            for column, metric in LOCAL.items()
        }
    for row in m.rows:
        if row["name"] == name:
            return {column: float(row[metric]) for column, metric in LOCAL.items()}
    return dict.fromkeys(LOCAL, math.nan)
