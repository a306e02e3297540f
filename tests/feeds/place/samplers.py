"""Samplers as people write them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, TensorDataset
from torch.utils.data import SubsetRandomSampler as Subset
from torch.utils.data import WeightedRandomSampler as Weighted

DATA = TensorDataset(torch.arange(22))


class Own(Sampler[int]):
    """What all of these have: a length, and nothing of torch's."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError


class PythonAsItGoes(Own):
    """Shuffles each bucket of five when it comes to it."""

    def __iter__(self) -> Iterator[int]:
        for start in range(0, 22, 5):
            bucket = list(range(start, min(start + 5, 22)))
            random.shuffle(bucket)
            yield from bucket


class NumpyGlobal(Own):
    def __iter__(self) -> Iterator[int]:
        yield from numpy.random.permutation(22).tolist()


class NumpyOwn(Own):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.generator_of_mine = numpy.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        yield from self.generator_of_mine.permutation(22).tolist()


class PythonOwn(Own):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.dice = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        yield from self.dice.sample(range(22), 22)


class CountsItsEpochs(Own):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.round = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 100 + self.round)
        self.round += 1
        yield from torch.randperm(22, generator=generator).tolist()


class Keeps(Own):
    """Looks at what it drew before."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.drawn: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number in torch.randperm(22).tolist():
            self.drawn.append(number)
            yield number


class Buckets(Own):
    """A batch sampler of its own kind, with indices that are no numbers."""

    def __iter__(self) -> Iterator[Any]:
        for start in torch.randperm(11).tolist():
            yield [(2 * start, "size"), (2 * start + 1, "size")]

    def __len__(self) -> int:
        return 11


def make(kind: str, seed: int) -> DataLoader[Any]:
    """A loader with that sampler, seeded where it has a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    subset, weights = list(range(3, 20)), torch.arange(22) + 1.0
    made: dict[str, dict[str, Any]] = {
        "in order": {},
        "shuffled": {"shuffle": True},
        "shuffled, last dropped": {"shuffle": True, "drop_last": True},
        "generator": {"shuffle": True, "generator": generator},
        "replacement": {"sampler": RandomSampler(DATA, replacement=True, num_samples=50)},
        "replacement, generator": {
            "sampler": RandomSampler(DATA, replacement=True, num_samples=90, generator=generator)
        },
        "weighted": {"sampler": Weighted(weights, 30)},
        "weighted, generator": {"sampler": Weighted(weights, 30, generator=generator)},
        "subset": {"sampler": Subset(subset)},
        "python": {"sampler": PythonAsItGoes()},
        "numpy": {"sampler": NumpyGlobal()},
        "own numpy": {"sampler": NumpyOwn(seed)},
        "own python": {"sampler": PythonOwn(seed)},
        "counts": {"sampler": CountsItsEpochs(seed)},
        "keeps": {"sampler": Keeps()},
        "buckets": {"batch_sampler": Buckets()},
        "list": {"batch_sampler": [[3, 1], [2, 0], [7]]},
        "subclass": {"batch_sampler": BatchSampler(SequentialSampler(DATA), 3, drop_last=True)},
        "unbatched": {"batch_size": None, "sampler": RandomSampler(DATA)},
    }
    settings = made[kind]
    if not {"batch_sampler", "batch_size"} & set(settings):
        settings["batch_size"] = 4
    return DataLoader(DATA, **settings)


KEPT = (
    *("in order", "shuffled", "shuffled, last dropped", "generator", "replacement", "replacement, generator"),
    *("weighted", "weighted, generator", "subset", "python", "numpy", "own numpy", "own python", "counts", "buckets"),
    *("list", "subclass", "unbatched"),
)
