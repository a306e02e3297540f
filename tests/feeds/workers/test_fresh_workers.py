"""Workers that stay between epochs do not keep a copy of what was changed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fastloop.feeds.lazy_loader import LazyLoader
from fastloop.feeds.workers import fresh_workers
from fastloop.feeds.workers.fresh_workers import FreshWorkers

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Levels(Dataset):
    def __init__(self) -> None:
        self.level = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.level])


def read(data: Levels, loader: Any) -> tuple[list[Any], list[Any]]:
    """The samples of three epochs, of which the second follows a change; and the processes that made them."""
    torch.manual_seed(3)
    rows, workers = [], []
    for epoch in range(3):
        data.level += epoch == 1
        rows.append([row for batch in loader for row in batch.tolist()])
        iterator = getattr(loader, "_iterator", None)
        workers.append([each.pid for each in iterator._workers] if iterator is not None else [])
    return rows, workers


@pytest.mark.parametrize("looks", [True, False])
def test_they_start_anew_where_the_dataset_has_changed(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not looks:  # the control
        monkeypatch.setattr(fresh_workers.StateMark, "find_change", lambda _: None)
    data, said = Levels(), list[str]()
    loader = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
    fresh = FreshWorkers(tell=said.append)
    ours, pids = read(data, LazyLoader(loader, epochs=fresh.batches))
    plain_data = Levels()
    plain, _ = read(plain_data, DataLoader(plain_data, 4, shuffle=True, num_workers=1))
    assert (ours == plain) is looks
    assert len(said) == looks and (pids[0] != pids[1]) is looks and pids[1] == pids[2]
    del loader._iterator


@pytest.mark.parametrize("is_told", [True, False])
def test_a_callback_that_reads_in_mid_epoch_gets_workers_of_its_own(is_told: bool) -> None:
    def read_twice(loader: Any, callback: list[bool]) -> list[Any]:
        torch.manual_seed(3)
        seen = []
        for _ in range(2):
            for place, batch in enumerate(loader):
                seen.append(batch.tolist())
                if place == 1:
                    callback[0] = True
                    seen.append(next(iter(loader)).tolist())
                    callback[0] = False
        return seen

    callback = [False]
    loader = DataLoader(Levels(), 2, shuffle=True, num_workers=1, persistent_workers=True)
    fresh = FreshWorkers(tell=pytest.fail, is_training=lambda: not (is_told and callback[0]))
    ours = read_twice(LazyLoader(loader, epochs=fresh.batches), callback)
    plain = read_twice(DataLoader(Levels(), 2, shuffle=True, num_workers=1), callback)
    assert (ours == plain) is is_told, "else torch starts the training's own iterator anew"
    assert fresh.kept == 1 + 2 * (not is_told) and loader._iterator is not None
    del loader._iterator
