"""Inputs of any shape: a tensor, a tuple or dict of arguments, or an iterable of batches.

An argument is a tensor or nested: tuples, lists and dicts of tensors. Each tensor inside has a key
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flatlens.algebra.looks import unusual
from flatlens.capture.layout import close, closeness
from flatlens.errors import FlatlensError, counted, first_line

COUPLED = (
    "the output of a sample changes with the other samples in its batch; samples must not depend "
    "on one another (batch statistics, attention over the batch, ...); chunk=1 measures each alone"
)
RANDOM = (
    "the output of a sample changes from one run to the next (dropout that is always on, noise, "
    "...); switch that off to measure"
)


NESTED = (tuple, list, dict)  # types of arguments that are split into their tensors

MASK_ENDINGS = ("attention_mask", "attn_mask", "padding_mask")  # arguments of attention

LOWEST = 1e38  # masks of transformers hold the lowest float32 number instead of minus infinity


# What a model raises for an input that it was not made for.
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class Inputs:
    """The arguments of a model for some samples: positional (tuple) or by name (dict).

    The key of an argument is its place or its name. The key of a tensor inside a nested argument is
    the pair of that and of its path, such as (0, "['image'][1]").

    Type and values decide which arguments derivatives are taken with respect to
    (``differentiated``). These are all floating-point tensors except masks. A mask is a tensor of 0
    and (nearly) infinite values, which is added to attention scores, or a tensor with the name of a
    mask (``MASK_ENDINGS``) that holds two values or -inf. A tensor counts as a mask only if there
    are other tensors. ``choosing`` overrides this.

    Args:
        value: a tensor, a tuple or a mapping.
        differentiated: keys of the arguments to differentiate with respect to; None decides by type
            and values.
        watched: keys of arguments that the output seems not to depend on; the pass checks this for
            every sample.
    """

    def __init__(
        self, value: Any, differentiated: Sequence[Any] | None = None, watched: Sequence[Any] = ()
    ) -> None:
        if isinstance(value, Tensor):
            value = (value,)
        self.named = isinstance(value, Mapping)
        self._arguments = list(value) if self.named else list(range(len(value)))
        self._trees: list[Any] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []
        for key, argument in zip(
            self._arguments, value.values() if self.named else value, strict=True
        ):
            self._add(key, argument)
        tensors = [v for v in self.values if isinstance(v, Tensor)]
        if not tensors:
            raise FlatlensError("the input holds no tensor; give x as tensors with samples first")
        if any(t.dim() == 0 for t in tensors) or len({len(t) for t in tensors}) != 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise FlatlensError(
                f"the input tensors {shapes} do not share a first (sample) dimension"
            )
        if any(t.is_complex() for t in tensors):
            raise FlatlensError("the input is complex; only real inputs are measured")
        self.tensors, self.n = tensors, len(tensors[0])
        if differentiated is None:
            differentiated = self._by_values()
        self.differentiated, self.watched = list(differentiated), list(watched)

    def _add(self, key: Any, argument: Any) -> None:
        """Add the tensors of an argument, which may be nested."""
        if not isinstance(argument, NESTED):
            self._trees.append(None)
            self.keys.append(key)
            self.values.append(argument)
            return
        pairs, tree = pytree.tree_flatten_with_path(
            argument, is_leaf=lambda t: not isinstance(t, NESTED)
        )
        self._trees.append(tree)
        self.keys += [(key, pytree.keystr(path)) for path, _ in pairs]
        self.values += [leaf for _, leaf in pairs]

    def _by_values(self) -> list[Any]:
        """Return the keys of floating-point tensors that are no masks."""
        pairs = [
            (k, v)
            for k, v in zip(self.keys, self.values, strict=True)
            if isinstance(v, Tensor) and v.is_floating_point()
        ]
        if len(self.tensors) == 1:
            return [k for k, _ in pairs]
        return [k for k, v in pairs if not _is_mask(_last_word(k), v)]

    def choosing(self, differentiated: Sequence[Any], watched: Sequence[Any] = ()) -> Inputs:
        """Return the same arguments with another choice of the ones to differentiate."""
        return Inputs(self._packed(self.values), differentiated, watched)

    def _packed(self, values: Sequence[Any]) -> Any:
        """Return new arguments with the given values, nested as the present ones."""
        arguments, rest = [], iter(values)
        for tree in self._trees:
            if tree is None:
                arguments.append(next(rest))
            else:
                leaves = [next(rest) for _ in range(tree.num_leaves)]
                arguments.append(pytree.tree_unflatten(leaves, tree))
        return (
            dict(zip(self._arguments, arguments, strict=True)) if self.named else tuple(arguments)
        )

    def take(self, samples: slice) -> Inputs:
        """Return the arguments of some samples."""
        return self.map(lambda t: t[samples])

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the same arguments with every tensor changed."""
        return self.map_named(lambda _, t: change(t))

    def map_named(self, change: Callable[[Any, Tensor], Tensor]) -> Inputs:
        """Return the same arguments with every tensor changed, given its key and value."""
        pairs = zip(self.keys, self.values, strict=True)
        values = [change(k, v) if isinstance(v, Tensor) else v for k, v in pairs]
        return Inputs(self._packed(values), self.differentiated, self.watched)

    def call(self, model: Callable[..., Any]) -> Any:
        """Call ``model`` on these arguments."""
        arguments = self._packed(self.values)
        if self.named:
            return model(**{str(k): v for k, v in arguments.items()})
        return model(*arguments)

    def floats(self, dtype: torch.dtype, besides: Container[torch.dtype] = ()) -> Inputs:
        """Convert floating-point tensors to ``dtype``; precisions in ``besides`` may stay."""

        def converted(t: Tensor) -> Tensor:
            return t.to(dtype) if t.is_floating_point() and t.dtype not in besides else t

        return self.map(converted)

    def at(self, keys: Sequence[Any], floating: bool) -> list[tuple[Any, Tensor]]:
        """Return the tensors with these keys that are, or are not, floating-point tensors."""
        pairs = zip(self.keys, self.values, strict=True)
        return [
            (k, v)
            for k, v in pairs
            if k in keys and isinstance(v, Tensor) and v.is_floating_point() == floating
        ]

    @property
    def precision(self) -> torch.dtype:
        """The precision of a network without parameters: float64 if all inputs are float64."""
        dtypes = {t.dtype for t in self.tensors if t.is_floating_point()}
        return torch.float64 if dtypes == {torch.float64} else torch.float32

    @property
    def floating(self) -> list[Tensor]:
        """The floating-point tensors that derivatives are taken with respect to."""
        return [t for _, t in self.at(self.differentiated, True)]

    @property
    def tokens(self) -> list[tuple[Any, Tensor]]:
        """The integer tensors whose embedding may stand for an input."""
        keys = self.differentiated if self.differentiated else self.keys
        return self.at(keys, False)


