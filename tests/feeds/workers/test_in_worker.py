"""SystemExit in a worker arrives as an exception. What it does with batches: test_tried_workers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fastloop.feeds.workers.in_worker import SendsExits


class Exits(Dataset):
    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return sys.exit("no data") if index == self.at else index


def load(at: int, **settings: Any) -> list[torch.Tensor]:
    batches = iter(DataLoader(Exits(at), 4, num_workers=1, worker_init_fn=SendsExits(None), **settings))
    try:
        return list(batches)
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_exit_is_sent_with_its_words(method: str) -> None:
    with pytest.raises(RuntimeError, match="SystemExit: no data"):
        load(5, multiprocessing_context=method)
    assert [batch.tolist() for batch in load(9, multiprocessing_context=method)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_loaders_own_function_is_called() -> None:
    called: list[int] = []
    kind = torch.utils.data._DatasetKind
    before = kind.create_fetcher
    try:
        SendsExits(called.append)(3)
    finally:
        kind.create_fetcher = staticmethod(before)
    assert called == [3]
