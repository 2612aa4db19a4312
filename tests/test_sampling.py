"""A draw is uniform, seeded, without replacement, and disturbs no random numbers."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import flatlens as fl
from flatlens.measurement.sampling import draw

x = torch.arange(50)
y = 10 * x


class Stream(IterableDataset):
    def __iter__(self):
        return zip(x, y, strict=True)


class Augmented(Dataset):
    """Noise from all three sources of random numbers."""

    def __len__(self):
        return len(x)

    def __getitem__(self, k):
        return x[k] + torch.rand(()) * np.random.rand() * random.random(), y[k]  # noqa: NPY002


class Batches(Dataset):
    """Whole batches by index."""

    def __len__(self):
        return 5

    def __getitem__(self, k):
        if k >= 5:
            raise IndexError
        return x[10 * k : 10 * k + 10], y[10 * k : 10 * k + 10]


CASES = {
    "tensor": lambda: (x, y),
    "list of targets": lambda: (x, y.tolist()),
    "array": lambda: (x.numpy(), y.numpy()),
    "tuple": lambda: ((x, -x), y),
    "dict": lambda: ({"a": x, "b": -x, "flag": True, "none": None}, y),
    "data set": lambda: (TensorDataset(x, y), None),
    "data set, targets apart": lambda: (TensorDataset(x), y),
    "subset": lambda: (Subset(TensorDataset(x, y), range(50)), None),
    "stream": lambda: (Stream(), None),
    "loader": lambda: (DataLoader(TensorDataset(x, y), 7), None),
    "shuffled loader": lambda: (DataLoader(TensorDataset(x, y), 7, shuffle=True), None),
    "loader of a stream": lambda: (DataLoader(Stream(), 7), None),
    "loader of batches": lambda: (DataLoader(Batches(), batch_size=None), None),
    "loader of a subset": lambda: (
        DataLoader(TensorDataset(x, y), 7, sampler=SubsetRandomSampler(list(range(40)))), None),
    "list of batches": lambda: ([(x[:30], y[:30]), (x[30:], y[30:])], None),
    "list of inputs": lambda: ([x[:30], x[30:]], y),
    "generator": lambda: (((x[k : k + 9], y[k : k + 9]) for k in range(0, 50, 9)), None),
    "batches of dicts": lambda: ([{"a": x[:30], "b": -x[:30]}, {"a": x[30:], "b": -x[30:]}], y),
}  # fmt: skip


def column(inputs):
    """The numbers of the samples, with a check that all inputs are of the same samples."""
    if isinstance(inputs, dict):
        assert torch.equal(inputs["a"], -inputs["b"])
        return inputs["a"]
    if isinstance(inputs, tuple):
        assert len(inputs) == 1 or torch.equal(inputs[0], -inputs[1])
        return inputs[0]
    return inputs


@pytest.mark.parametrize("case", CASES)
def test_a_draw_has_n_samples_with_their_targets(case):
    drawn, targets = draw(*CASES[case](), n=13, seed=3)
    numbers = column(drawn)
    assert len(set(numbers.tolist())) == 13
    assert numbers.tolist() == sorted(numbers.tolist()) or "subset" in case
    assert targets.tolist() == (10 * numbers).tolist()
    again, _ = draw(*CASES[case](), n=13, seed=3)
    assert torch.equal(column(again), numbers)
    other, _ = draw(*CASES[case](), n=13, seed=4)
    assert not torch.equal(column(other), numbers)


@pytest.mark.parametrize("case", CASES)
def test_without_n_all_samples_come_in_order(case):
    if case == "loader of a subset":
        pytest.skip("it holds forty samples, in an order of its own")
    drawn, targets = draw(*CASES[case]())
    assert column(drawn).tolist() == x.tolist()
    assert targets.tolist() == y.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tensor", "data set", "loader", "generator", "stream"])
def test_every_sample_has_the_same_chance(case):
    counts = np.zeros(50)
    for seed in range(400):
        counts[column(draw(*CASES[case](), n=10, seed=seed)[0]).numpy()] += 1
    # chi-squared with 49 degrees of freedom: 400 draws of 10 of 50, variance 400 * 0.2 * 0.8
    assert ((counts - 80) ** 2).sum() / 64 < 85.4  # its quantile at 0.999


def states(*generators):
    numpy = np.random.get_state()  # noqa: NPY002
    return [
        torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2],
        *(g.get_state().tolist() for g in generators),
    ]  # fmt: skip


def test_nothing_random_is_disturbed():
    own, sampler = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    weighted = WeightedRandomSampler([1.0] * 50, 50, replacement=False, generator=sampler)
    loaders = [
        DataLoader(Augmented(), 7, shuffle=True, generator=own),
        DataLoader(Augmented(), 7, sampler=weighted, generator=own),
        DataLoader(Augmented(), 7, shuffle=True),
        Augmented(),
    ]
    before = states(own, sampler)
    for data in loaders:
        draw(data, n=10)
    assert states(own, sampler) == before


def test_random_augmentation_follows_the_seed():
    torch.manual_seed(1)
    first_draw, _ = draw(Augmented(), n=10, seed=5)
    torch.rand(3)
    second_draw, _ = draw(Augmented(), n=10, seed=5)
    assert torch.equal(first_draw, second_draw)


def test_a_loader_with_workers_is_not_started():
    loader = DataLoader(TensorDataset(x, y), 7, num_workers=2, persistent_workers=True)
    draw(loader, n=5)
    assert loader._iterator is None


def test_only_the_drawn_samples_are_read():
    read = []

    class Counting(TensorDataset):
        def __getitem__(self, k):
            read.append(k)
            return super().__getitem__(k)

    draw(DataLoader(Counting(x, y), 7, shuffle=True), n=4)
    assert len(read) == 4


def test_the_collate_function_of_a_loader_is_used():
    def collate(items):
        return {"a": torch.stack([a for a, _ in items]), "b": -torch.stack([a for a, _ in items])}

    drawn, targets = draw(DataLoader(TensorDataset(x, y), 7, collate_fn=collate), n=4)
    assert len(column(drawn)) == 4
    assert targets is None


def test_batches_of_different_shapes_stay_batches():
    ragged = [(torch.ones(4, 3), torch.zeros(4)), (torch.ones(4, 5), torch.ones(4))]
    drawn, targets = draw(ragged, n=6)
    assert targets is None
    assert sum(len(inputs) for inputs, _ in drawn) == sum(len(t) for _, t in drawn) == 6


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "3"], ids=repr)
def test_a_wrong_n_is_refused(n):
    with pytest.raises(fl.FlatlensError, match="n="):
        draw(x, n=n)


@pytest.mark.parametrize("case", CASES)
def test_more_samples_than_there_are_is_refused(case):
    with pytest.raises(fl.FlatlensError, match="n=51 is more than the number of samples"):
        draw(*CASES[case](), n=51)


def test_nothing_to_draw_from_is_refused():
    for nothing in ([], TensorDataset(x[:0])):
        with pytest.raises(fl.FlatlensError, match="holds no"):
            draw(nothing)
    with pytest.raises(fl.FlatlensError, match="x is a float"):
        draw(3.0)
