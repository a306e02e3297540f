"""What batches share with the dataset, as making one twice shows."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from fastloop.bridge.apply import read_facts
from fastloop.evidence.batches.given_batches import UNKNOWN, Shared
from fastloop.feeds.workers import shared_batches
from fastloop.feeds.workers.shared_batches import find_shared
from tests.runs import Net, Run, both, distance

pytestmark = pytest.mark.timeout(120)


class Cloud:
    def __init__(self, pos: Any) -> None:
        self.pos, self.label = pos, "tree"


class Items(Dataset[Any]):
    """Holds what `make` makes; `read` makes a sample of an item."""

    def __init__(self, make: Callable[[int], Any], read: Callable[[Any], Any] = lambda item: item) -> None:
        self.items, self.read = [make(index) for index in range(12)], read

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.read(self.items[index])


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.zeros(12, 3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {"rows": self.rows[index], "name": f"row {index}", "more": self.rows[index].numpy()}


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter((9, 8, 7))

    def __len__(self) -> int:
        return 3


class Streams(IterableDataset[Any]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Any]:
        yield from self.held


@lru_cache
def remember(size: int) -> Any:
    return np.zeros(size)


def make_target(index: int) -> Any:
    return {"boxes": torch.ones(index + 1, 4), "id": index}


def zip_samples(batch: Any) -> Any:
    return tuple(zip(*batch, strict=True))


def take_first(batch: Any) -> Any:
    return batch[0]


def pad(batch: Any) -> Any:
    return {"boxes": pad_sequence([each["boxes"] for each in batch]), "ids": [each["id"] for each in batch]}


def copy_target(target: Any) -> Any:
    return torch.zeros(3), {name: value + 0 for name, value in target.items()}


@pytest.mark.parametrize(
    ("dataset", "collate", "expected"),
    [
        (Items(make_target), list, Shared(tensors=2, containers=1)),
        (Items(make_target), take_first, Shared(tensors=1, containers=0)),
        (Items(make_target, lambda target: (torch.zeros(3), target)), zip_samples, Shared(tensors=3, containers=2)),
        (Items(make_target, lambda target: dict(target)), take_first, Shared(tensors=1)),
        (Items(lambda index: Cloud(np.zeros(3))), take_first, Shared(objects=0)),
        (Items(lambda index: np.zeros(3), lambda rows: Cloud(rows)), take_first, Shared(objects=1)),
        (Items(lambda index: np.zeros(3), torch.from_numpy), list, Shared(tensors=1)),
        (Items(int, lambda index: remember(3)), list, Shared(objects=1)),
        (Rows(), list, Shared(tensors=2, objects=2)),
        (Items(make_target), pad, Shared()),
        (Items(make_target, copy_target), zip_samples, Shared()),
        (Items(str), list, Shared()),
        (Items(str, lambda text: (text, len(text), (1, 2), Path(text))), zip_samples, Shared()),
        (Items(make_target, lambda target: Cloud(target["boxes"].numpy() * 2)), take_first, Shared()),
        (Streams([np.zeros(3)] * 3), list, Shared(objects=1)),
        (Streams("abc"), list, Shared()),
    ],
)
def test_what_batches_share(dataset: Any, collate: Any, expected: Shared) -> None:
    for settings in ({"sampler": Backwards()}, {}) if not isinstance(dataset, Streams) else ({},):
        assert find_shared(DataLoader(dataset, 3, collate_fn=collate, **settings)) == expected
    assert multiprocessing.active_children() == []


def test_samples_are_read_in_another_process() -> None:
    read: list[Any] = []
    assert find_shared(DataLoader(Items(make_target, read.append), 3, collate_fn=list)) == Shared()
    assert read == []


def test_a_loader_without_batches_shares_its_rows() -> None:
    assert find_shared(DataLoader(Rows(), batch_size=None)) == Shared(tensors=1)


def write(item: Any) -> Any:
    Path("/dev/null").write_text("x")
    return item


@pytest.mark.parametrize("read", [write, lambda item: item["missing"], lambda item: time.sleep(9)])
def test_what_cannot_be_found_out(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_batches, "MOST_S", 0.5)
    began = time.monotonic()
    assert find_shared(DataLoader(Items(make_target, read), 3, collate_fn=pad)) == UNKNOWN
    assert time.monotonic() - began < 5 and multiprocessing.active_children() == []


# -- in a training -----------------------------------------------------------------------------------------------------


def stack_and_pass(batch: Any) -> Any:
    return torch.stack([x for x, _, _ in batch]), torch.stack([y for _, y, _ in batch]), [each for _, _, each in batch]


def stack_all(batch: Any) -> Any:
    x, y, more = stack_and_pass(batch)
    return x, y, [np.stack(more)]


class Divides(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, more = batch
        for each in more:
            each /= 2
        return self.loss((x * float(more[0].mean()), y))


def make_pair(index: int) -> Any:
    return torch.full((8,), 0.1 + index / 12), torch.full((1,), index / 12), np.ones(3, np.float32)


def fit_both(collate: Any) -> tuple[Run, Run]:
    def load() -> Any:
        return DataLoader(Items(make_pair), 4, collate_fn=collate)

    return both({"workers": {"count": 2}}, load, Divides, max_epochs=3)


def test_no_workers_are_added_where_training_changes_what_the_dataset_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = fit_both(stack_and_pass)
    why = "Divides.training_step changes its batch, which may be the dataset's own"
    assert distance(plain, ours) == 0 and ours.reason("workers") == f"workers would load from an outdated copy: {why}"
    monkeypatch.setattr(read_facts, "list_batch_changes", lambda *_, **__: ())
    plain, added = fit_both(stack_and_pass)
    assert distance(plain, added) > 0, "the control"


def test_workers_are_added_where_training_changes_copies() -> None:
    plain, ours = fit_both(stack_all)
    assert distance(plain, ours) == 0 and ours.reason("workers") is None


def test_workers_are_not_kept_either() -> None:
    facts = read_facts.read_loader_facts(
        DataLoader(Items(make_pair), 4, collate_fn=stack_and_pass, num_workers=1), others=[Divides()]
    )
    assert facts.may_change == facts.changes_within != ()
