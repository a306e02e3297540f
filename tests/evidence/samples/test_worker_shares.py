"""Streams that every worker yields whole, and those of which code cannot tell."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from fastloop.evidence.samples.worker_shares import explain_repeats


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number)]) for number in range(12))


class Lines(IterableDataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path, self.kept = path, {"a": [1, 2]}

    def __iter__(self) -> Iterator[torch.Tensor]:
        with self.path.open() as file:
            for line in file:
                yield torch.tensor([float(line)])


class Shares(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        yield from itertools.islice(super().__iter__(), info.id if info else 0, None, info.num_workers if info else 1)


class AsksElsewhere(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return take_share(super().__iter__())


def take_share(stream: Any) -> Any:
    info = get_worker_info()
    return itertools.islice(stream, info.id if info else 0, None, info.num_workers if info else 1)


class Rank(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.islice(super().__iter__(), int(os.environ["WORKER"]), None, 2)


class Drawn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(3)


class Counts(IterableDataset[Any]):
    """All workers take from one counter."""

    def __init__(self) -> None:
        self.next = torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < 12:
            self.next += 1
            yield self.next.clone()


class FromElsewhere(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(psutil.process_iter())


class Imports(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        import psutil as streams

        return iter(streams.process_iter())


class Queued(IterableDataset[Any]):
    def __init__(self) -> None:
        self.queue = multiprocessing.get_context("fork").Queue()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.queue.get, None)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_stream_without_shares_is_named_and_really_comes_as_often(workers: int, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("".join(f"{number}\n" for number in range(12)))
    for dataset in (Stream(), Lines(tmp_path / "lines")):
        loader = DataLoader(dataset, 4, num_workers=workers)
        assert str(explain_repeats(loader)).endswith(
            f" workers may yield all of them: an epoch would then train on every sample {workers} times"
        )
        assert sum(len(batch) for batch in loader) == workers * 12


@pytest.mark.parametrize("make", [Shares, AsksElsewhere, Rank, Drawn, Queued, Counts, FromElsewhere, Imports])
def test_what_may_take_its_share_is_not_accused(make: Any) -> None:
    assert explain_repeats(DataLoader(make(), 4, num_workers=2)) is None


def test_nothing_is_said_of_one_process_of_rows_or_of_workers_that_are_told_their_share() -> None:
    assert explain_repeats(DataLoader(Stream(), 4, num_workers=1)) is None
    assert explain_repeats(DataLoader(Stream(), 4)) is None
    assert explain_repeats(DataLoader(TensorDataset(torch.zeros(4)), 4, num_workers=2)) is None
    assert explain_repeats(DataLoader(Stream(), 4, num_workers=2, worker_init_fn=print)) is None
