"""Clones of loaders of every kind, and the stand-in that starts late."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, TensorDataset

from fastloop.feeds.lazy_loader import LazyLoader, clone

DATA = TensorDataset(torch.arange(20))


class Named(DataLoader):
    """A loader with a constructor argument that no base knows, hidden from its attributes."""

    def __init__(self, data: Any, secret: int, **settings: Any) -> None:
        super().__init__(data, batch_size=secret, **settings)
        self.note = "mine"


class Chunks(BatchSampler):
    def __init__(self, size: int, extra: str) -> None:
        super().__init__(SequentialSampler(DATA), size, drop_last=False)
        self.extra = extra


class Reversed(Sampler):
    """A batch sampler of its own kind."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([number, number - 1] for number in range(19, 0, -2))

    def __len__(self) -> int:
        return 10


def collate(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples]) * 10


def loaders() -> dict[str, DataLoader[Any]]:
    return {
        "plain": DataLoader(DATA, batch_size=4),
        "shuffled": DataLoader(DATA, batch_size=4, shuffle=True),
        "generator": DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "drop_last": DataLoader(DATA, batch_size=3, drop_last=True),
        "collate": DataLoader(DATA, collate_fn=collate),
        "subclass": Named(DATA, 5),
        "batch_sampler": DataLoader(DATA, batch_sampler=Reversed()),
        "batch_sampler_subclass": DataLoader(DATA, batch_sampler=Chunks(6, "e")),
        "unbatched": DataLoader(DATA, batch_size=None),
        "replacing": DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True, num_samples=7)),
    }


def epochs(loader: Any, count: int = 3) -> list[list[Any]]:
    torch.manual_seed(7)
    return [
        [torch.as_tensor(batch[0] if isinstance(batch, list | tuple) else batch).tolist() for batch in loader]
        for _ in range(count)
    ]


SETTINGS = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False}


@pytest.mark.parametrize("kind", loaders())
def test_clone_with_workers_hands_out_the_same_batches(kind: str) -> None:
    user = loaders()[kind]
    before = dict(vars(user))
    expected = epochs(loaders()[kind])
    twin = clone(user, SETTINGS)
    assert epochs(LazyLoader(twin)) == expected
    assert vars(user) == before and user.num_workers == 0 and type(twin) is type(user)
    assert twin.collate_fn is user.collate_fn and twin.sampler is user.sampler
    if kind == "generator":  # its state is the user's and moves; a second pass must not match by accident
        assert epochs(user) != expected


def test_clone_keeps_what_only_the_subclass_knows() -> None:
    user = Named(DATA, 5, worker_init_fn=print)
    user.later = [1]
    twin = clone(user, {**SETTINGS, "batch_sampler": Chunks(4, "e"), "multiprocessing_context": "fork"})
    assert twin.note == "mine" and twin.later is user.later and twin.worker_init_fn is print
    assert twin.batch_sampler.extra == "e" and user.batch_sampler.batch_size == 5
    assert user.multiprocessing_context is None and twin.multiprocessing_context is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_num_workers_alone_is_the_fault_that_the_clone_avoids() -> None:
    """D1: prefetch_factor stays None where only num_workers is set on a built loader."""
    user = DataLoader(DATA, batch_size=4)
    user.num_workers = 2
    with pytest.raises(TypeError, match="NoneType"):
        list(user)


def test_lazy_forwards_reads_and_writes() -> None:
    inner = DataLoader(DATA, batch_size=4)
    lazy = LazyLoader(inner)
    lazy.worker_init_fn, lazy._iterator, lazy.mine = print, None, 3
    assert inner.worker_init_fn is print and inner.mine == 3 and lazy.mine == 3
    assert len(lazy) == 5 and lazy.dataset is DATA and lazy.sampler is inner.sampler
    assert not hasattr(lazy, "state_dict") and "mine" not in vars(lazy)


def test_lazy_starts_at_the_first_next() -> None:
    class Inner:
        started = 0

        def __iter__(self) -> Iterator[int]:
            type(self).started += 1
            return iter([1, 2])

    iterator = iter(LazyLoader(Inner()))
    assert Inner.started == 0
    assert list(iterator) == [1, 2] and Inner.started == 1


def test_live_iterator_is_not_kept_alive(newborns: Callable[[], list[psutil.Process]]) -> None:
    lazy = LazyLoader(clone(DataLoader(DATA, batch_size=4), SETTINGS))
    iterator = iter(lazy)
    assert lazy.live is None
    next(iterator)
    assert lazy.live is not None and lazy.live() is not None
    assert len(newborns()) >= 2
    del iterator
    gc.collect()
    assert lazy.live() is None


@pytest.mark.parametrize("persistent", [False, True])
def test_numbers_drawn_between_iter_and_next_keep_their_place(persistent: bool) -> None:
    """Lightning calls iter long before the first next, and user hooks in between may draw."""

    def run(loader: Any, lazy: bool) -> list[Any]:
        torch.manual_seed(5)
        seen: list[Any] = []
        for _ in range(3):
            iterator = iter(LazyLoader(loader) if lazy else loader)
            seen.append(torch.rand(2).tolist())
            seen += [batch[0].tolist() for batch in iterator]
            seen.append(torch.rand(2).tolist())
        return seen

    plain = run(DataLoader(DATA, batch_size=4, shuffle=True), lazy=False)
    settings = {**SETTINGS, "persistent_workers": persistent}
    twin = clone(DataLoader(DATA, batch_size=4, shuffle=True), settings)
    assert run(twin, lazy=True) == plain
    eager = clone(DataLoader(DATA, batch_size=4, shuffle=True), settings)
    assert run(eager, lazy=False) != plain  # the control: workers draw the shuffle at iter


def test_an_iter_that_was_a_question_is_taken_back() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    lazy = LazyLoader(DataLoader(DATA, batch_size=4, shuffle=True))
    iter(lazy)
    assert not torch.equal(torch.get_rng_state(), before)
    lazy.take_back()
    assert torch.equal(torch.get_rng_state(), before)
    list(lazy)
    used = torch.get_rng_state()
    lazy.take_back()  # that one was meant
    assert torch.equal(torch.get_rng_state(), used)


def test_worker_seeds_are_those_of_the_eager_loader() -> None:
    class Draws(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(1)

    def run(lazy: bool, keeps: bool) -> list[Any]:
        torch.manual_seed(5)
        loader = DataLoader(Draws(), num_workers=2, persistent_workers=keeps)
        source = LazyLoader(loader, keeps_iterator=keeps) if lazy else loader
        seen = [[float(batch) for batch in source] for _ in range(2)] + [float(torch.rand(1))]
        assert loader.generator is None
        return seen

    assert run(True, False) == run(False, False)
    assert run(True, True) == run(False, True)
    assert run(True, True) != run(True, False)


def test_a_generator_of_the_users_stays_theirs() -> None:
    generator = torch.Generator().manual_seed(3)
    inner = DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)
    list(LazyLoader(inner))
    assert inner.generator is generator
