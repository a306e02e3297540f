"""Windows of batches as a loader hands them out: each collated by the user's function, concatenated where that goes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, get_worker_info

from fastloop.feeds.batch_tree import BatchWindow, count_rows
from fastloop.feeds.lazy_loader import clone
from fastloop.feeds.window_batches import WindowDataset, WindowSampler, collate_window


class Numbers(Dataset):
    """0, 1, 2 …; in `longer` batches the samples have one number more."""

    fetched = 0

    def __init__(self, count: int = 20, longer: tuple[int, ...] = ()) -> None:
        self.count, self.longer = count, longer

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3 if index // 4 in self.longer else 2,), index)


class Many(Numbers):
    """Fetches several at once, and notes how many."""

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [torch.tensor([index, len(indices)]) for index in indices]


class Stamped:
    """A collate function that stamps each batch with its number of samples and a draw."""

    def __call__(self, members: Any) -> Any:
        return {"x": torch.stack(members), "stamp": torch.rand(1).expand(len(members))}


def windows(dataset: Any, collate: Any, workers: int = 0, concatenates: bool = True, window: int = 2) -> list[Any]:
    loader = DataLoader(dataset, batch_size=4, collate_fn=collate, num_workers=workers)
    sampler = WindowSampler(BatchSampler(SequentialSampler(dataset), 4, drop_last=False), window)
    data = WindowDataset(dataset, collate, concatenates=concatenates)
    return list(clone(loader, {"batch_sampler": sampler, "dataset": data, "collate_fn": collate_window}))


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_is_collated_on_its_own(workers: int) -> None:
    found = windows(Numbers(), Stamped(), workers)
    assert [batch["x"][:, 0].tolist() for batch in found] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    assert [len(batch["stamp"].unique()) for batch in found] == [2, 2, 1]


def test_draws_come_in_the_order_they_came() -> None:
    torch.manual_seed(0)
    plain = [float(batch["stamp"][0]) for batch in DataLoader(Numbers(), batch_size=4, collate_fn=Stamped())]
    torch.manual_seed(0)
    ours = [float(each) for batch in windows(Numbers(), Stamped()) for each in batch["stamp"][::4]]
    assert ours == plain


def test_a_dataset_that_fetches_many_is_asked_batch_by_batch() -> None:
    assert {int(row[1]) for batch in windows(Many(), Stamped()) for row in batch["x"]} == {4}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_concatenated_comes_apart(workers: int) -> None:
    first, second, last = windows(Numbers(longer=(3,)), Stamped(), workers)
    assert isinstance(second, BatchWindow) and [batch["x"].shape for batch in second] == [(4, 2), (4, 3)]
    assert not isinstance(first, BatchWindow) and not isinstance(last, BatchWindow) and count_rows(second) == 8


def test_left_apart_where_asked_and_where_samples_are_dropped() -> None:
    apart = windows(Numbers(), Stamped(), concatenates=False)
    assert [isinstance(each, BatchWindow) for each in apart] == [True, True, False]  # one batch is a batch

    def drop(members: Any) -> torch.Tensor:
        return torch.stack([member for member in members if int(member[0]) != 5])

    first, second, _ = windows(Numbers(), drop)
    assert isinstance(first, BatchWindow) and count_rows(first) == 7 and not isinstance(second, BatchWindow)
    assert count_rows(BatchWindow([torch.ones(2), None])) is None


class Owner(Dataset):
    """Looks at itself in a worker, as a worker_init_fn does."""

    def __init__(self) -> None:
        self.mark = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.mark])


def mark(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Owner)
    info.dataset.mark = 7 + worker


def test_the_stand_in_is_the_dataset_for_whoever_looks_at_it() -> None:
    data = Owner()
    stand_in: Any = WindowDataset(data, torch.stack, concatenates=True)
    assert isinstance(stand_in, Owner) and len(stand_in) == 8 and stand_in[3].tolist() == [3, 0]
    stand_in.mark = 5
    assert data.mark == 5 and not hasattr(stand_in, "nothing")
    again = pickle.loads(pickle.dumps(stand_in))
    assert type(again) is WindowDataset and again.mark == 5
    loader = DataLoader(data, batch_size=4, num_workers=1, worker_init_fn=mark)
    sampler = WindowSampler(BatchSampler(SequentialSampler(data), 4, drop_last=False), 2)
    merged = clone(
        loader,
        {
            "batch_sampler": sampler,
            "dataset": WindowDataset(data, torch.stack, concatenates=True),
            "collate_fn": collate_window,
        },
    )
    assert [batch[:, 1].unique().tolist() for batch in merged] == [[7]]


# -- the sampler --


def batches(samples: int = 20, size: int = 8) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(samples)), size, drop_last=False)


def test_windows_hold_the_same_indices_in_the_same_order() -> None:
    sampler = WindowSampler(batches(), 2)
    assert list(sampler) == [[*range(16)], [*range(16, 20)]] and len(sampler) == 2
    assert list(sampler.sizes) == [(8, 8), (4,)]
    again = pickle.loads(pickle.dumps(list(sampler)))  # as they travel to a worker
    assert [joined.sizes for joined in again] == [(8, 8), (4,)]


def test_sizes_belong_to_the_epoch_that_is_drawn() -> None:
    sampler = WindowSampler(batches(), 2)
    first = iter(sampler)
    next(first)
    assert list(sampler) and list(sampler.sizes) == [(8, 8), (4,)]


@pytest.mark.parametrize(("limit", "expected"), [(None, 3), (1, 1), (2, 1), (3, 2), (5, 3), (99, 3)])
def test_limit_counts_the_loaders_own_batches(limit: int | None, expected: int) -> None:
    sampler = WindowSampler(batches(40), 2, limit)
    assert len(sampler) == len(list(sampler)) == expected
    assert sum(len(window) for window in sampler) == min(40, 8 * (99 if limit is None else limit))


def test_reads_go_to_the_users_sampler() -> None:
    inner = batches()
    sampler = WindowSampler(inner, 2)
    assert sampler.sampler is inner.sampler and sampler.batch_size == 8 and not hasattr(sampler, "set_epoch")


def test_a_resumed_epoch_begins_with_what_is_left_of_a_window() -> None:
    """Behind two of eight batches, in windows of three: one batch, then whole windows; the epoch after it is whole."""
    left, whole = [[number] for number in range(2, 8)], [[number] for number in range(8)]
    windows = WindowSampler(left, 3, 8)
    windows.limit_once, windows.first_once = 6, 1
    assert list(windows) == [[2], [3, 4, 5], [6, 7]]
    windows.inner = whole
    assert list(windows) == [[0, 1, 2], [3, 4, 5], [6, 7]]
