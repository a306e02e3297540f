"""Which datasets only pick rows that are in memory: each that is taken gives the loader's own batches, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fastloop.feeds.rows.engine import RowEngine
from fastloop.feeds.rows.reading import NotRows, read_facts, read_rows
from fastloop.records.facts import RowFacts

N = 23
CPU = torch.device("cpu")


class Held(Dataset[Any]):
    """Rows of all kinds."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(0)
        self.x = torch.randn(N, 3, generator=numbers)
        self.x[4, 1] = float("nan")
        self.images = torch.randint(0, 255, (N, 2, 5, 4), dtype=torch.uint8, generator=numbers)
        self.last = self.images.float().to(memory_format=torch.channels_last)
        self.array = self.x.double().numpy() * 3
        self.grades = np.arange(N, dtype=np.int32)
        self.labels = list(range(N))
        self.weights = [place / 7 for place in range(N)]
        self.names = [str(place) for place in range(N)]
        self.scale = 2.0

    def __len__(self) -> int:
        return N


class Tuples(Held):
    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.labels[index]


class Single(Held):
    def __getitem__(self, index: int) -> Any:
        """One tensor, and no tuple."""
        return self.last[index]


class Dicts(Held):
    def __getitem__(self, idx: int) -> Any:
        x = torch.tensor(self.array[idx], dtype=torch.float32)
        y = self.grades[idx]
        return {"x": x, "more": [self.images[idx].float(), (y, self.weights[idx])], "array": self.array[idx]}


class Converted(Held):
    def __getitem__(self, i: int) -> Any:
        label = torch.tensor(self.labels[i], dtype=torch.long)
        return torch.from_numpy(self.array[i]).float(), label, torch.as_tensor(self.grades[i], dtype=torch.float64)


def follow(dataset: Any) -> list[Any]:
    """The batches of two epochs, without workers."""
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    return [batch for _ in range(2) for batch in loader]


def pick(dataset: Any) -> list[Any]:
    """The same, picked at once."""
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    engine = RowEngine(loader, CPU, 0)
    batches = []
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()  # the seed for workers, which a DataLoader draws
        batches += list(engine.load(0))
    return batches


def flatten(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [("dict", *batch), *(leaf for part in batch.values() for leaf in flatten(part))]
    if isinstance(batch, (list, tuple)):
        return [type(batch), *(leaf for part in batch for leaf in flatten(part))]
    return [(batch.dtype, batch.shape, batch.stride(), batch.contiguous().view(torch.uint8).numpy().tobytes())]


DATASETS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorDataset(Held().x, Held().images, torch.arange(N)),
    "a type that NumPy has not": lambda: TensorDataset(Held().x.bfloat16()),
    "one tensor": lambda: TensorDataset(Held().x),
    "a random split": lambda: torch.utils.data.random_split(TensorDataset(Held().x), [N - 6, 6])[0],
    "a subset of a subset": lambda: Subset(Subset(Tuples(), range(3, 20)), [-1, 5, 5, 0, -16, 2]),
    "tuples": Tuples,
    "single": Single,
    "dicts": Dicts,
    "converted": Converted,
}


@pytest.mark.parametrize("name", DATASETS)
def test_same_batches(name: str) -> None:
    dataset = DATASETS[name]()
    plain, ours = follow(dataset), pick(dataset)
    assert len(plain) == len(ours) > 1
    for one, other in zip(plain, ours, strict=True):
        assert flatten(one) == flatten(other)


def test_a_difference_would_be_seen() -> None:
    shifted = Tuples()
    shifted.x = shifted.x + 1e-7
    assert [flatten(each) for each in follow(Tuples())] != [flatten(each) for each in pick(shifted)]


class Doubled(Held):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] * self.scale, self.labels[index]


class Noisy(Held):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] + torch.randn(3)


class Counting(Held):
    def __getitem__(self, index: int) -> Any:
        self.scale += 1
        return self.x[index]


class Shifted(Held):
    def __getitem__(self, index: int) -> Any:
        return self.x[index - 1]


class Branches(Held):
    def __getitem__(self, index: int) -> Any:
        if index > 3:
            return self.x[index]
        return self.x[0]


class Names(Held):
    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.names[index]


class Property(Held):
    @property
    def rows(self) -> torch.Tensor:
        return self.x + 1

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Whole(Tuples):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Looks(Tuples):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Guessed(Held):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.labels[index])


class OwnTensor(Held):
    def __getitem__(self, index: int) -> Any:
        return FakeTorch.tensor(self.x[index])


class FakeTorch:
    @staticmethod
    def tensor(values: Any) -> Any:
        return values + 1