def _last_word(key: Any) -> str:
    """Return the name of an argument, or the last key on the path to a nested tensor."""
    return key[1].rstrip("]'\"") if isinstance(key, tuple) else str(key)


def _is_mask(name: str, t: Tensor) -> bool:
    """Whether a tensor is a mask, assuming that there are other tensors."""
    infinite = t.abs() >= LOWEST
    if bool(infinite.any()) and not bool(t[~infinite].any()):
        return True
    if not name.endswith(MASK_ENDINGS) or bool(t.isnan().any()):
        return False
    return bool((t == -torch.inf).any()) or bool(((t == t.min()) | (t == t.max())).all())


ALL_OUTPUTS = "*"

ONE_BATCH = (Tensor, tuple, Mapping)  # anything else is an iterable of batches


def as_list(x: Any) -> Any:
    """Return x in a form that can be read twice: an iterator or a loader becomes a list."""
    return x if isinstance(x, ONE_BATCH) else list(x)


def batches(x: Any) -> Iterator[tuple[Inputs, Any]]:
    """Yield (inputs, targets or None) of each batch; an iterable may give such pairs."""
    if isinstance(x, ONE_BATCH):
        yield Inputs(x), None
        return
    for batch in x:
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            yield Inputs(batch[0]), batch[1]
        elif isinstance(batch, (tuple, list)):
            yield Inputs(tuple(batch)), None
        else:
            yield Inputs(batch), None


