"""Embeddings: rows of a table that each sample takes.

The derivative by an integer input does not exist. The embedding that reads the input stands for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from flatlens.capture.recording import Lookup, Recording


def _embedding(recording: Recording, func: Any, args: Any, kwargs: Any) -> Tensor:
    return _call_embedding(recording, *args, **kwargs)


def _call_embedding(
    recording: Recording,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows for each sample; the rows of an integer input stand for that input."""
    options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    z = F.embedding(input, weight, *options)
    if recording.parameters.trainable(weight) and not (scale_grad_by_freq or sparse):
        z = _note_lookup(recording, z, input, weight, padding_idx)
    if id(input) in _derived(recording):
        # The result is data, not a weight, although only a parameter needs a gradient behind it.
        recording.data.add(z.grad_fn)
    dims = [_sample_dim(input, t) for t in recording.tokens]
    token = next((k for k, dim in enumerate(dims) if dim is not None), None)
    if id(input) not in _derived(recording) or token is None:
        return z
    recording.scratch.setdefault("embedded_tokens", {})[token] = True
    if not z.requires_grad:  # a frozen table
        z = z.detach().requires_grad_()
    dim = dims[token] or 0
    samples_first = z if dim == 0 else z.movedim(dim, 0)
    recording.embedded.append((samples_first.detach(), get_gradient_edge(samples_first)))
    if recording.injection is not None:
        samples_first = recording.injection.embedding(samples_first)
        z = samples_first if dim == 0 else z
    return (z if dim == 0 else samples_first.movedim(0, dim)).clone()


def _sample_dim(input: Tensor, token: Tensor) -> int | None:
    """Return the dimension of the samples in ``input``, if it is ``token`` in any shape or order.

    A transpose (sequence first, as in XLNet and fairseq) has its samples in another dimension.
    """
    if input.numel() != token.numel():
        return None
    is_view = input.data_ptr() == token.data_ptr()
    if is_view and input.shape == token.shape and input.stride() == token.stride():
        return 0
    moved = [d for d in range(1, input.dim()) if input.movedim(d, 0).shape == token.shape]
    for d in moved:
        view = input.detach().movedim(d, 0)
        if view.stride() == token.stride() if is_view else torch.equal(view, token):
            return 0 if input.shape == token.shape and input.stride() == token.stride() else d
    return 0 if torch.equal(token.flatten(), input.detach().flatten()) else None


def _note_lookup(
    recording: Recording, z: Tensor, input: Tensor, weight: Tensor, padding_idx: int | None
) -> Tensor:
    """Record a lookup; one that all samples share (positions 0, 1, ...) waits for its broadcast."""
    event, dims = recording.new_event(z.shape), recording.plan.batch_dims
    _lookups(recording)[id(z)] = (z, None)
    if recording.batch == 1:
        dim: int | None = 0
    elif dims is None or event >= len(dims) or z.dim() < 2:
        return z
    else:
        dim = dims[event]
    indices = input.detach().reshape(1 if dim is None else recording.batch, -1)
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    lookup = Lookup(weight, get_gradient_edge(z), indices, padding)
    if dim is None:
        _lookups(recording)[id(z)] = (z, lookup)
    elif dim == 0:
        recording.lookups.append(lookup)
    return z


def looked_up(recording: Recording, value: Any) -> bool:
    """Whether a value is the result of a lookup."""
    return id(value) in _lookups(recording)


def rows_per_sample(recording: Recording, z: Tensor, shape: torch.Size, event: int) -> Tensor:
    """Copy rows that were looked up once for all samples, where they are combined with a batch."""
    aligned, dims = (1,) * (len(shape) - z.dim()) + z.shape, recording.plan.batch_dims
    known = dims is not None and event < len(dims) and dims[event] == 0
    shared = _lookups(recording)[id(z)][1]
    if shared is None or not known or aligned[0] != 1 or shape[0] != recording.batch:
        return z
    copies = z.reshape(aligned).expand(recording.batch, *aligned[1:])
    indices = shared.indices.expand(recording.batch, -1)
    edge = get_gradient_edge(copies)
    recording.lookups.append(Lookup(shared.parameter, edge, indices, shared.padding, shared.edge))
    return copies


def note_derived(recording: Recording, result: Any, args: Any) -> None:
    """Record results that are integers computed from an integer input."""
    integer = isinstance(result, Tensor) and not result.is_floating_point()
    derived = _derived(recording)
    if integer and any(id(a) in derived for a in args):
        derived[id(result)] = result


def embedded_tokens(recording: Recording) -> list[int]:
    """Return the indices of the integer inputs that an embedding reads."""
    return sorted(recording.scratch.get("embedded_tokens", {}))


def _lookups(recording: Recording) -> dict[int, Any]:
    """Return the results of lookups by id; the value is a lookup shared by all samples, or None."""
    return recording.scratch.setdefault("lookups", {})


def _derived(recording: Recording) -> dict[int, Any]:
    """Return the integers that are computed from an integer input, by id."""
    if "derived" not in recording.scratch:
        recording.scratch["derived"] = {id(t): t for t in recording.tokens}
    return recording.scratch["derived"]


HANDLERS = {F.embedding: _embedding}