class MoreTensors(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor[index] + 1 for tensor in self.tensors)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "arithmetic": (Doubled, "Doubled.__getitem__ does more than pick rows: self.x[index] * self.scale"),
    "random": (Noisy, "self.x[index] + torch.randn(3)"),
    "counts": (Counting, "does more than pick rows: self.scale += 1"),
    "another index": (Shifted, "self.x[index - 1]"),
    "branches": (Branches, "if index > 3"),
    "text": (Names, "Names.names is a list, but not of numbers of one kind"),
    "a property": (Property, "Property.rows is not an attribute of the object itself"),
    "whole batches": (Whole, "its __getitem__ is not plain Python"),
    "attributes": (Looks, "Looks defines __getattr__ or __getattribute__"),
    "a type that torch chooses": (Guessed, "torch.tensor(self.labels[index])"),
    "another torch": (OwnTensor, "FakeTorch.tensor(self.x[index])"),
    "a TensorDataset of yours": (lambda: MoreTensors(Held().x), "does more than pick rows"),
    "a gradient": (
        lambda: TensorDataset(torch.ones(3, 2, requires_grad=True)),
        "one of its tensors is not a plain tensor",
    ),
    "a sparse tensor": (lambda: TensorDataset(torch.eye(3).to_sparse()), "one of its tensors is not a plain tensor"),
    "a list": (lambda: [1, 2, 3], "list is not a TensorDataset"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, why = REFUSED[name]
    assert why in str(read_facts(make()))


def test_two_objects_of_one_class_are_read_apart() -> None:
    """What one holds says nothing about the other."""
    odd = Tuples()
    odd.x = odd.names  # type: ignore[assignment]
    assert isinstance(read_facts(Tuples()), RowFacts)
    with pytest.raises(NotRows, match="numbers of one kind"):
        read_rows(odd)


def test_a_class_without_source() -> None:
    space: dict[str, Any] = {"Held": Held}
    exec("class Made(Held):\n    def __getitem__(self, index):\n        return self.x[index]", space)
    assert "the source of Made.__getitem__ cannot be read" in str(read_facts(space["Made"]()))


def test_facts() -> None:
    held = Held()
    assert read_facts(TensorDataset(held.x, held.images)) == RowFacts(what="TensorDataset", count=N, devices=("cpu",))
    assert read_facts(Subset(Tuples(), [1, 2])) == RowFacts(what="Tuples", count=2, devices=("cpu",))
    longer = Tuples()
    longer.labels = longer.labels[:-1]
    assert str(read_facts(longer)) == "Tuples has a length of 23, but a different number of rows"


class Slots:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = Held().x

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.x[index]


class NoLength(Tuples):
    def __len__(self) -> int:
        raise TypeError("nobody asks")


def test_a_class_that_cannot_be_asked() -> None:
    assert "Slots.x is not an attribute" in str(read_facts(Slots()))
    assert "NoLength cannot be read: TypeError: nobody asks" in str(read_facts(NoLength()))


def test_a_method_that_was_wrapped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source is that of the method inside."""
    before = Tuples.__getitem__

    @functools.wraps(before)
    def doubled(self: Tuples, index: int) -> Any:
        return before(self, index) * 2

    monkeypatch.setattr(Tuples, "__getitem__", doubled)
    assert "decorated" in str(read_facts(Tuples()))


KEYS: dict[str, Callable[[], Any]] = {
    "generators": lambda: [(4 * batch + place for place in range(4)) for batch in range(3)],
    "dict keys": lambda: [dict.fromkeys([3, 1, 2]).keys()],
    "tensors": lambda: [torch.tensor([3, 1, 2])],
    "pairs": lambda: [[(place, place % 3) for place in range(6)]],
    "single tensors": lambda: [[torch.tensor(4), torch.tensor(-1)]],
    "masks": lambda: [[True, True]],
}


@pytest.mark.parametrize("name", KEYS)
def test_whatever_a_sampler_yields(name: str) -> None:
    """Torch hands each key to the dataset; only whole numbers are rows."""
    dataset = TensorDataset(Held().x)
    plain = list(DataLoader(dataset, batch_sampler=KEYS[name]()))
    ours = list(RowEngine(DataLoader(dataset, batch_sampler=KEYS[name]()), CPU, 0).load(0))
    assert list(map(flatten, plain)) == list(map(flatten, ours))


def test_a_sampler_that_asks_for_too_much() -> None:
    dataset = TensorDataset(Held().x)
    engine = RowEngine(DataLoader(dataset), CPU, 0)
    for wrong in (N, -N - 1):
        with pytest.raises(IndexError):
            dataset[wrong]
        with pytest.raises(IndexError):
            engine.make([0, wrong])
