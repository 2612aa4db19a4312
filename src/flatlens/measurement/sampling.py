"""Draw n samples at random from tensors, data sets, loaders or batches.

Every sample has the same chance, no sample is drawn twice, and the drawn samples keep the order of
the data. The seed determines the draw. Drawing leaves no trace: the random number generators of
torch, numpy and Python continue as if nothing had been drawn. The same holds for the generators of
a ``DataLoader`` and of its samplers. If samples can be indexed, only the drawn ones are read.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from flatlens.arguments import no_type_check, whole_number
from flatlens.capture.inputs import Inputs
from flatlens.errors import FlatlensError

Drawn = tuple[Any, Any]
Item = TypeVar("Item")


@no_type_check
def draw(x: Any, y: Any = None, n: int | None = None, seed: int = 0) -> Drawn:
    """Draw n samples at random, without replacement and without touching the global RNG.

    Args:
        x: a tensor, a tuple or dict of tensors with samples first, a torch ``Dataset``, a
            ``DataLoader``, or any iterable of batches. A pair from a data set, a loader or an
            iterable is (inputs, targets). The random augmentation of a data set follows ``seed``.
        y: targets of all samples, in the order of ``x``. None takes the targets in ``x``.
        n: number of samples to draw. None takes all samples.
        seed: seed of the draw.

    Returns:
        (x, y): the inputs as a tensor, tuple or dict with n samples, and their targets or None.
        If batches have samples of different shapes, the result stays a list of (inputs, targets).

    Raises:
        FlatlensError: if n or seed is not a whole number in range, or if there are fewer than n
            samples.

    Example:
        >>> x, y = draw(torch.arange(100.0), torch.arange(100), n=3, seed=0)
        >>> x.tolist() == y.tolist(), len(set(y.tolist()))
        (True, 3)
        >>> batches = ((torch.ones(4, 2), torch.zeros(4)) for _ in range(5))
        >>> x, y = draw(batches, n=6)
        >>> x.shape, y.shape
        (torch.Size([6, 2]), torch.Size([6]))
    """
    if n is not None:
        whole_number("n", n, least=1)
    whole_number("seed", seed, least=0)
    chooser = np.random.default_rng(seed)
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(x)
    if isinstance(x, (Tensor, tuple, Mapping)):
        positions = _choose(Inputs(x).n, n, chooser)
        return select(x, positions), _select_targets(y, positions)
    with _leaving_generators(x, seed):
        if isinstance(x, DataLoader):
            return _from_loader(x, y, n, chooser)
        if isinstance(x, Dataset):
            return _from_dataset(x, y, n, chooser)
        if not isinstance(x, Iterable):
            raise FlatlensError(
                f"x is a {type(x).__name__}; give tensors, a data set, a loader or batches"
            )
        return _from_batches(x, y, n, chooser)


def as_tensor(values: Any) -> Tensor:
    """Return a tensor as it is, and anything else as a tensor on the CPU."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def select(data: Any, positions: Tensor) -> Any:
    """Take the samples at ``positions`` from every tensor of a batch; other values stay.

    >>> select({"a": torch.arange(5), "flag": True}, torch.tensor([0, 3]))
    {'a': tensor([0, 3]), 'flag': True}
    """
    if isinstance(data, Tensor):
        return data[positions.to(data.device)]
    if isinstance(data, np.ndarray):
        return data[positions.numpy()]
    if isinstance(data, Mapping):
        return {key: select(value, positions) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(select(value, positions) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(select(value, positions) for value in data)
    return data


def _choose(count: int, n: int | None, chooser: np.random.Generator) -> Tensor:
    """Choose n of ``count`` positions, in ascending order."""
    if n is None:
        return torch.arange(count, device="cpu")
    if n > count:
        raise FlatlensError(f"n={n} is more than the number of samples, {count}; give a lower n")
    return torch.from_numpy(np.sort(chooser.choice(count, n, replace=False)))


def _select_targets(y: Any, positions: Tensor) -> Any:
    return None if y is None else select(as_tensor(y), positions)


# ------------------------------------------------------------------ data sets and loaders


def _from_dataset(data: Dataset[Any], y: Any, n: int | None, chooser: np.random.Generator) -> Drawn:
    if isinstance(data, IterableDataset):
        items, positions = _reservoir(data, n, chooser)
    else:
        positions = _choose(_length(data), n, chooser)
        items = [data[k] for k in positions.tolist()]
    return _collated(default_collate, items, y, positions)


def _from_loader(
    loader: DataLoader[Any], y: Any, n: int | None, chooser: np.random.Generator
) -> Drawn:
    """Read the loader's data set here, without its workers: an iterator would advance them."""
    data = loader.dataset
    if loader.batch_sampler is None:  # the data set returns whole batches
        batches = data if isinstance(data, IterableDataset) else _fetched(data, loader.sampler)
        return _from_batches(map(loader.collate_fn, batches), y, n, chooser)
    if isinstance(data, IterableDataset):
        items, positions = _reservoir(data, n, chooser)
    else:
        order = _indices(loader)
        positions = _choose(len(order), n, chooser)
        items = [data[order[k]] for k in positions.tolist()]
    return _collated(loader.collate_fn, items, y, positions)


def _fetched(data: Dataset[Any], keys: Iterable[Any]) -> Iterator[Any]:
    for key in keys:
        yield data[key]


def _indices(loader: DataLoader[Any]) -> Sequence[Any]:
    """List the data set's indices that the loader visits in one epoch."""
    sampler = loader.sampler
    everything = range(_length(loader.dataset))
    if type(sampler) is SequentialSampler:
        return everything
    if isinstance(sampler, RandomSampler) and type(sampler) is RandomSampler:
        shuffles_all = not sampler.replacement and sampler.num_samples == len(everything)
        if shuffles_all:
            return everything
    batches: Any = loader.batch_sampler
    return [index for batch in batches for index in batch]


def _length(data: Dataset[Any]) -> int:
    if not isinstance(data, Sized):
        raise FlatlensError(
            f"the data set {type(data).__name__} has no length; give one with __len__"
        )
    return len(data)


def _collated(
    collate: Callable[[list[Any]], Any], items: list[Any], y: Any, positions: Tensor
) -> Drawn:
    if not items:
        raise FlatlensError("x holds no samples; give at least one")
    try:
        x, targets = _split(collate(items))
    except (RuntimeError, TypeError) as error:
        raise FlatlensError(
            f"the samples of the data set cannot be put into one batch ({error}); give a "
            "DataLoader with a collate_fn"
        ) from error
    return x, targets if y is None else _select_targets(y, positions)


# ------------------------------------------------------------------ iterables


def _split(batch: Any) -> Drawn:
    """Split a batch into inputs and targets; anything but a pair has no targets."""
    if isinstance(batch, (tuple, list)):
        return (batch[0], batch[1]) if len(batch) == 2 else (tuple(batch), None)
    return batch, None


class _Lottery:
    """A draw in which every sample gets a random number and the n lowest numbers win.

    The winners of all samples are among the winners of each part, so one pass is enough.
    """

    def __init__(self, n: int | None, chooser: np.random.Generator) -> None:
        self.n, self.chooser = n, chooser
        self.seen = 0
        self.tickets = np.zeros(0)
        self.positions = np.zeros(0, dtype=np.int64)

    def add(self, count: int) -> list[int]:
        """Enter ``count`` more samples; return the indices among old and new samples that stay."""
        tickets = np.concatenate([self.tickets, self.chooser.random(count)])
        positions = np.concatenate([self.positions, np.arange(self.seen, self.seen + count)])
        self.seen += count
        stay = np.sort(np.argsort(tickets, kind="stable")[: self.n])
        self.tickets, self.positions = tickets[stay], positions[stay]
        return stay.tolist()

    def winners(self) -> Tensor:
        """Return the positions of the drawn samples, in ascending order."""
        if self.n is not None and self.seen < self.n:
            raise FlatlensError(
                f"n={self.n} is more than the number of samples, {self.seen}; give a lower n"
            )
        return torch.from_numpy(self.positions)


def _reservoir(
    items: Iterable[Item], n: int | None, chooser: np.random.Generator
) -> tuple[list[Item], Tensor]:
    lottery, drawn = _Lottery(n, chooser), list[Item]()
    for item in items:
        candidates = [*drawn, item]
        drawn = [candidates[k] for k in lottery.add(1)]
    return drawn, lottery.winners()


def _from_batches(x: Iterable[Any], y: Any, n: int | None, chooser: np.random.Generator) -> Drawn:
    lottery = _Lottery(n, chooser)
    drawn: list[Drawn] = []
    for batch in x:
        inputs, targets = _split(batch)
        drawn.append((inputs, None if targets is None else as_tensor(targets)))
        drawn = _cut(drawn, lottery.add)
    positions = lottery.winners()
    if not drawn:
        raise FlatlensError("x holds no batches; give at least one")
    return _joined(drawn, y, positions)


def _cut(drawn: list[Drawn], enter: Callable[[int], list[int]]) -> list[Drawn]:
    """Enter the samples of the last batch, and drop the samples that cannot win."""
    sizes = [Inputs(inputs).n for inputs, _ in drawn]
    stay = torch.tensor(enter(sizes[-1]), dtype=torch.long, device="cpu")
    smaller, start = list[Drawn](), 0
    for batch, size in zip(drawn, sizes, strict=True):
        inside = stay[(stay >= start) & (stay < start + size)] - start
        if len(inside):
            smaller.append(batch if len(inside) == size else select(batch, inside))
        start += size
    return smaller


def _joined(drawn: list[Drawn], y: Any, positions: Tensor) -> Drawn:
    """Join batches into one; batches of different shapes stay a list."""
    given = _select_targets(y, positions)
    try:
        x = _concatenate([inputs for inputs, _ in drawn])
    except (RuntimeError, TypeError, KeyError, ValueError):
        return [batch if y is None else batch[0] for batch in drawn], given
    if y is None and all(targets is not None for _, targets in drawn):
        given = torch.cat([targets for _, targets in drawn])
    return x, given


def _concatenate(values: list[Any]) -> Any:
    like = values[0]
    if isinstance(like, Tensor):
        return torch.cat(values)
    if isinstance(like, Mapping):
        return {key: _concatenate([value[key] for value in values]) for key in like}
    if isinstance(like, (tuple, list)):
        return tuple(_concatenate(list(column)) for column in zip(*values, strict=True))
    return like


# ------------------------------------------------------------------ leaving no trace


@contextlib.contextmanager
def _leaving_generators(x: Any, seed: int) -> Iterator[None]:
    """Seed all random numbers inside the block, and set them back after it."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    generators = {id(g): g for g in _generators(x)}.values()
    states = [generator.get_state() for generator in generators]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            random.seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generators(x: Any) -> Iterator[torch.Generator]:
    """Find the generators of a loader, of its samplers and of its data set."""
    holders = [x]
    for name in ("sampler", "batch_sampler", "dataset"):
        holders.append(getattr(x, name, None))
    holders.append(getattr(getattr(x, "batch_sampler", None), "sampler", None))
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
