"""Samples that torch rounds differently with one thread are told from those that it does not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fastloop.feeds.workers.read_twice import ReadTwice
from fastloop.feeds.workers.thread_rounding import find_difference, list_adding


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def draw(index: int, count: int = 150_528) -> torch.Tensor:
    return torch.arange(count).add(index).mul(0.37).sin() * 255


def add_up(index: int) -> torch.Tensor:
    x = draw(index)
    return x - x.sum()


def normalize(index: int) -> torch.Tensor:
    return draw(index).sub(127).div(64).view(3, -1).flip(1).clone()


def add_few(index: int) -> torch.Tensor:
    x = draw(index, 3000)
    return x - x.mean()


def add_rows(index: int) -> torch.Tensor:
    x = draw(index).view(-1, 3)
    return x.sum(1)


def sum_up(sample: torch.Tensor) -> int:
    return zlib.crc32(sample.numpy().tobytes())


@pytest.mark.parametrize(("make", "differs"), [(add_up, True), (normalize, False), (add_few, False), (add_rows, False)])
def test_sums_over_many_numbers_differ(make: Callable[[int], torch.Tensor], differs: bool) -> None:
    assert find_difference(lambda index: sum_up(make(index)), range(16), 2) is differs
    assert torch.get_num_threads() == 2, "as before"


def test_what_is_never_the_same_cannot_be_told() -> None:
    assert find_difference(lambda index: sum_up(add_up(index) * torch.rand(())), range(4), 2) is None
    assert find_difference(lambda index: 1 // 0, range(4), 2) is None


def test_samples_that_add_nothing_up_are_made_with_one_thread_only() -> None:
    seen: list[int] = []

    def make(index: int) -> int:
        seen.append(torch.get_num_threads())
        return sum_up(normalize(index))

    assert find_difference(make, range(4), 2) is False and set(seen) == {1}


class Made(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Sums(Made):
    def __getitem__(self, index: int) -> Any:
        return torch.sum(self.make(index))


def test_functions_that_add_up_are_named() -> None:
    assert list_adding(Made(len), None) == () and list_adding(Sums(len), None) == ("Sums.__getitem__",)
    assert list_adding(Made(add_up), None) == ("add_up",)


def ask(dataset: Any, **settings: Any) -> bool | None:
    draw(0).sum()  # torch has started its threads, which a forked process has not
    twice = ReadTwice(DataLoader(dataset, 4), **settings)
    try:
        while (found := twice.find_rounding()) is None and not twice.is_over:
            pass
        return found
    finally:
        twice.end()


@pytest.mark.parametrize(("make", "differs"), [(add_up, True), (normalize, False)])
def test_a_forked_process_tells(make: Any, differs: bool) -> None:
    assert ask(Made(make), compares_threads=True) is differs
    assert ask(Made(make)) is None, "nobody wants to know"
    torch.set_num_threads(1)
    assert ask(Made(make), compares_threads=True) is False, "as many as elsewhere"


def test_samples_that_fail_are_not_known() -> None:
    assert ask(Made(lambda index: 1 / 0), compares_threads=True) is None