def select_output(result: Any, output: Any) -> Tensor:
    """Select the tensor f(x) from the model's result.

    Args:
        result: what the model returned.
        output: a key, an index, an attribute, a function, a tuple of keys and indices that leads
            into a nested result, or "*" for all floating-point tensors of a nested result.
    """
    if callable(output):
        result = output(result)
    elif isinstance(output, str) and output == ALL_OUTPUTS and not isinstance(result, Tensor):
        result = _together(result)
    elif isinstance(output, tuple) and not isinstance(result, Tensor):
        for key in output:
            result = _part(result, key)
    elif output is not None:
        result = _part(result, output)
    if not isinstance(result, Tensor):
        raise FlatlensError(
            f"the model returns a {type(result).__name__}, not a tensor: "
            f"say which part to measure with output=, one of {_choices(result)}, or '*' for all"
        )
    if result.is_complex():
        raise FlatlensError("the output is complex; select a real part with output=")
    return result


def _part(result: Any, key: Any) -> Any:
    """Return one part of a result by its key, index or attribute."""
    try:
        named = isinstance(key, str) and not isinstance(result, Mapping)
        return getattr(result, key) if named else result[key]
    except (KeyError, IndexError, AttributeError, TypeError):
        raise FlatlensError(
            f"the model's result has no output {key!r}; it has {_choices(result)}"
        ) from None


def _together(result: Any) -> Tensor:
    """Concatenate all floating-point tensors of a nested result: [samples, all outputs]."""
    leaves = pytree.tree_leaves(result)
    tensors = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point() and t.dim()]
    if not tensors or len({len(t) for t in tensors}) != 1:
        raise FlatlensError(
            "output='*' needs floating-point tensors with samples first, and all with as many "
            f"samples; the model returns {_choices(result)}"
        )
    return torch.cat([t.reshape(len(t), -1) for t in tensors], 1)


def _choices(result: Any) -> str:
    if isinstance(result, Mapping):
        return ", ".join(repr(k) for k in result)
    if isinstance(result, (tuple, list)):
        return f"0 to {len(result) - 1}"
    return "its tensor attributes, or a function of the result"


def outputs(inputs: Inputs, model: Callable[..., Any], output: Any) -> Tensor:
    """Run the model and return f as [batch, N]."""
    try:
        result = inputs.call(model)
    except MODEL_ERRORS as error:
        if isinstance(error, (FlatlensError, torch.OutOfMemoryError)):
            raise
        shapes = ", ".join(str(tuple(t.shape[1:])) for t in inputs.tensors)
        raise FlatlensError(
            f"the model fails on {counted(inputs.n, 'sample')} of shape {shapes} (the first "
            f"dimension of an input counts samples): {first_line(error)}"
        ) from error
    f = select_output(result, output)
    if f.dim() == 0 or f.shape[0] != inputs.n:
        raise FlatlensError(
            f"the output has shape {tuple(f.shape)} for {counted(inputs.n, 'sample')}: its first "
            "dimension must be the samples (return one output per sample, not a mean)"
        )
    if f.numel() == 0:
        raise FlatlensError("the output has no entries (N = 0)")
    return f.reshape(inputs.n, -1)


def check_alone(
    together: Tensor,
    alone: Tensor,
    again: Callable[[], Tensor],
    precision: torch.dtype | None = None,
) -> None:
    """Raise if the output of a sample depends on the other samples in its batch.

    Args:
        together: the output of the sample in a batch of several.
        alone: the output of the sample in a batch of one.
        again: a function that runs the sample alone once more.
        precision: the precision that the outputs were computed in; None means their own dtype.

    Raises:
        FlatlensError: if the two differ by more than rounding.
    """
    if together.shape != alone.shape or unusual(~closeness(together, alone, precision)):
        raise FlatlensError(COUPLED if close(again(), alone, precision) else RANDOM)


class NotFiniteError(FlatlensError):
    """Raised if a number of a sample is NaN or infinite.

    Args:
        what: the number, such as "output".
        sample: the number of the sample.
    """

    def __init__(self, what: str, sample: int) -> None:
        super().__init__(f"the {what} of sample {sample} is not finite; remove or repair it")
        self.what, self.sample = what, sample


def check_finite(values: Tensor, start: int, what: str) -> None:
    """Raise if an entry is NaN or infinite; the message names the sample."""
    # In blocks, because one mask of all values would take much memory.
    blocks = values.split(100)
    finite = [torch.isfinite(block.reshape(len(block), -1)).all(1) for block in blocks]
    bad = ~torch.cat(finite)
    if unusual(bad.any()):
        raise NotFiniteError(what, start + int(bad.nonzero()[0]))
