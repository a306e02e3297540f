"""The line that makes batches slow, from batches that a forked process makes, and what is not tried."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from fastloop.feeds.workers import sample_lines
from fastloop.feeds.workers.sample_lines import find_sample_lines
from tests.evidence.sync.test_line_samples import count_up, fit


class Samples(Dataset[Any]):
    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds, self.read = seconds, list[int]()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        count_up(self.seconds)
        return torch.tensor(index)


class Counts(Samples):
    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


class OnlyInWorkers(Samples):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None and info.num_workers == 2
        return super().__getitem__(index)


class Raises(Samples):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(index)


class Opened(Samples):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = path.open("rb")


class Writes(Samples):
    def __getitem__(self, index: int) -> Any:
        Path("/nowhere/at/all").write_bytes(b"")
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(40))


def find(dataset: Any, **settings: Any) -> Any:
    found: list[Any] = []
    loader = DataLoader(dataset, 4, **{"num_workers": 2, "shuffle": not isinstance(dataset, Stream), **settings})
    fit(lambda: found.append(find_sample_lines(loader)))
    assert not multiprocessing.active_children()
    return found[0]


@pytest.mark.parametrize("kind", [Samples, OnlyInWorkers])
def test_the_line_that_takes_the_time_is_named(kind: type[Samples]) -> None:
    (line,) = find(kind())["lines"]
    assert (line["of"], line["function"]) == ("loading", "count_up") and line["share_pct"] > 80


def test_the_parents_dataset_and_random_numbers_stay_as_they_are() -> None:
    data, before = Samples(), torch.get_rng_state()
    assert find(data)["lines"] and torch.equal(torch.get_rng_state(), before)


def test_what_is_not_tried(tmp_path: Path) -> None:
    """The control: the same samples without what forbids it."""
    (tmp_path / "file").touch()
    for dataset in (Counts(), Opened(tmp_path / "file"), Writes(), Stream()):
        assert find(dataset) == {}
    assert find(Samples(), multiprocessing_context="spawn") == {}
    assert find(Samples())["lines"]


def test_a_sample_that_takes_long_is_not_waited_for() -> None:
    began = time.monotonic()
    (line,) = find(Samples(60.0))["lines"]
    assert line["function"] == "count_up" and time.monotonic() - began < 20


def test_samples_that_raise_or_answer_too_late_name_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(Raises()) == {}
    monkeypatch.setattr(sample_lines, "MOST_S", 0.1)
    assert find(Samples()) == {}
