"""Probes of shares of the samples, put together: what one probe of all of them would be."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from flatlens.errors import FlatlensError
from flatlens.passes.exact import PATHS
from flatlens.probes import FirstLayerProbe, ParameterProbe, Probe, Sketch

T = TypeVar("T")
EVERY = {"bias_counts", "reads_input", "is_output"}  # must hold in every share
MEANS = ("curvature", "crossed")


def merge(*probes: Probe) -> Probe:
    """All samples of ``probes`` in their order; the probes must be of one network."""
    first = probes[0]
    if not all(_alike(first, p) for p in probes):
        raise FlatlensError("the probes are of different networks or outputs; merge like with like")
    if len({p.sketch is None for p in probes}) > 1:
        raise FlatlensError("some probes are exact and some sketched; use one method for all")
    n = np.array([p.n for p in probes])
    return replace(
        first,
        n=int(n.sum()),
        output=np.concatenate([p.output for p in probes]),
        input=_joined([p.input for p in probes], n),
        layers=[_joined(list(each), n) for each in zip(*(p.layers for p in probes), strict=True)],
        parameters=[
            _joined(list(each), n) for each in zip(*(p.parameters for p in probes), strict=True)
        ],
        first=None if first.first is None else _joined([p.first for p in probes], n),
        chunk=max(p.chunk for p in probes),
        notes=list(dict.fromkeys(note for p in probes for note in p.notes)),
        sketch=_sketch([p.sketch for p in probes], n),
    )


def _alike(one: Probe, other: Probe) -> bool:
    """Whether two probes are of one network: the same shapes, and weights of the same norms."""

    def shape(p: Probe) -> Any:
        layers = [(q.name, q.positions, q.singular.shape[1]) for q in p.layers]
        return p.N, p.M, p.dtype, layers, [(q.name, q.numel) for q in p.parameters]

    if shape(one) != shape(other):
        return False
    mine, theirs = ([q.norm for q in p.layers] for p in (one, other))
    return bool(np.allclose(mine, theirs, rtol=1e-4, atol=0))  # an iteration may end elsewhere


def _joined(parts: list[T], n: np.ndarray) -> T:
    """One record from the same record of each share."""
    changes: dict[str, Any] = {}
    for f in fields(parts[0]):  # type: ignore[arg-type]
        values = [getattr(part, f.name) for part in parts]
        if any(v is None for v in values):
            changes[f.name] = None
        elif f.name in MEANS:
            changes[f.name] = sum(k * v for k, v in zip(n, values, strict=True)) / n.sum()
        elif isinstance(values[0], np.ndarray) and not _static(parts[0], f.name):
            changes[f.name] = np.concatenate(values)
        elif f.name in EVERY:
            changes[f.name] = all(values)
        elif isinstance(parts[0], ParameterProbe) and f.name == "path":
            changes[f.name] = max(values, key=PATHS.index)
    return replace(parts[0], **changes)  # type: ignore[type-var]


def _static(part: Any, name: str) -> bool:
    return isinstance(part, FirstLayerProbe) and name == "weight"


def _sketch(parts: list[Sketch | None], n: np.ndarray) -> Sketch | None:
    """Errors of independent shares add in squares."""
    found = [s for s in parts if s is not None]
    if not found:
        return None
    share = n / n.sum()

    def joined(errors: list[dict[str, float]]) -> dict[str, float]:
        return {
            name: float(
                np.sqrt(sum((w * e[name]) ** 2 for w, e in zip(share, errors, strict=True)))
            )
            for name in errors[0]
        }

    return Sketch(
        directions=min(s.directions for s in found),
        seed=found[0].seed,
        errors=joined([s.errors for s in found]),
        layer_errors=[
            joined(list(each)) for each in zip(*(s.layer_errors for s in found), strict=True)
        ],
        converged=all(s.converged for s in found),
    )


def needs_group() -> None:
    """Refuse where there is no process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise FlatlensError(
            "distributed=True needs a process group; call torch.distributed.init_process_group"
        )


def gathered(mine: Any) -> Any:
    """A probe or targets of every process of the default group, merged in the order of ranks."""
    needs_group()
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine.cpu() if isinstance(mine, Tensor) else mine)
    return torch.cat(found) if isinstance(mine, Tensor) else merge(*found)
