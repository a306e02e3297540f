"""What a sampler draws from: which orders can be drawn again, with one rank and with several."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from fastloop.feeds.place.draws import Draws, explain_lost_place
from tests.feeds.place.samplers import DATA, KEPT, Buckets, NumpyOwn, Own, PythonAsItGoes, make


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(10))


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Twice(DataLoader[Any]):
    def __len__(self) -> int:
        return 2 * super().__len__()


@pytest.mark.parametrize("kind", KEPT)
def test_one_rank(kind: str) -> None:
    assert explain_lost_place(make(kind, 0), 1) is None


@pytest.mark.parametrize(
    ("loader", "ranks", "reason"),
    [
        ([1, 2], 1, "list does not reveal its order"),
        (DataLoader(Stream()), 1, "Stream is an IterableDataset, whose order cannot be drawn again"),
        (Stateful(Stream()), 1, None),
        (Twice(DATA), 1, "Twice has a different number of batches than its sampler"),
        (make("keeps", 0), 1, "sampler.sampler.drawn changes during iteration, and is not a plain value"),
        (make("in order", 0), 2, None),
        (make("shuffled", 0), 2, "each rank draws its own order, and only rank 0's is saved"),
        (
            make("generator", 0),
            2,
            "sampler.sampler.generator is a separate generator on each rank, and only rank 0's is saved",
        ),
        (make("counts", 0), 2, "sampler.sampler.round changes during iteration, and only rank 0's is saved"),
        (
            DataLoader(DATA, sampler=NumpyOwn()),
            2,
            "sampler.sampler.generator_of_mine is a separate generator on each rank, and only rank 0's is saved",
        ),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=1)), 2, None),
        (DataLoader(DATA, batch_sampler=Buckets()), 2, None),  # what it draws is not put back, and the digest tells
    ],
)
def test_reasons(loader: Any, ranks: int, reason: str | None) -> None:
    assert explain_lost_place(loader, ranks) == reason


class NumpyUnseeded(Own):
    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng().permutation(22).tolist()


class NumpySeeded(Own):
    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.seed).permutation(22).tolist()


class PythonUnseeded(Own):
    def __iter__(self) -> Iterator[int]:
        yield from self.shuffle(random.Random())

    def shuffle(self, dice: random.Random) -> list[int]:
        return dice.sample(range(22), 22)


class ByUrandom(PythonUnseeded):
    def __iter__(self) -> Iterator[int]:
        yield from self.shuffle(random.Random(os.urandom(8)))


class ByClock(PythonUnseeded):
    def __iter__(self) -> Iterator[int]:
        yield from self.shuffle(random.Random(time.time_ns()))


class BySystem(PythonUnseeded):
    def __iter__(self) -> Iterator[int]:
        yield from self.shuffle(random.SystemRandom())


class BySecrets(Own):
    def __iter__(self) -> Iterator[int]:
        yield from (secrets.choice(range(22)) for _ in range(22))


class TorchReseeded(Own):
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.seed()
        yield from torch.randperm(22, generator=generator).tolist()


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (NumpyUnseeded(), "default_rng"),
        (NumpySeeded(None), "default_rng"),
        (PythonUnseeded(), "Random"),
        (ByUrandom(), "urandom"),
        (ByClock(), "time_ns"),
        (BySystem(), "SystemRandom"),
        (BySecrets(), "secrets"),
        (TorchReseeded(), "seed"),
    ],
)
def test_what_is_seeded_by_the_system_is_named(sampler: Any, name: str) -> None:
    assert list(sampler) != list(type(sampler)(sampler.seed)), "the control"
    place = f"sampler.sampler ({type(sampler).__qualname__}.__iter__: {name})"
    assert explain_lost_place(DataLoader(DATA, sampler=sampler), 1) == (
        f"{place} draws from the system's randomness, which cannot be drawn again"
    )
    assert explain_lost_place(DataLoader(DATA, sampler=NumpySeeded(3)), 1) is None


def test_of_several_ranks_only_what_they_share_is_read() -> None:
    """Another rank's number, place in the streams or seed must not become this one's."""
    shared = Draws(DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=1, seed=3)), 2).read()
    assert shared["values"] == {"sampler.sampler.seed": 3, "sampler.sampler.epoch": 0}
    own = Draws(DataLoader(DATA, sampler=PythonAsItGoes(5)), 2).read()
    assert own == {"own": {}, "values": {}, "streams": {}}
    alone = Draws(DataLoader(DATA, sampler=PythonAsItGoes(5)), 1).read()
    assert alone["values"] == {"sampler.sampler.seed": 5} and set(alone["streams"]) == {"torch", "random", "numpy"}


def test_a_distributed_sampler_is_put_back_with_its_seed() -> None:
    """Lightning seeds it from the environment, which another seed of the run changes."""

    def sampler(seed: int, epoch: int, rank: int = 0) -> DataLoader[Any]:
        made = DistributedSampler(DATA, num_replicas=2, rank=rank, seed=seed)
        made.set_epoch(epoch)
        return DataLoader(DATA, batch_size=4, sampler=made)

    for rank in (0, 1):
        before, after = sampler(3, 2, rank), sampler(4, 0, rank)
        Draws(after, 2).put_back(Draws(sampler(3, 2), 2).read())
        assert list(after.batch_sampler or ()) == list(before.batch_sampler or ())


def test_between_epochs_the_next_one_is_told_its_number() -> None:
    loader = DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=1, rank=0, seed=3))
    assert Draws(loader, 1).read(between_epochs=True) == {"own": {}, "values": {}, "streams": {}}
    counts = Draws(make("counts", 3), 1).read(between_epochs=True)
    assert counts["values"] == {"sampler.sampler.seed": 3, "sampler.sampler.round": 0} and not counts["streams"]


@pytest.mark.parametrize("persistent", [False, True])
def test_between_epochs_a_loader_draws_from_its_samplers_generator(persistent: bool) -> None:
    """A seed for its workers, unless they have theirs."""
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        DATA,
        sampler=RandomSampler(DATA, generator=generator),
        generator=generator,
        persistent_workers=persistent,
        num_workers=int(persistent),
    )
    saved = Draws(loader, 1).read(between_epochs=True)["own"]["sampler.sampler.generator"]
    assert torch.equal(saved, generator.get_state()) is persistent
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    assert torch.equal(saved, generator.get_state()) is not persistent
